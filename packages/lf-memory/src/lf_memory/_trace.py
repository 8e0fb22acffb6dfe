"""Safety mode: who acquired and released a slot, and was it written past its end or after its release.

It fills a slot and compares it once for each lease, and keeps one page free behind each slot, so it is off unless
`safety=True` or LOONGFORGE_DEBUG_MEMORY=1 asks for it when the pool is made.
"""

import os
import sys
from collections import deque
from dataclasses import dataclass
from types import FrameType

import numpy as np
import numpy.typing as npt

POISON = 0xDB
_KEEP = 4096  # events; a few MB of strings at most
_FRAMES = 6
_OWN_DIR = os.path.dirname(__file__)


@dataclass(frozen=True)
class TraceEvent:
    """One step in the life of a slot.

    Attributes:
        action: "acquire", "release" or "collect".
        index: number of the slot; of a range, its first page.
        stack: file:line of the callers outside this package, nearest first, six at most.
    """

    action: str
    index: int
    stack: tuple[str, ...]

    @property
    def site(self) -> str:
        """file:line of the nearest caller."""
        return self.stack[0]


def wanted(safety: bool | None) -> bool:
    """`safety` itself, or what LOONGFORGE_DEBUG_MEMORY says for None."""
    if safety is not None:
        return safety
    return os.environ.get("LOONGFORGE_DEBUG_MEMORY", "") not in ("", "0")


def call_stack() -> tuple[str, ...]:
    """file:line of the callers outside this package, nearest first."""
    at: FrameType | None = sys._getframe(1)
    while at is not None and at.f_code.co_filename.startswith(_OWN_DIR):
        at = at.f_back
    found: list[str] = []
    while at is not None and len(found) < _FRAMES:
        found.append(f"{at.f_code.co_filename}:{at.f_lineno}")
        at = at.f_back
    return tuple(found) or ("an unknown place",)


class Tracer:
    """Bounded log of slot events; where each slot was last acquired and released is kept for ever."""

    def __init__(self) -> None:
        self._events: deque[TraceEvent] = deque(maxlen=_KEEP)
        self._last: dict[tuple[str, int], TraceEvent] = {}

    def note(self, action: str, index: int) -> None:
        """Record an event at the caller's place."""
        event = TraceEvent(action, index, call_stack())
        self._events.append(event)
        self._last[action, index] = event

    def events(self) -> tuple[TraceEvent, ...]:
        """Recorded events, oldest first; the oldest are forgotten beyond 4096."""
        return tuple(self._events)

    def last(self, action: str, index: int) -> str:
        """Where the newest such event of a slot came from: "a.py:3 < b.py:7", or "an unknown place"."""
        event = self._last.get((action, index))
        return " < ".join(event.stack) if event is not None else "an unknown place"


def poison(memory: npt.NDArray[np.uint8]) -> None:
    """Fill memory that nobody holds with 0xDB, so that stale readers see garbage, not plausible data."""
    memory.fill(POISON)


def first_write(memory: npt.NDArray[np.uint8]) -> int | None:
    """Offset of the first byte that is no longer poison, or None."""
    changed = memory != POISON
    return int(changed.argmax()) if changed.any() else None
