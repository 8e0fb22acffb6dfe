"""How rows of queries and keys belong to sequences, and which query sees which key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Of one call of attention.

    Attributes:
        offsets_q: int32: cu_seqlens of packed queries, or lengths of padded ones; None if all padded rows are used.
        offsets_k: the same for keys.
        sequences: their number.
        packed: whether rows are packed.
        causal: whether a query sees keys only up to as far from the end as it is itself.
        scale: of scores.
    """

    offsets_q: Tensor | None
    offsets_k: Tensor | None
    sequences: int
    packed: bool
    causal: bool
    scale: float


@dataclass(frozen=True)
class Rows:
    """One side of a call, each field [batch, rows] or None; packed rows are a batch of one.

    Attributes:
        sequence: which sequence of the batch each row is of; None if the batch says it.
        to_end: rows from each to the end of its sequence.
        used: whether a row is of a sequence; None if all are.
    """

    sequence: Tensor | None
    to_end: Tensor
    used: Tensor | None


def rows_of(x: Tensor, offsets: Tensor | None, packed: bool) -> Rows:
    """The side of x [batch, rows, heads, head_dim]."""
    row = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    if packed:
        assert offsets is not None
        sequence = (row[:, None] >= offsets[1:]).sum(1)  # as many end at or before the row
        end = offsets[(sequence + 1).clamp(max=len(offsets) - 1)]
        used = (row >= offsets[0]) & (row < offsets[-1])
        return Rows(sequence[None], (end - row)[None], used[None])
    if offsets is None:
        return Rows(None, (x.shape[1] - row).expand(len(x), -1), None)
    to_end = offsets.clamp(0, x.shape[1])[:, None] - row
    return Rows(None, to_end, to_end > 0)


def visible(q: Tensor, k: Tensor, layout: Layout) -> Tensor:
    """bool [batch, rows of q, rows of k]."""
    a, b = rows_of(q, layout.offsets_q, layout.packed), rows_of(k, layout.offsets_k, layout.packed)
    seen = q.new_ones((len(q), q.shape[1], k.shape[1]), dtype=torch.bool)
    if a.sequence is not None and b.sequence is not None:
        seen &= a.sequence[:, :, None] == b.sequence[:, None, :]
    if a.used is not None:
        seen &= a.used[:, :, None]
    if b.used is not None:
        seen &= b.used[:, None, :]
    if layout.causal:
        seen &= b.to_end[:, None, :] >= a.to_end[:, :, None]
    return seen


def cleaned(x: Tensor, used: Tensor | None) -> Tensor:
    """x [batch, rows, heads, head_dim] with zeros, and zero gradients, in rows of no sequence, whatever they hold."""
    return x if used is None else torch.where(used[:, :, None, None], x, 0)
