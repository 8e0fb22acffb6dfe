"""Rotary positions of q and k in one launch, at the token's index or at positions read from device memory.

Pairs are (i, i + R/2), the "rotate half" convention of Llama, Qwen and transformers; R is twice the width of the
tables, and dimensions from R on pass through (partial rotary). Computed in fp32, rounded once. Source: arXiv
2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lf_graph.kernels._checks import allow_tensors, require_tensors
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._inputs import runs_on_triton
from lf_graph.kernels._rope_inputs import heads_next_to_width, require_heads, rotated, rows_of_tokens

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
    require_tensors(_NAME, q=q, k=k, cos=cos, sin=sin)
    allow_tensors(_NAME, positions=positions)
    q, k = heads_next_to_width(_NAME, q, k, heads_dim)
    require_heads(_NAME, q, k, cos, sin, positions)
    if q.dim() == 3:
        q, k = (t[0] for t in _rope(q[None], k[None], cos, sin, positions, implementation))
    else:
        q, k = _rope(q, k, cos, sin, positions, implementation)
    return heads_next_to_width(_NAME, q, k, heads_dim)


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
    require_tensors("packed_positions", cu_seqlens=cu_seqlens)
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
        angles = rows_of_tokens(cos, positions, q), rows_of_tokens(sin, positions, q)
        return rotated(q, *angles), rotated(k, *angles)
    from lf_graph.kernels._rope_triton import rope_op

    turned: tuple[Tensor, Tensor] = rope_op(q, k, cos, sin, positions, False)
    return turned
