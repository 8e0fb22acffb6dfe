"""Rotary positions of q and k, alone and behind the norms of heads.

Liger-Kernel's rotation works in place only, so a repeated call would rotate further: no row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_rows import REFERENCE, Group, KernelRow, as_float64, compiled, forward_backward
from lf_graph.kernels import qk_norm_rope, rms_norm, rope

Shape = tuple[int, int, int, int, int]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(shape: Shape, device: torch.device) -> Inputs:
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


def with_weights(shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
    """The same with the norms' weights, bf16 [D], behind q and k."""
    q, k, *angles = inputs(shape, device)
    weights = (torch.randn(shape[-1], device=device).bfloat16().requires_grad_() for _ in range(2))
    return q, k, *weights, *angles


def eager_normed(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """As the Qwen3 layer of lf-meta writes it."""
    return eager(F.rms_norm(q, q.shape[-1:], v, 1e-6), F.rms_norm(k, k.shape[-1:], w, 1e-6), cos, sin)


def apart(q: Tensor, k: Tensor, v: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Our kernels one after another."""
    return rope(rms_norm(q, v), rms_norm(k, w), cos, sin)


def rows(small: bool) -> list[KernelRow]:
    """The 1.65 B language model, and the VLA's language model with grouped heads."""
    if small:
        return [*group((2, 5, 4, 2, 16)), *normed_group((2, 5, 4, 2, 16))]
    qwen = (16, 300, 16, 8, 128)
    return [*group((8, 2048, 32, 32, 64)), *group(qwen), *normed_group(qwen)]


def group(shape: Shape) -> list[KernelRow]:
    """All ways of the rotation at one shape."""
    way = ways("rope fwd+bwd", shape, inputs)
    return [
        way(REFERENCE, lambda: eager, exact=True),
        way("lf-graph", lambda: rope, ours=True),
        way("eager", lambda: eager),
        way("compiled", lambda: compiled(eager)),
        way("transformers", lambda: transformers_rope, needs=("transformers",)),
    ]


def normed_group(shape: Shape) -> list[KernelRow]:
    """All ways of norm and rotation at one shape."""
    way = ways("qk_norm_rope fwd+bwd", shape, with_weights)
    return [
        way(REFERENCE, lambda: eager_normed, exact=True),
        way("lf-graph", lambda: qk_norm_rope, ours=True),
        way("lf-graph, two kernels", lambda: apart, ours=True),
        way("eager", lambda: eager_normed),
        way("compiled", lambda: compiled(eager_normed)),
    ]


def ways(
    op: str, shape: Shape, make: Callable[[Shape, torch.device], tuple[Tensor, ...]]
) -> Callable[..., KernelRow]:
    """A function that makes a row of a group: q and k are read and written twice, read once more for a norm."""
    batch, tokens, heads, kv, width = shape
    passes = 5 if make is with_weights else 4
    moved = passes * 2 * batch * tokens * (heads + kv) * width
    g = Group(op, f"{batch}x{tokens}x({heads}+{kv})x{width} bf16", bytes=moved, tolerance=2e-2)

    def way(name: str, fn: Callable[[], Callable[..., Any]], exact: bool = False, **fields: Any) -> KernelRow:
        def build(device: torch.device) -> Any:
            made = make(shape, device)
            return forward_backward(fn(), *(as_float64(made) if exact else made))

        return g.row(name, build, **fields)

    return way
