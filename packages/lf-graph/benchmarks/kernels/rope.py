"""Rotary positions of q and k. Liger-Kernel's works in place only, so a repeated call would rotate further: no row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels import REFERENCE, Group, KernelRow, as_float64, compiled, forward_backward
from lf_graph.kernels import rope

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(shape: tuple[int, int, int, int, int], device: torch.device) -> Inputs:
    """q and k [B, T, heads, D] as slices of one projection, bf16; cos and sin fp32 [T, D/2]."""
    batch, tokens, heads, kv, width = shape
    fused = torch.randn(batch, tokens, heads + 2 * kv, width, device=device).bfloat16()
    q, k = fused[:, :, :heads], fused[:, :, heads : heads + kv]
    inverse = 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angle = torch.outer(torch.arange(tokens, device=device), inverse)
    return q.requires_grad_(), k.requires_grad_(), angle.cos(), angle.sin()


def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As the language model of lf-meta writes it."""
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def transformers_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """transformers' operator, with its repeated columns in bf16."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    wide = [t.repeat(1, 2)[None].to(q.dtype) for t in (cos, sin)]
    return apply_rotary_pos_emb(q, k, *wide, unsqueeze_dim=2)


def rows(small: bool) -> list[KernelRow]:
    """The 1.65 B language model, and the VLA's language model with grouped heads."""
    shapes = [(2, 5, 4, 2, 16)] if small else [(8, 2048, 32, 32, 64), (16, 300, 16, 8, 128)]
    return [row for shape in shapes for row in group(shape)]


def group(shape: tuple[int, int, int, int, int]) -> list[KernelRow]:
    """All ways at one shape."""
    batch, tokens, heads, kv, width = shape
    moved = 4 * 2 * batch * tokens * (heads + kv) * width
    g = Group("rope fwd+bwd", f"{batch}x{tokens}x({heads}+{kv})x{width} bf16", bytes=moved, tolerance=2e-2)

    def way(name: str, fn: Callable[[], Callable[..., Any]], exact: bool = False, **fields: Any) -> KernelRow:
        def build(device: torch.device) -> Any:
            made = inputs(shape, device)
            return forward_backward(fn(), *(as_float64(made) if exact else made))

        return g.row(name, build, **fields)

    return [
        way(REFERENCE, lambda: eager, exact=True),
        way("lf-graph", lambda: rope, ours=True),
        way("eager", lambda: eager),
        way("compiled", lambda: compiled(eager)),
        way("transformers", lambda: transformers_rope, needs=("transformers",)),
    ]
