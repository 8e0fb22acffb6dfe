"""Where variable allocations lie in a range of units: best fit, neighbours joined. Pure bookkeeping.

Best fit keeps large holes whole for large requests (Wilson et al., "Dynamic Storage Allocation", 1995).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Self


class BestFit:
    """Free ranges of [0, size). O(holes) for a change, O(log holes) for a search."""

    def __init__(self, size: int) -> None:
        self._by_start: dict[int, int] = {}  # start -> length
        self._by_end: dict[int, int] = {}  # end -> start
        self._by_length: list[tuple[int, int]] = []  # (length, start), sorted
        self.free = 0
        self._add(0, size)

    @classmethod
    def around(cls, size: int, live: Iterable[tuple[int, int]]) -> Self:
        """The holes between live (start, length) ranges, which do not overlap."""
        fit, end = cls(0), 0
        for start, length in [*sorted(live), (size, 0)]:
            fit._add(end, start - end)
            end = start + length
        return fit

    @property
    def largest(self) -> int:
        """Length of the longest hole; 0 when there is none."""
        return self._by_length[-1][0] if self._by_length else 0

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """(start, length) of every hole, by start."""
        return tuple(sorted(self._by_start.items()))

    def take(self, length: int) -> int | None:
        """Start of a new range of `length` >= 1 in the shortest hole that holds it, the lowest of equals."""
        at = bisect_left(self._by_length, (length, 0))
        if at == len(self._by_length):
            return None
        hole, start = self._by_length[at]
        self._remove(start)
        self._add(start + length, hole - length)
        return start

    def give(self, start: int, length: int) -> None:
        """Free a range; it joins the holes it touches."""
        end = start + length
        before = self._by_end.get(start)
        if before is not None:
            self._remove(before)
            start = before
        if end in self._by_start:
            end += self._remove(end)
        self._add(start, end - start)

    def _add(self, start: int, length: int) -> None:
        if length == 0:
            return
        self._by_start[start] = length
        self._by_end[start + length] = start
        insort(self._by_length, (length, start))
        self.free += length

    def _remove(self, start: int) -> int:
        length = self._by_start.pop(start)
        del self._by_end[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        self.free -= length
        return length
