"""Where the border between small and large buckets lies, from what both ways took; pure, so all ranks agree."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timed:
    """One averaged bucket: its bytes, whether the way for small ones took it, and the seconds."""

    nbytes: int
    small: bool
    seconds: float


@dataclass(frozen=True)
class SizeTimes:
    """Medians of one size of bucket; seconds by the ways for small and for large ones."""

    nbytes: int
    small_s: float
    large_s: float


def by_size(samples: Iterable[Timed]) -> tuple[SizeTimes, ...]:
    """Sizes that both ways took at least once, ascending."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    for one in samples:
        found.setdefault(one.nbytes, ([], []))[0 if one.small else 1].append(one.seconds)
    return tuple(
        SizeTimes(nbytes, statistics.median(small), statistics.median(large))
        for nbytes, (small, large) in sorted(found.items())
        if small and large
    )


def best_cut(times: Iterable[SizeTimes]) -> int:
    """Bytes from which on a bucket counts as large, so that one of each size takes the least time.

    0: all are large; one byte more than the largest: all are small. Of equally good cuts the lowest.
    """
    sizes = sorted(times, key=lambda one: one.nbytes)
    cuts = [0, *(one.nbytes + 1 for one in sizes)]
    cost = {cut: sum(one.small_s if one.nbytes < cut else one.large_s for one in sizes) for cut in cuts}
    return min(cuts, key=cost.__getitem__)
