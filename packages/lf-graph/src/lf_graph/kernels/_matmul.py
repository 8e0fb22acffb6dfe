"""Matrix products into given memory, with a wider result than operands where asked."""

from __future__ import annotations

import torch
from torch import Tensor


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
    elif a.device.type == "cuda":
        # Takes a summand that is wider than the factors since torch 2.10 (pytorch#167931).
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
