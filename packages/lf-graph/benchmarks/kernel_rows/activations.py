"""swiglu and gelu_tanh: bound by memory; dropout is left out, for every way drops other elements."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_rows import REFERENCE, Group, KernelRow, as_float64, compiled, forward_backward
from lf_graph.kernels import gelu_tanh, swiglu


def halves(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """gate and up of a feed-forward."""
    gate, up = (torch.randn(rows, columns, device=device).bfloat16().requires_grad_() for _ in range(2))
    return gate, up


def packed(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """gate and up of experts in one tensor, and the router's weight of each row."""
    gate_up = torch.randn(rows, 2 * columns, device=device).bfloat16().requires_grad_()
    return gate_up, torch.rand(rows, device=device).requires_grad_()


def biased(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a linear layer without bias gives, and its bias."""
    x = torch.randn(rows, columns, device=device).bfloat16().requires_grad_()
    return x, torch.randn(columns, device=device).bfloat16().requires_grad_()


def eager_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As the models of lf-meta write it."""
    return F.silu(gate) * up


def eager_weighted(gate_up: Tensor, weight: Tensor) -> Tensor:
    """As ``MoE`` writes it: computed in float32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up * weight[:, None]).to(gate_up.dtype)


def exact_weighted(gate_up: Tensor, weight: Tensor) -> Tensor:
    """The same without a rounding."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up * weight[:, None]


def eager_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """As the diffusion transformer of lf-meta writes it."""
    return F.gelu(x + bias, approximate="tanh")


def our_weighted(gate_up: Tensor, weight: Tensor) -> Tensor:
    """The weight in the same kernel."""
    return swiglu(gate_up, weight=weight)


def liger_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Liger-Kernel's operator."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    out: Tensor = LigerSiLUMulFunction.apply(gate, up)
    return out


def rows(small: bool) -> list[KernelRow]:
    """Sizes of the 1.65 B language model, of its mixture of experts, and of the diffusion transformer."""
    return [*_swiglu_rows(small), *_weighted_rows(small), *_gelu_rows(small)]


def _swiglu_rows(small: bool) -> list[KernelRow]:
    found = []
    for count, columns in [(9, 48)] if small else [(16384, 5632), (512, 5632)]:
        make = functools.partial(halves, count, columns)
        moved = (3 + 5) * count * columns * 2
        group = Group("swiglu fwd+bwd", f"{count}x{columns} bf16", bytes=moved, tolerance=2e-2)
        found += [
            group.row(REFERENCE, lambda d, m=make: forward_backward(eager_swiglu, *as_float64(m(d)))),
            group.row("lf-graph", lambda d, m=make: forward_backward(swiglu, *m(d)), ours=True),
            group.row("eager", lambda d, m=make: forward_backward(eager_swiglu, *m(d))),
            group.row("compiled", lambda d, m=make: forward_backward(compiled(eager_swiglu), *m(d))),
            group.row(
                "liger",
                lambda d, m=make: forward_backward(liger_swiglu, *m(d)),
                needs=("liger_kernel",),
                cuda_only=True,
            ),
        ]
    return found


def _weighted_rows(small: bool) -> list[KernelRow]:
    found = []
    for count, columns in [(9, 48)] if small else [(32768, 1024), (1024, 1024)]:
        make = functools.partial(packed, count, columns)
        moved = (3 + 5) * count * columns * 2
        group = Group("swiglu weighted fwd+bwd", f"{count}x{columns} bf16", bytes=moved, tolerance=2e-2)
        found += [
            group.row(REFERENCE, lambda d, m=make: forward_backward(exact_weighted, *as_float64(m(d)))),
            group.row("lf-graph", lambda d, m=make: forward_backward(our_weighted, *m(d)), ours=True),
            group.row("eager", lambda d, m=make: forward_backward(eager_weighted, *m(d))),
            group.row("compiled", lambda d, m=make: forward_backward(compiled(eager_weighted), *m(d))),
        ]
    return found


def _gelu_rows(small: bool) -> list[KernelRow]:
    found = []
    for count, columns in [(9, 48)] if small else [(816, 6144), (16384, 6144)]:
        make = functools.partial(biased, count, columns)
        moved = (2 + 3) * count * columns * 2
        group = Group("gelu_tanh+bias fwd+bwd", f"{count}x{columns} bf16", bytes=moved, tolerance=2e-2)
        found += [
            group.row(REFERENCE, lambda d, m=make: forward_backward(eager_gelu, *as_float64(m(d)))),
            group.row("lf-graph", lambda d, m=make: forward_backward(gelu_tanh, *m(d)), ours=True),
            group.row("eager", lambda d, m=make: forward_backward(eager_gelu, *m(d))),
            group.row("compiled", lambda d, m=make: forward_backward(compiled(eager_gelu), *m(d))),
        ]
    return found
