"""Routes and plain loops that the tests of the grouped kernels share."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from kernel_cases import DEVICE
from torch import Tensor

from lf_graph._moe_route import sort_by_expert


class Route(NamedTuple):
    """Where tokens go: as :class:`lf_graph._moe_route.Routing`."""

    tokens: Tensor
    rows: Tensor
    offsets: Tensor


def route(count: int, experts: int, top_k: int, dropped: float = 0.0, seed: int = 0, idle: int = 0) -> Route:
    """Random experts for each token, none for a share of them; the last ``idle`` experts have no row."""
    g = torch.Generator().manual_seed(seed)
    chosen = torch.rand(count, experts - idle, generator=g).argsort(dim=1)[:, :top_k]
    keep = torch.rand(count, generator=g) >= dropped
    order, rows, offsets = sort_by_expert(chosen.to(DEVICE), experts, keep.to(DEVICE))
    return Route(order // top_k, rows, offsets)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of size one over the square root of the depth, as weights have."""
    scale = shape[-2] ** -0.5 if len(shape) == 3 and shape[-2] else 1.0
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_()


def offsets_of(*counts: int) -> Tensor:
    """int32 end rows."""
    return torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)


def loop_product(x: Tensor, weights: Tensor, offsets: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Expert by expert; rows of none are zero."""
    picked, ends = x if tokens is None else x[tokens], [0, *offsets.tolist()]
    done = [picked[a:b] @ w for a, b, w in zip(ends, ends[1:], weights, strict=False)]
    return torch.cat((*done, picked.new_zeros(picked.shape[0] - ends[-1], weights.shape[2])))


def loop_experts(x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor, r: Route) -> Tensor:
    """Mixtral's loop; autograd sums the rows of a token."""
    gate, up = loop_product(x, gate_up, r.offsets, r.tokens).chunk(2, dim=-1)
    rows = loop_product(F.silu(gate) * up * weight[:, None], down, r.offsets)
    return rows[r.rows].sum(dim=1)


def precisions() -> list[str]:
    """How float32 is multiplied: as torch is by default, and after each of three settings that override each other."""
    from lf_graph.kernels._grouped_gemm_launch import _precision

    found = [_precision()]
    torch.set_float32_matmul_precision("high")
    found.append(_precision())
    torch.backends.cuda.matmul.allow_tf32 = False
    found.append(_precision())
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    return [*found, _precision()]
