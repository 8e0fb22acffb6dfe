"""Sums over rows that many programs share: each writes its partial sum, and one kernel adds them in a fixed order.

No atomics: the same inputs give the same bits, whatever the order in which programs run.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# Triton has no types, and its kernels take no annotations but constexpr.

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import wrap_triton

from lf_graph.kernels._interpreter import cast, tl, triton

# Few programs read many partial sums each: 16 loads in flight a thread hide the latency of memory.
_BLOCK_COLUMNS, _BLOCK_SPLITS = 32, 128


@triton.jit
def add_partials(partials, sums, splits, D: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    """sums[s] = partials[s].sum(0): partials fp32 [sums, splits, D], sums [sums, D]."""
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    which = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([SPLITS, COLUMNS], tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        places = (which * splits + split)[:, None] * D + columns[None, :]
        total += tl.load(
            partials + places, mask=(split < splits)[:, None] & (columns < D)[None, :], other=0.0
        )
    out = cast(tl.sum(total, axis=0), sums.dtype.element_ty)
    tl.store(sums + which * D + columns, out, mask=columns < D)


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., splits, D] fp32 partial sums to [..., D] in ``dtype``, added in a fixed order."""
    *leading, splits, width = partials.shape
    width = int(width)
    sums = torch.empty(*leading, width, dtype=dtype, device=partials.device)
    grid = (sums.numel() // max(width, 1) * triton.cdiv(width, _BLOCK_COLUMNS),)
    if grid[0]:
        wrap_triton(add_partials)[grid](
            partials, sums, splits, D=width, SPLITS=_BLOCK_SPLITS, COLUMNS=_BLOCK_COLUMNS, num_warps=8
        )
    return sums
