"""What rope and its kin ask of heads, tables and positions, and their rotation by torch's operators."""

from __future__ import annotations

import torch
from torch import Tensor

from lf_graph.kernels._checks import require_floats, wide


def rows_of_tokens(table: Tensor, positions: Tensor | None, q: Tensor) -> Tensor:
    """[B or 1, T, 1, R/2]; NaN where a position is outside of the table."""
    if positions is None:
        return (table[: q.shape[1]] if table.dim() == 2 else table).unsqueeze(-2)
    inside = (positions >= 0) & (positions < len(table))
    rows = table[torch.where(inside, positions, 0)] if len(table) else table.new_zeros(*positions.shape, 1)
    return torch.where(inside[..., None], rows, torch.nan).unsqueeze(-2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same by torch's operators."""
    half = cos.shape[-1]
    a, b, rest = x.to(wide(x.dtype)).tensor_split((half, 2 * half), dim=-1)
    cos, sin = cos.to(a.dtype), sin.to(a.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


def heads_next_to_width(operator: str, q: Tensor, k: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    """q and k as [..., T, heads, D], or back from there, for ``heads_dim`` -2 or -3.

    Raises:
        ValueError: another ``heads_dim``.
    """
    if heads_dim == -2:
        return q, k
    if heads_dim != -3:
        raise ValueError(
            f"{operator}: heads_dim={heads_dim}: -2 for [..., T, heads, D] or -3 for [..., heads, T, D]"
        )
    return q.transpose(-2, -3), k.transpose(-2, -3)


def require_heads(
    operator: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None
) -> None:
    """Refuses q, k [..., T, heads, D], tables and positions that do not fit together.

    Raises:
        ValueError: names the tensor and what is expected.
    """
    if q.dim() not in (3, 4) or k.dim() != q.dim():
        raise ValueError(
            f"{operator}: q is {list(q.shape)} and k {list(k.shape)}: [B, T, heads, D], or [T, heads, D] of packed rows"
        )
    require_floats(operator, q=q, k=k, cos=cos, sin=sin)
    tokens, width = q.shape[:-2], q.shape[-1]
    if k.shape[:-2] != tokens or k.shape[-1] != width or k.dtype != q.dtype:
        raise ValueError(
            f"{operator}: q is {q.dtype} {list(q.shape)} and k {k.dtype} {list(k.shape)}: only heads may differ"
        )
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise ValueError(
            f"{operator}: cos is {cos.dtype} {list(cos.shape)} and sin {sin.dtype} {list(sin.shape)}: "
            "both must be alike"
        )
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(f"{operator}: cos and sin get no gradient here: detach them")
    if cos.dim() == 0 or not 0 < 2 * cos.shape[-1] <= width:
        raise ValueError(
            f"{operator}: cos is {list(cos.shape)}: its width is half of the rotary dimensions, 1 to {width // 2} "
            f"for heads of {width}; of repeated columns give the first half"
        )
    _require_positions(operator, q, cos, positions)


def _require_positions(operator: str, q: Tensor, cos: Tensor, positions: Tensor | None) -> None:
    tokens = q.shape[:-2]
    per_token = cos.dim() == 3 and q.dim() == 4 and cos.shape[:2] == tokens
    if cos.dim() != 2 and not (per_token and positions is None):
        raise ValueError(
            f"{operator}: cos is {list(cos.shape)}: "
            f"[L, R/2], or without positions [B, T, R/2] for {list(tokens)} tokens"
        )
    if positions is None:
        if cos.dim() == 2 and len(cos) < tokens[-1]:
            raise ValueError(
                f"{operator}: tables of {len(cos)} positions for {tokens[-1]} tokens: make them longer"
            )
        return
    if positions.dtype not in (torch.int32, torch.int64) or positions.shape not in (tokens, tokens[-1:]):
        raise ValueError(
            f"{operator}: positions is {positions.dtype} {list(positions.shape)}: "
            f"int32 or int64 {list(tokens)} is expected"
        )
    if positions.device != q.device:
        raise ValueError(f"{operator}: positions is on {positions.device}, q on {q.device}")
