"""Tensors as rows: [..., D] as a list of rows of D neighbouring elements, without a copy where strides allow it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_WIDTH = 32768
"""Widest row a program holds in registers: 32 fp32 values of one tensor a thread, with 32 warps."""
_INTERPRETED_MULTIPROCESSORS = 3


class Rows(NamedTuple):
    """Row r of ``tensor`` starts at element (r // inner) * outer_stride + (r % inner) * inner_stride."""

    tensor: Tensor
    number: int
    inner: int
    outer_stride: int
    inner_stride: int

    def arguments(self) -> tuple[Tensor, int, int, int]:
        """What a kernel needs to find a row."""
        return self.tensor, self.inner, self.outer_stride, self.inner_stride


def rows_of(x: Tensor) -> Rows:
    """``x`` [..., D] as rows; copied only if its strides need more than two levels (such as [B, H, T, D] of q)."""
    levels = _levels(x)
    if x.stride(-1) != 1 or len(levels) > 2:
        x = x.contiguous()
        levels = _levels(x)
    number = x.numel() // x.shape[-1] if x.shape[-1] else 0
    if len(levels) == 2:
        (_, outer_stride), (inner, inner_stride) = levels
        return Rows(x, number, inner, outer_stride, inner_stride)
    return Rows(x, number, 1, levels[0][1] if levels else 0, 0)


def _levels(x: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the leading dimensions, outermost first, neighbours that one stride covers merged."""
    levels: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    return levels


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; three for the interpreter, so that its programs share work as well."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def splits_of(per_multiprocessor: int, shares: int, tiles: int, device: torch.device) -> int:
    """Programs that walk one of ``shares`` equal parts of the rows, of ``tiles`` tiles each.

    The sums they leave depend on it, so it depends on shapes and the card alone.
    """
    return max(1, min(multiprocessors(device) * per_multiprocessor // max(shares, 1), tiles))


def samples_of(*weights: Tensor | None) -> int:
    """Samples that have a row of weights of their own: those of [samples, D]; 1 where all share [D]."""
    return max((w.shape[0] for w in weights if w is not None and w.dim() == 2), default=1)


def row_stride(w: Tensor | None) -> int:
    """From one sample's row of weights to the next; 0 where all share one."""
    return w.stride(0) if w is not None and w.dim() == 2 else 0


def dense(w: Tensor) -> Tensor:
    """Weights whose rows are neighbouring elements."""
    return w if w.stride(-1) == 1 else w.contiguous()
