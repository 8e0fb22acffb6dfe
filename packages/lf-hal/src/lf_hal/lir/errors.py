"""What the intermediate form raises; every error is a :class:`~lf_hal.errors.HalError`."""

from __future__ import annotations

from lf_hal.errors import HalError

__all__ = [
    "BadConstantError",
    "BadOpError",
    "BadRecipeError",
    "BadTypeError",
    "DuplicateValueError",
    "InvalidGraphError",
    "LirError",
    "LirSyntaxError",
    "MalformedError",
    "OpRuleError",
    "TypeMismatchError",
    "UndefinedValueError",
    "UnknownKindError",
]


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


class LirSyntaxError(LirError):
    """Text that is no graph. Attributes: ``line`` and ``column``, both from 1, and ``reason``."""

    def __init__(self, line: int, column: int, reason: str) -> None:
        self.line, self.column, self.reason = line, column, reason
        super().__init__(f"line {line}, column {column}: {reason}")


class InvalidGraphError(LirError):
    """Base class of what :func:`~lf_hal.lir.verify` finds.

    Attributes:
        op: kind of the op or recipe it was found at, None outside of them.
        value: name of the value it is about, None if it is about the graph.
        reason: what is wrong, in words.
    """

    def __init__(self, reason: str, *, op: str | None = None, value: str | None = None) -> None:
        self.op, self.value, self.reason = op, value, reason
        where = " ".join(p for p in (op and f"op {op}", value is not None and f"value %{value}") if p)
        super().__init__(f"{where or 'graph'}: {reason}")


class MalformedError(InvalidGraphError):
    """A field holds something of another Python type, or a name of other characters than names have."""


class BadTypeError(InvalidGraphError):
    """An element type that does not exist, or a shape that is none."""


class DuplicateValueError(InvalidGraphError):
    """Two values of one name."""


class UndefinedValueError(InvalidGraphError):
    """A name that no value before it has."""


class UnknownKindError(InvalidGraphError):
    """An op or recipe kind that does not exist."""


class BadOpError(InvalidGraphError):
    """Inputs or attributes that the rule of the op's kind does not allow."""


class TypeMismatchError(InvalidGraphError):
    """An output's type is not the one that its op has. Attribute ``expected``: the one it should be, as text."""

    def __init__(self, found: str, expected: str, *, op: str, value: str) -> None:
        self.expected = expected
        super().__init__(f"is declared {found}, but {op} gives {expected}", op=op, value=value)


class BadConstantError(InvalidGraphError):
    """Data of a constant that its type cannot hold."""


class BadRecipeError(InvalidGraphError):
    """A recipe that reads something other than weights, or breaks the rule of its kind."""
