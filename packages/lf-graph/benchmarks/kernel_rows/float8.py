"""float8_linear: rounding and 8-bit products, beside the bfloat16 product it replaces."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_rows import REFERENCE, Group, KernelRow, as_float64, compiled, forward_backward
from lf_graph.kernels import float8_linear


def inputs(count: int, depth: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Activations and a weight."""
    x = torch.randn(count, depth, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(columns, depth, device=device) * depth**-0.5).bfloat16()
    return x, weight.requires_grad_()


def by_tensor(x: Tensor, weight: Tensor) -> Tensor:
    """One scale a tensor."""
    return float8_linear(x, weight)


def by_row(x: Tensor, weight: Tensor) -> Tensor:
    """One scale a row."""
    return float8_linear(x, weight, scaling="row")


def rows(small: bool) -> list[KernelRow]:
    """Layers of the 1.65 B language model, B=8."""
    found = []
    for count, depth, columns in [(40, 32, 48)] if small else [(16384, 2048, 5632), (16384, 5632, 2048)]:
        make = functools.partial(inputs, count, depth, columns)
        flops = 6 * count * depth * columns
        # 8 bits hold 3 digits of the fraction, 2 in gradients: each product is some 6 % off, their sum less
        group = Group("float8_linear fwd+bwd", f"{count}x{depth}x{columns}", flops=flops, tolerance=0.15)
        found += [
            group.row(REFERENCE, lambda d, m=make: forward_backward(F.linear, *as_float64(m(d)))),
            group.row("lf-graph by tensor", lambda d, m=make: forward_backward(by_tensor, *m(d)), ours=True),
            group.row("lf-graph by row", lambda d, m=make: forward_backward(by_row, *m(d)), ours=True),
            group.row("bf16", lambda d, m=make: forward_backward(F.linear, *m(d))),
            group.row("bf16, compiled", lambda d, m=make: forward_backward(compiled(F.linear), *m(d))),
        ]
    return found
