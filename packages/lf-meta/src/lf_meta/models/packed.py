"""Packed rows: sequences one behind the other in a row of fixed capacity, none of which sees another.

``cu_seqlens``, int32 [sequences + 1] on the device, says where they start and where the last one ends: 0, then rising
by the lengths, each of which may be 0. What lies behind the last one is unused. The host never reads it, so a captured
graph replays other lengths: :func:`pad_borders` gives every batch the same number of borders.

Batches of ``LoongDataLoader(pack=...)`` with one row go in with their ``loss_mask``. Their unused end is a segment,
which the mask keeps out of the loss; a mixture of experts still routes it, unless that last border is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PackedRow:
    """Where the sequences of a row lie.

    Attributes:
        cu_seqlens: int32 [sequences + 1].
        positions: int32 [capacity], of every token in its sequence; 0 behind the last sequence.
        follows: bool [capacity], whether the next token is of the same sequence: what it predicts.
    """

    cu_seqlens: Tensor
    positions: Tensor
    follows: Tensor


def packed_row(tokens: Tensor, cu_seqlens: Tensor) -> PackedRow:
    """The layout of tokens [1, capacity].

    Raises:
        ValueError: ``cu_seqlens`` is not int32 [sequences + 1].
    """
    from lf_graph.kernels import packed_positions  # here: models that take padded rows load no lf_graph

    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}: int32 [sequences + 1] is expected"
        )
    positions = packed_positions(cu_seqlens, tokens.shape[1])
    return PackedRow(cu_seqlens, positions, F.pad(positions[1:], (0, 1)) > 0)


def pad_borders(cu_seqlens: Tensor, borders: int) -> Tensor:
    """``cu_seqlens`` with its last border repeated up to ``borders`` entries, without waiting for the device.

    Raises:
        ValueError: it has more, or none.
    """
    if not 0 < len(cu_seqlens) <= borders:
        raise ValueError(
            f"cu_seqlens has {len(cu_seqlens)} entries and is to have {borders}: give more borders"
        )
    return torch.cat((cu_seqlens, cu_seqlens[-1:].expand(borders - len(cu_seqlens))))


def one_row(x: Tensor, name: str) -> Tensor:
    """[capacity] or [1, capacity] as [1, capacity]; ValueError for any other shape."""
    if x.dim() == 1:
        return x[None]
    if x.dim() != 2 or x.shape[0] != 1:
        raise ValueError(f"{name} is {list(x.shape)}: packed rows are [capacity] or [1, capacity]")
    return x


def packed_mask(row: PackedRow) -> Tensor:
    """bool [1, 1, capacity, capacity]: who sees whom; the unused end sees itself, so that no row is without a key."""
    index = torch.arange(len(row.positions), dtype=torch.int32, device=row.cu_seqlens.device)
    sequence = torch.searchsorted(row.cu_seqlens, index, right=True)
    return ((sequence[:, None] == sequence) & (index[:, None] >= index))[None, None]


def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Causal attention within each sequence, q, k, v [1, heads, capacity, D] to [1, capacity, heads, D].

    ``lf_graph.kernels.varlen_attention``, which computes neither padding nor pairs of different sequences.
    """
    from lf_graph.kernels import varlen_attention

    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return varlen_attention(q, k, v, cu_seqlens, causal=True)[None]
