"""What placement raises; every error is a :class:`~lf_hal.errors.HalError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lf_hal.errors import HalError

__all__ = [
    "AffinityUnavailableError",
    "EmulationNotAllowedError",
    "MemoryLimitError",
    "MissingCostError",
    "MissingLinkError",
    "PlacementError",
    "PlanFormatError",
    "PlanMismatchError",
    "PoolError",
    "TrainingPlacementError",
    "UnplaceableError",
]


class PlacementError(HalError):
    """Base class of what is wrong with a pool, a plan, or running one."""


class PoolError(PlacementError, ValueError):
    """A pool that does not hold together, or a device that it has not. Attribute ``device``: its name."""

    def __init__(self, device: str, reason: str) -> None:
        self.device, self.reason = device, reason
        super().__init__(f"device {device!r}: {reason}")


class AffinityUnavailableError(PlacementError):
    """``@hardware`` asks for a device that the pool has not; nothing else is used in its place.

    Attributes: ``what`` (result of the op, or path of the module), ``affinity``, ``pool`` (names of its devices).
    """

    def __init__(self, what: str, affinity: str, pool: Sequence[str]) -> None:
        self.what, self.affinity, self.pool = what, affinity, tuple(pool)
        super().__init__(
            f"{what!r} is marked @hardware({affinity!r}), and the pool has only {', '.join(pool)}: "
            "add such a device to the pool, or take the mark away"
        )


class UnplaceableError(PlacementError):
    """No device that may run an op can. Attributes: ``op`` (its result), ``kind``, ``reasons`` by device."""

    def __init__(self, op: str, kind: str, reasons: Mapping[str, str]) -> None:
        self.op, self.kind, self.reasons = op, kind, dict(reasons)
        listed = "; ".join(f"{device}: {reason}" for device, reason in reasons.items())
        super().__init__(f"{kind} (result {op!r}) runs on no device of the pool ({listed}): add one that can")


class MissingCostError(PlacementError):
    """The table has no cost of an op on a device. Attributes: ``op`` (its result), ``device``, ``signature``."""

    def __init__(self, op: str, device: str, signature: str) -> None:
        self.op, self.device, self.signature = op, device, signature
        super().__init__(
            f"no cost of {op!r} on {device} ({signature}): measure the graph there, or set it by CostTable.set"
        )


class MissingLinkError(PlacementError):
    """No way is known to copy between two memories. Attributes: ``source``, ``target``."""

    def __init__(self, source: str, target: str) -> None:
        self.source, self.target = source, target
        super().__init__(
            f"no link from {source} to {target}, nor by way of the host: measure the links, or give them"
        )


class MemoryLimitError(PlacementError):
    """No placement fits the memories. Attributes: ``limits`` (bytes by memory), ``exact`` (whether all were tried)."""

    def __init__(self, limits: Mapping[str, int], exact: bool) -> None:
        self.limits, self.exact = dict(limits), exact
        listed = ", ".join(f"{space} {nbytes} bytes" for space, nbytes in limits.items())
        fix = "raise a limit or add a device" if exact else "raise max_states, a limit, or add a device"
        super().__init__(f"no placement {'fits' if exact else 'was found that fits'} ({listed}): {fix}")


class PlanFormatError(PlacementError, ValueError):
    """Text that is no plan or no cost table of this version. Attribute ``reason``."""

    def __init__(self, what: str, reason: str) -> None:
        self.what, self.reason = what, reason
        super().__init__(f"this is no {what} of this version: {reason}")


class PlanMismatchError(PlacementError):
    """A plan and a graph that it was not made for. Attributes: ``expected`` and ``found``, digests of graphs."""

    def __init__(self, expected: str, found: str) -> None:
        self.expected, self.found = expected, found
        super().__init__(
            f"the plan is of a graph with digest {expected[:12]}, this one has {found[:12]}: plan it anew"
        )


class EmulationNotAllowedError(PlacementError):
    """A segment would run under an emulator. Attributes: ``device``, ``target``."""

    def __init__(self, device: str, target: str) -> None:
        self.device, self.target = device, target
        super().__init__(
            f"device {device}: target {target} is of another machine and would run under an emulator here: "
            "give allow_emulated=True if results, not times, are wanted"
        )


class TrainingPlacementError(PlacementError):
    """A module that cannot be placed for training. Attributes: ``what`` (path or name), ``reason``."""

    def __init__(self, what: str, reason: str) -> None:
        self.what, self.reason = what, reason
        super().__init__(f"{what!r} cannot be placed: {reason}")
