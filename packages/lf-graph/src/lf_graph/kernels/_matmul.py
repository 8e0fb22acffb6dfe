"""Matrix products into given memory, with a wider result than operands where asked."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_SLICE = 8192  # rows of a temporary product where the library cannot add to float32: 64 MB at 2048 columns


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b for a [m, k], b [k, n], out [m, n] of any dtype; float32 of narrower factors is not rounded."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.device.type == "cuda" and out.dtype == torch.float32:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    else:
        wide = torch.promote_types(a.dtype, out.dtype)
        out.copy_(torch.mm(a.to(wide), b.to(wide)))


def add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b; ``out`` has the dtype of the factors, or is float32."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif a.device.type != "cuda":
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
    elif _adds_to(out.dtype, a.dtype, a.device):
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        for part, rows in zip(out.split(_SLICE), a.split(_SLICE), strict=True):
            part.add_(torch.ops.aten.mm.dtype(rows, b, out.dtype))


@functools.cache
def _adds_to(wide: torch.dtype, narrow: torch.dtype, device: torch.device) -> bool:
    """Whether ``addmm`` here takes a summand wider than the factors: early versions of its ``out_dtype`` refuse it."""
    out = torch.zeros(16, 16, dtype=wide, device=device)
    factor = torch.zeros(16, 16, dtype=narrow, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(out, factor, factor, wide, out=out)
    except RuntimeError:
        return False
    return True
