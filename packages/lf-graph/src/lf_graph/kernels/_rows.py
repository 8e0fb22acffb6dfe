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
