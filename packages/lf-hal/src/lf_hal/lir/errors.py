"""What the intermediate form raises; every error is a :class:`~lf_hal.errors.HalError`."""

from __future__ import annotations

from lf_hal.errors import HalError

__all__ = ["LirError", "OpRuleError"]


class LirError(HalError):
    """Base class of what is wrong with a graph, or with making one."""


class OpRuleError(LirError):
    """Inputs or attributes that the rule of an op kind does not allow.

    Attributes:
        kind: the op kind.
        reason: what is wrong, in words.
    """

    def __init__(self, kind: str, reason: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__(f"{kind}: {reason}")
