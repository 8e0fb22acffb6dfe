"""Rotary positions of q and k in one launch, at the token's index or at positions read from device memory.

Pairs are (i, i + R/2), the "rotate half" convention of Llama, Qwen and transformers; R is twice the width of the
tables, and dimensions from R on pass through (partial rotary). Computed in fp32, rounded once. Source: arXiv
2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lf_graph.kernels._checks import require_floats, wide
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._inputs import runs_on_triton

_NAME = "rope"


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    heads_dim: int = -2,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """q and k rotated by the angles of their positions; the backward rotates gradients back.

    Args:
        q: [B, T, heads, D], or packed [T, heads, D]; slices of a fused qkv are read in place.
        k: likewise, with its own number of heads.
        cos: [L, R/2], row p for position p, R <= D; or [B, T, R/2], one row for each token. transformers' tables repeat
            their R/2 columns: give ``cos[..., : R // 2]``.
        sin: of the shape and dtype of ``cos``. Tables get no gradient.
        positions: int32 or int64 [B, T] or [T]; None is the index of the token. A position outside of the table makes
            its token NaN: it is in device memory, where it cannot be refused without waiting for it.
        heads_dim: where q and k have their heads: -2, or -3 for [B, heads, T, D].
        implementation: Triton kernels on a GPU by default; ``plain`` is torch.

    Returns:
        q and k in their own dtypes and shapes; in memory heads are next to D.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or a table shorter than T without positions.
        KernelUnavailableError: ``implementation="triton"`` cannot run here.
    """
    if heads_dim not in (-2, -3):
        raise ValueError(
            f"{_NAME}: heads_dim={heads_dim}: -2 for [..., T, heads, D] or -3 for [..., heads, T, D]"
        )
    if heads_dim == -3:
        q, k = q.transpose(-2, -3), k.transpose(-2, -3)
    _check(q, k, cos, sin, positions)
    if q.dim() == 3:
        rotated = _rope(q[None], k[None], cos, sin, positions, implementation)
        q, k = rotated[0][0], rotated[1][0]
    else:
        q, k = _rope(q, k, cos, sin, positions, implementation)
    return (q.transpose(-2, -3), k.transpose(-2, -3)) if heads_dim == -3 else (q, k)


def packed_positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Positions of packed sequences for :func:`rope`, computed on their device without waiting.

    Args:
        cu_seqlens: int32 or int64 [sequences + 1], where sequences start, from 0, and where the last one ends.
        tokens: length of the packed row; tokens behind the last sequence are padding and get position 0.

    Returns:
        [tokens], the index of every token in its sequence, in the dtype of ``cu_seqlens``.

    Raises:
        ValueError: ``cu_seqlens`` is of another dtype or shape.
    """
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise ValueError(
            f"packed_positions: cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}: "
            "int32 or int64 [sequences + 1] is expected"
        )
    index = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, index, right=True) - 1
    real = sequence < len(cu_seqlens) - 1
    return torch.where(real, index - cu_seqlens[sequence], 0)


def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, implementation: Implementation
) -> tuple[Tensor, Tensor]:
    if not runs_on_triton(_NAME, implementation, q):
        angles = _rows_of_tokens(cos, positions, q), _rows_of_tokens(sin, positions, q)
        return _rotated(q, *angles), _rotated(k, *angles)
    from lf_graph.kernels._rope_triton import rope_op

    rotated: tuple[Tensor, Tensor] = rope_op(q, k, cos, sin, positions, False)
    return rotated


def _rows_of_tokens(table: Tensor, positions: Tensor | None, q: Tensor) -> Tensor:
    """[B or 1, T, 1, R/2]; NaN where a position is outside of the table."""
    if positions is None:
        return (table[: q.shape[1]] if table.dim() == 2 else table).unsqueeze(-2)
    inside = (positions >= 0) & (positions < len(table))
    rows = table[torch.where(inside, positions, 0)] if len(table) else table.new_zeros(*positions.shape, 1)
    return torch.where(inside[..., None], rows, torch.nan).unsqueeze(-2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same by torch's operators."""
    half = cos.shape[-1]
    a, b, rest = x.to(wide(x.dtype)).tensor_split((half, 2 * half), dim=-1)
    cos, sin = cos.to(a.dtype), sin.to(a.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
    if q.dim() not in (3, 4) or k.dim() != q.dim():
        raise ValueError(
            f"{_NAME}: q is {list(q.shape)} and k {list(k.shape)}: [B, T, heads, D], or [T, heads, D] of packed rows"
        )
    require_floats(_NAME, q=q, k=k, cos=cos, sin=sin)
    tokens, width = q.shape[:-2], q.shape[-1]
    if k.shape[:-2] != tokens or k.shape[-1] != width or k.dtype != q.dtype:
        raise ValueError(
            f"{_NAME}: q is {q.dtype} {list(q.shape)} and k {k.dtype} {list(k.shape)}: only heads may differ"
        )
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise ValueError(
            f"{_NAME}: cos is {cos.dtype} {list(cos.shape)} and sin {sin.dtype} {list(sin.shape)}: both must be alike"
        )
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(f"{_NAME}: cos and sin get no gradient here: detach them")
    if cos.dim() == 0 or not 0 < 2 * cos.shape[-1] <= width:
        raise ValueError(
            f"{_NAME}: cos is {list(cos.shape)}: its width is half of the rotary dimensions, 1 to {width // 2} "
            f"for heads of {width}; of repeated columns give the first half"
        )
    _check_positions(q, cos, positions)


def _check_positions(q: Tensor, cos: Tensor, positions: Tensor | None) -> None:
    tokens = q.shape[:-2]
    per_token = cos.dim() == 3 and q.dim() == 4 and cos.shape[:2] == tokens
    if cos.dim() != 2 and not (per_token and positions is None):
        raise ValueError(
            f"{_NAME}: cos is {list(cos.shape)}: [L, R/2], or without positions [B, T, R/2] for {list(tokens)} tokens"
        )
    if positions is None:
        if cos.dim() == 2 and len(cos) < tokens[-1]:
            raise ValueError(
                f"{_NAME}: tables of {len(cos)} positions for {tokens[-1]} tokens: make them longer"
            )
        return
    if positions.dtype not in (torch.int32, torch.int64) or positions.shape not in (tokens, tokens[-1:]):
        raise ValueError(
            f"{_NAME}: positions is {positions.dtype} {list(positions.shape)}: "
            f"int32 or int64 {list(tokens)} is expected"
        )
    if positions.device != q.device:
        raise ValueError(f"{_NAME}: positions is on {positions.device}, q on {q.device}")
