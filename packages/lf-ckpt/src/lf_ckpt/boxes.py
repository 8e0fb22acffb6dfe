"""Boxes of elements inside a tensor: what a shard covers. Pure integer geometry, no limit on the number of dimensions.

A box is an offset and a length per dimension. Elements of a box are in row-major order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Final, NamedTuple

MAX_SPLIT_DIMS: Final = (
    8  # of one tensor; meshes have two or three, and the cover check costs 2 ** dims per box
)


class Box(NamedTuple):
    """`offsets[d] .. offsets[d] + shape[d]` in every dimension d."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share; None when that is nothing."""
    offsets, shape = [], []
    for at, length, other_at, other_length in zip(*a, *b, strict=True):
        begin, end = max(at, other_at), min(at + length, other_at + other_length)
        if begin >= end:
            return None
        offsets.append(begin)
        shape.append(end - begin)
    return Box(tuple(offsets), tuple(shape))


def relative(box: Box, origin: Sequence[int]) -> Box:
    """The same box seen from `origin`."""
    return Box(tuple(at - zero for at, zero in zip(box.offsets, origin, strict=True)), box.shape)


def cover_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not hold every element of a tensor exactly once; None when they do.

    An empty tensor is covered by one box of its own shape. Counts signed corners: adding up the corners of all boxes
    leaves those of the whole tensor if and only if every element is covered once, so n boxes cost n * 2**d and no pair
    is ever compared.
    """
    full = whole(shape)
    if any(len(box.offsets) != len(shape) or len(box.shape) != len(shape) for box in boxes):
        return "a shard has another number of dimensions"
    if full.volume == 0 or not shape:
        return None if list(boxes) == [full] else "an empty or 0-dim tensor has one shard, itself"
    if any(box.volume == 0 for box in boxes):
        return "a shard is empty"
    split = [d for d in range(len(shape)) if any((b.offsets[d], b.shape[d]) != (0, shape[d]) for b in boxes)]
    if len(split) > MAX_SPLIT_DIMS:
        return f"split along more than {MAX_SPLIT_DIMS} dimensions"
    count: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        _add_corners(count, box, split, 1)
    _add_corners(count, full, split, -1)
    return "shards overlap, leave a hole or lie outside" if any(count.values()) else None


def _add_corners(count: Counter[tuple[int, ...]], box: Box, dims: Iterable[int], sign: int) -> None:
    edges = [((box.offsets[d], 1), (box.offsets[d] + box.shape[d], -1)) for d in dims]
    for corner in product(*edges):
        count[tuple(at for at, _ in corner)] += sign * math.prod(s for _, s in corner)


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, Box]]:
    """Elements `begin .. end` of a row-major tensor as boxes, each a run of its own: (first element, box).

    At most 2 d - 1 boxes for d dimensions: the head of a row, whole rows, and the tail, dimension by dimension.
    """
    if begin >= end:
        return
    if not shape:
        yield begin, Box((), ())
        return
    row = math.prod(shape[1:])
    first, inside = divmod(begin, row)
    last, rest = divmod(end, row)
    if first == last:
        yield from _in_row(shape, first, inside, rest)
        return
    if inside:
        yield from _in_row(shape, first, inside, row)
        first += 1
    if first < last:
        yield first * row, Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
    if rest:
        yield from _in_row(shape, last, 0, rest)


def _in_row(shape: Sequence[int], index: int, begin: int, end: int) -> Iterator[tuple[int, Box]]:
    row = math.prod(shape[1:])
    for at, box in boxes_of_range(shape[1:], begin, end):
        yield index * row + at, Box((index, *box.offsets), (1, *box.shape))
