"""Debug mode: who acquired and released a slot, and was it written after its release.

Switched on by LOONGFORGE_DEBUG_MEMORY=1 when the pool is made. It costs one fill and one comparison of
the slot for each lease, so it is off otherwise.
"""

import os
import sys
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

POISON = 0xDB
_KEEP = 4096  # events; about 1 MB of strings at most
_OWN_DIR = os.path.dirname(__file__)


@dataclass(frozen=True)
class TraceEvent:
    """One step in the life of a slot: `action` is "acquire", "release" or "collect"; `site` is file:line."""

    action: str
    index: int
    site: str


def enabled() -> bool:
    """Whether LOONGFORGE_DEBUG_MEMORY asks for debug mode."""
    return os.environ.get("LOONGFORGE_DEBUG_MEMORY", "") not in ("", "0")


def call_site() -> str:
    """file:line of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_DIR):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Tracer:
    """Bounded log of slot events plus the poison check."""

    def __init__(self) -> None:
        self._events: deque[TraceEvent] = deque(maxlen=_KEEP)

    def note(self, action: str, index: int) -> None:
        """Record an event at the caller's site."""
        self._events.append(TraceEvent(action, index, call_site()))

    def events(self) -> tuple[TraceEvent, ...]:
        """Recorded events, oldest first; the oldest are forgotten beyond 4096."""
        return tuple(self._events)

    def last_site(self, action: str, index: int) -> str:
        """Site of the newest such event of a slot, or "an unknown place"."""
        found = (e.site for e in reversed(self._events) if e.action == action and e.index == index)
        return next(found, "an unknown place")


def poison(slot: npt.NDArray[np.uint8]) -> None:
    """Fill a released slot with 0xDB so that stale readers see garbage, not plausible data."""
    slot.fill(POISON)


def first_write(slot: npt.NDArray[np.uint8]) -> int | None:
    """Offset of the first byte that is no longer poison, or None."""
    changed = slot != POISON
    return int(changed.argmax()) if changed.any() else None
