"""Where variable allocations lie in ranges of units: best fit, neighbours joined. Pure bookkeeping.

Best fit keeps large holes whole for large requests (Wilson et al., "Dynamic Storage Allocation", 1995).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Self

Range = tuple[int, int]  # (start, length)


class BestFit:
    """Free ranges inside extents; none spans two. O(holes) for a change, O(log holes) for a search."""

    def __init__(self, extents: Iterable[Range] = ()) -> None:
        self._by_start: dict[int, int] = {}  # start -> length
        self._by_end: dict[int, int] = {}  # end -> start
        self._by_length: list[Range] = []  # (length, start), sorted
        self._extents: set[int] = set()  # their starts
        self.free = 0
        for start, length in extents:
            self.add_extent(start, length)

    @classmethod
    def around(cls, extents: Iterable[Range], live: Iterable[Range]) -> Self:
        """The holes that live ranges, which lie inside extents and do not overlap, leave there."""
        fit, taken = cls(), sorted(live)
        for start, length in sorted(extents):
            fit._extents.add(start)
            at, end = start, start + length
            inside = taken[bisect_left(taken, (start, 0)) : bisect_left(taken, (end, 0))]
            for used, used_length in [*inside, (end, 0)]:
                fit._add(at, used - at)
                at = used + used_length
        return fit

    @property
    def largest(self) -> int:
        """Length of the longest hole; 0 when there is none."""
        return self._by_length[-1][0] if self._by_length else 0

    @property
    def holes(self) -> tuple[Range, ...]:
        """(start, length) of every hole, by start."""
        return tuple(sorted(self._by_start.items()))

    def add_extent(self, start: int, length: int) -> None:
        """A new range to allocate from, apart from the others."""
        self._extents.add(start)
        self._add(start, length)

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
        """Free a range; it joins the holes it touches in its extent."""
        end = start + length
        if start not in self._extents and start in self._by_end:
            start = self._by_end[start]
            self._remove(start)
        if end not in self._extents and end in self._by_start:
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
