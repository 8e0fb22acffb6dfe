"""How a value lies in memory: a buffer, an offset, and a stride per axis. Permutes, slices and broadcasts cost nothing.

A layout is no property of an operator here: NHWC is the view of a [B,C,H,W] value whose strides ascend as C, W, H, B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

__all__ = ["NHWC", "View", "dense", "memory_order"]

NHWC = (0, 2, 3, 1)


@dataclass(frozen=True)
class View:
    """``shape`` elements of ``dtype`` in ``buffer``; offset and strides count elements, stride 0 repeats."""

    buffer: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def is_dense(self, order: Sequence[int]) -> bool:
        """Whether the elements lie without gaps, the axes in ``order`` from the slowest to the fastest."""
        step = 1
        for axis in reversed(order):
            if self.shape[axis] != 1 and self.strides[axis] != step:
                return False
            step *= self.shape[axis]
        return True

    def permute(self, perm: Sequence[int]) -> View:
        return replace(
            self, shape=tuple(self.shape[i] for i in perm), strides=tuple(self.strides[i] for i in perm)
        )

    def slice(self, axis: int, start: int, count: int, step: int) -> View:
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + start * strides[axis]
        shape[axis], strides[axis] = count, strides[axis] * step
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)

    def broadcast(self, shape: Sequence[int]) -> View:
        lead = len(shape) - len(self.shape)
        pairs = zip(shape[lead:], self.shape, self.strides, strict=True)
        strides = tuple(stride if size == own else 0 for size, own, stride in pairs)
        return replace(self, shape=tuple(shape), strides=(0,) * lead + strides)

    def reshape(self, shape: Sequence[int]) -> View | None:
        """The same memory under another shape, or None if no strides say that."""
        strides = _reshaped(self.shape, self.strides, shape)
        return None if strides is None else replace(self, shape=tuple(shape), strides=strides)


def dense(buffer: str, dtype: str, shape: Sequence[int], order: Sequence[int] | None = None) -> View:
    """A view that fills ``buffer``, its axes in memory in ``order`` (as they stand, if None)."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order if order is not None else range(len(shape))):
        strides[axis] = step
        step *= shape[axis]
    return View(buffer, dtype, tuple(shape), tuple(strides))


def memory_order(view: View) -> tuple[int, ...]:
    """Axes from the slowest to the fastest; axes of one element, and equal strides, as they stand."""
    real = [a for a, n in enumerate(view.shape) if n != 1]
    real.sort(key=lambda a: (-view.strides[a], a))
    rest = iter(real)
    return tuple(next(rest) if n != 1 else a for a, n in enumerate(view.shape))


def _reshaped(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of ``wanted``: runs of old axes that are dense together are cut into runs of new axes."""
    if prod(shape) == 0:
        return dense("", "", wanted).strides
    runs: list[tuple[int, int]] = []  # elements, stride of the fastest axis
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    found = [0] * len(wanted)
    axis = len(wanted) - 1
    for elements, step in reversed(runs):
        left = elements
        while left > 1:
            while wanted[axis] == 1:
                axis -= 1
            if left % wanted[axis]:
                return None
            found[axis] = step
            step *= wanted[axis]
            left //= wanted[axis]
            axis -= 1
    return tuple(found)
