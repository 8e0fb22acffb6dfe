"""How many batches are read ahead: a fixed number, or one that follows the waits that were measured."""

import logging
import time
from dataclasses import dataclass, replace
from typing import Protocol

from ._errors import LoaderError
from .engine import MAX_FLYING

_log = logging.getLogger("lf_iouring")

WINDOW = 32  # batches between two decisions
_STALL = 0.05  # a wait longer than this part of a step is a stall; the trainer feels less only in sum
_HELPED = 0.9  # a larger depth has to bring the mean wait below this part of what it was
_CALM = 16  # windows without a stall before one batch less is tried; doubles when that was wrong
_HOLD = 64  # windows without a try after a larger depth did not help; doubles too
_MOST_PATIENCE = 4096
# Bounds of an automatic depth: batches, and bytes of the slots that have to be there for the most of them.
_LEAST, _START, _MOST, _MOST_BYTES = 2, 4, 32, 256 << 20


@dataclass(frozen=True)
class Decision:
    """The controller between two batches; `after` gives the next one.

    At the end of each window of batches: a stall in it asks for half as many batches more, which is taken back
    when the mean wait did not fall (then the disk is the limit, not its jitter); long calm asks for one less.

    Attributes:
        depth: batches to read ahead, low <= depth <= high.
        low, high: bounds.
        reason: why the depth is what it is.
        batches, stalls, waited: of the window so far; waited in seconds.
        before: depth and mean wait before the last growth, while it is on trial.
        calm, patience: windows without a stall, and how many are needed to try one batch less.
        hold, penalty: windows until the next growth may be tried, and the hold after the next failure.
        shrunk: whether the last change was one batch less.
    """

    depth: int
    low: int
    high: int
    reason: str = "the start"
    batches: int = 0
    stalls: int = 0
    waited: float = 0.0
    before: tuple[int, float] | None = None
    calm: int = 0
    patience: int = _CALM
    hold: int = 0
    penalty: int = _HOLD
    shrunk: bool = False

    def after(self, wait_s: float, step_s: float) -> "Decision":
        """After a batch for which the caller waited `wait_s` of the `step_s` seconds since the last one."""
        seen = replace(
            self,
            batches=self.batches + 1,
            stalls=self.stalls + (wait_s > _STALL * step_s),
            waited=self.waited + wait_s,
        )
        return seen if seen.batches < WINDOW else seen._decided()

    def _decided(self) -> "Decision":
        mean = self.waited / self.batches
        fresh = replace(self, batches=0, stalls=0, waited=0.0, before=None, hold=max(0, self.hold - 1))
        if self.before is not None and mean > _HELPED * self.before[1] and self.stalls:
            return fresh._taken_back(self.before, mean)
        if not self.stalls:
            return fresh._calmer()
        if self.depth == self.high or fresh.hold:
            return replace(fresh, calm=0)
        grown = min(self.high, self.depth + max(1, self.depth // 2))
        return replace(
            fresh,
            depth=grown,
            before=(self.depth, mean),
            calm=0,
            shrunk=False,
            patience=min(_MOST_PATIENCE, self.patience * 2) if self.shrunk else self.patience,
            reason=f"{self.stalls} of {self.batches} steps waited, {mean * 1e3:.2f} ms on average",
        )

    def _taken_back(self, before: tuple[int, float], mean: float) -> "Decision":
        return replace(
            self,
            depth=before[0],
            calm=0,
            hold=self.penalty,
            penalty=min(_MOST_PATIENCE, self.penalty * 2),
            reason=f"{self.depth} did not help: {mean * 1e3:.2f} ms of wait after {before[1] * 1e3:.2f}",
        )

    def _calmer(self) -> "Decision":
        if self.calm + 1 < self.patience or self.depth == self.low:
            return replace(self, calm=min(self.calm + 1, _MOST_PATIENCE))
        reason = f"no step waited in {self.patience * WINDOW}"
        return replace(self, depth=self.depth - 1, calm=0, shrunk=True, reason=reason)


class Depth(Protocol):
    """What a pipeline asks before it reads ahead.

    Attributes:
        value: batches to read ahead now.
        bounds: the least and the most it can be.
        origin: where it comes from.
        changes: how often it changed.
    """

    value: int
    bounds: tuple[int, int]
    origin: str
    changes: int

    def observe(self, wait_s: float) -> None:
        """The caller has just waited so long for a batch."""


def depth_of(asked: int | str, slot_bytes: int, most: int) -> Depth:
    """The depth for a `prefetch_factor`; more than `most` is cut to it.

    Raises LoaderError for what is no depth.
    """
    if asked == "auto" or (asked == 0 and asked is not False):
        return AutoDepth(_START, _LEAST, min(most, max(_START, min(_MOST, _MOST_BYTES // slot_bytes))))
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked < MAX_FLYING:
        raise LoaderError(
            f"prefetch_factor={asked!r}: it must be an integer in 1..{MAX_FLYING - 1}, or 'auto' (or 0)"
        )
    if asked > most:
        return FixedDepth(
            most, f"prefetch_factor={asked}, cut to {most}: more reads than an engine holds at a time"
        )
    return FixedDepth(asked, "prefetch_factor")


class FixedDepth:
    """The number that was asked for, or what it was cut to; see Depth."""

    def __init__(self, value: int, origin: str) -> None:
        self.value, self.bounds, self.origin, self.changes = value, (value, value), origin, 0

    def observe(self, wait_s: float) -> None:
        """See Depth."""


class AutoDepth:
    """A depth between bounds that follows the waits; every change is logged. See Depth."""

    def __init__(self, start: int, low: int, high: int) -> None:
        self._decision = Decision(min(max(start, low), high), low, high)
        self.value, self.bounds, self.changes = self._decision.depth, (low, high), 0
        self.origin = f"follows the waits, {low} to {high}"
        self._last: float | None = None

    def observe(self, wait_s: float) -> None:
        """See Depth."""
        now = time.perf_counter()
        last, self._last = self._last, now
        if last is None:
            return  # the first batch was not read ahead
        self._decision = self._decision.after(wait_s, now - last)
        if self._decision.depth != self.value:
            _log.info("prefetch depth %d -> %d: %s", self.value, self._decision.depth, self._decision.reason)
            self.value = self._decision.depth
            self.changes += 1
