"""Grouped products and whole experts, beside torch's grouped_mm and the loop over experts.

Sizes are those of the mixture of experts of lf-meta: 32 experts of 2048 x 1024, top-2, 16384 tokens (B=8) or 512 (B=1).
The loop knows the counts on the host, which a step would have to wait for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_rows import REFERENCE, Group, KernelRow, as_float64, compiled, forward_backward
from lf_graph._moe_experts import grouped_mm, weighted_swiglu
from lf_graph._moe_route import gather_sum, sort_by_expert, spread
from lf_graph.kernels import grouped_experts, grouped_gemm

Places = tuple[Tensor, Tensor, Tensor]


def places(count: int, experts: int, top_k: int, device: torch.device) -> Places:
    """tokens, rows and offsets of random routes."""
    chosen = torch.rand(count, experts, device=device).argsort(dim=1)[:, :top_k]
    order, rows, offsets = sort_by_expert(chosen, experts, None)
    return order // top_k, rows, offsets


def product_inputs(
    count: int, experts: int, depth: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sorted by expert, weights and offsets."""
    offsets = places(count // 2, experts, 2, device)[2]
    x = torch.randn(count, depth, device=device).bfloat16().requires_grad_()
    weights = (torch.randn(experts, depth, columns, device=device) * depth**-0.5).bfloat16()
    return x, weights.requires_grad_(), offsets


def loop(x: Tensor, weights: Tensor, ends: Sequence[int]) -> Tensor:
    """A product for each expert."""
    return torch.cat([x[a:b] @ w for a, b, w in zip([0, *ends], ends, weights, strict=False)])


def looped(inputs: tuple[Tensor, Tensor, Tensor], exact: bool = False) -> tuple[Tensor, Tensor, list[int]]:
    """Inputs of the loop, with ends read back before anything is timed."""
    x, weights, offsets = as_float64(inputs) if exact else inputs
    return x, weights, offsets.tolist()


def expert_inputs(
    count: int, experts: int, hidden: int, ffn: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Tokens, weights of the experts, and of the router, routes."""
    x = torch.randn(count, hidden, device=device).bfloat16().requires_grad_()
    gate_up = (torch.randn(experts, hidden, 2 * ffn, device=device) * hidden**-0.5).bfloat16()
    down = (torch.randn(experts, ffn, hidden, device=device) * ffn**-0.5).bfloat16()
    weight = torch.rand(2 * count, device=device)
    route = places(count, experts, 2, device)
    return x, gate_up.requires_grad_(), down.requires_grad_(), weight.requires_grad_(), *route


def ours(
    x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor, tokens: Tensor, rows: Tensor, offsets: Tensor
) -> Tensor:
    """One operator."""
    return grouped_experts(x, gate_up, down, weight, offsets, tokens, rows)


def stock(
    x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor, tokens: Tensor, rows: Tensor, offsets: Tensor
) -> Tensor:
    """``MoE`` on torch's grouped product: rows are copied in and added out."""
    hidden = weighted_swiglu(grouped_mm(spread(x, tokens, rows), gate_up, offsets), weight)
    return gather_sum(grouped_mm(hidden, down, offsets), tokens, rows)


def exact_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor, tokens: Tensor, rows: Tensor, offsets: Tensor
) -> Tensor:
    """Expert by expert."""
    ends = offsets.tolist()
    gate, up = loop(x[tokens], gate_up, ends).chunk(2, dim=-1)
    return loop(F.silu(gate) * up * weight[:, None], down, ends)[rows].sum(dim=1)


def rows(small: bool) -> list[KernelRow]:
    """Products alone, and experts with all that surrounds them."""
    return [*_product_rows(small), *_expert_rows(small)]


def _product_rows(small: bool) -> list[KernelRow]:
    found = []
    sizes = (
        [(40, 3, 32, 48)]
        if small
        else [(32768, 32, 2048, 2048), (32768, 32, 1024, 2048), (1024, 32, 2048, 2048)]
    )
    for count, experts, depth, columns in sizes:
        make = functools.partial(product_inputs, count, experts, depth, columns)
        moved = 3 * 2 * (count * (depth + columns) + experts * depth * columns)
        shape = f"{count} rows, {experts} x {depth} x {columns} bf16"
        group = Group(
            "grouped_gemm fwd+bwd", shape, bytes=moved, flops=6 * count * depth * columns, tolerance=2e-2
        )
        found += [
            group.row(REFERENCE, lambda d, m=make: forward_backward(loop, *looped(m(d), exact=True))),
            group.row("lf-graph", lambda d, m=make: forward_backward(grouped_gemm, *m(d)), ours=True),
            group.row("torch grouped_mm", lambda d, m=make: forward_backward(grouped_mm, *m(d))),
            group.row("loop over experts", lambda d, m=make: forward_backward(loop, *looped(m(d)))),
        ]
    return found


def _expert_rows(small: bool) -> list[KernelRow]:
    found = []
    for count, experts, hidden, ffn in (
        [(20, 3, 32, 24)] if small else [(16384, 32, 2048, 1024), (512, 32, 2048, 1024)]
    ):
        make = functools.partial(expert_inputs, count, experts, hidden, ffn)
        weights = 3 * experts * hidden * ffn
        moved = 2 * (3 * weights + 4 * count * hidden + 2 * count * 12 * ffn)
        shape = f"{count} tokens, top-2 of {experts} x {hidden} x {ffn} bf16"
        flops = 6 * 2 * count * 3 * hidden * ffn
        group = Group("grouped_experts fwd+bwd", shape, bytes=moved, flops=flops, tolerance=4e-2)
        found += [
            group.row(REFERENCE, lambda d, m=make: forward_backward(exact_experts, *as_float64(m(d)))),
            group.row("lf-graph", lambda d, m=make: forward_backward(ours, *m(d)), ours=True),
            group.row("grouped_mm", lambda d, m=make: forward_backward(stock, *m(d))),
            group.row("grouped_mm, compiled", lambda d, m=make: forward_backward(compiled(stock), *m(d))),
        ]
    return found
