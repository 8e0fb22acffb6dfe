"""Where intermediate values lie: lifetimes to offsets in one block of memory. A pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ALIAS", "ALIGNMENT", "Arena", "Lifetime", "aligned", "padded", "plan_arena"]

ALIGNMENT = 64
"""Bytes: a cache line of every target, and the widest vector."""

ALIAS = 4096
"""Bytes after which addresses fall on the same sets of a first-level cache of 64 sets, and loads wait for stores."""


@dataclass(frozen=True)
class Lifetime:
    """A value of ``nbytes`` that is written in step ``first`` and read for the last time in step ``last``.

    Both steps count: what a step reads and what it writes are alive together, so they never share a byte.
    """

    name: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Arena:
    """Offsets in bytes by name, all multiples of :data:`ALIGNMENT`, and the bytes needed in all."""

    offsets: Mapping[str, int]
    nbytes: int


def aligned(nbytes: int) -> int:
    """``nbytes``, at least one, rounded up to :data:`ALIGNMENT`."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def padded(nbytes: int) -> int:
    """Aligned, and one line more for a multiple of :data:`ALIAS`, so that neighbours do not begin in the same set."""
    size = aligned(nbytes)
    return size + ALIGNMENT if size % ALIAS == 0 else size


def plan_arena(lifetimes: Sequence[Lifetime], *, padding: bool = False) -> Arena:
    """Place every value, largest first, in the smallest gap between those already placed that live with it.

    With ``padding``, sizes are those of :func:`padded`.

    Equal inputs give equal plans. Values that are alive in a common step never overlap.

    Raises:
        ValueError: two values have one name, a size is negative, or a life ends before it begins.
    """
    if len({v.name for v in lifetimes}) != len(lifetimes):
        raise ValueError("two values of one name in an arena")
    for v in lifetimes:
        if v.nbytes < 0 or v.last < v.first:
            raise ValueError(f"{v} has no sensible size or life")
    order = sorted(lifetimes, key=lambda v: (-v.nbytes, v.first, v.name))
    placed: list[tuple[int, int, Lifetime]] = []  # begin, end, value; sorted by begin
    offsets: dict[str, int] = {}
    for value in order:
        size = padded(value.nbytes) if padding else aligned(value.nbytes)
        offset = _smallest_gap(size, [p for p in placed if _overlap(p[2], value)])
        offsets[value.name] = offset
        placed.append((offset, offset + size, value))
        placed.sort(key=lambda p: p[0])
    return Arena(offsets, max((end for _, end, _ in placed), default=0))


def _overlap(a: Lifetime, b: Lifetime) -> bool:
    return a.first <= b.last and b.first <= a.last


def _smallest_gap(size: int, neighbours: Sequence[tuple[int, int, Lifetime]]) -> int:
    best: tuple[int, int] | None = None
    end = 0
    for begin, stop, _ in neighbours:
        gap = begin - end
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, end)
        end = max(end, stop)
    return best[1] if best else end
