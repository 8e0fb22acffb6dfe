"""From router logits to rows sorted by expert, and the two moves between tokens and rows. No read-back anywhere.

An *assignment* is one of a token's ``top_k`` choices, numbered ``token * top_k + choice``. A *row* is a line of the
matrix the experts work on; rows of one expert lie together. Both moves are gathers, forward and backward, so that
no two threads ever add to one address: results repeat bit for bit, and torch's own backward of indexing (a sort
and an accumulation for every layer) is avoided.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Which rows each token goes to.

    Attributes:
        weights: [N, top_k] of the logits' dtype (at least float32): how much of each expert's output a token takes.
        order: int64 [N * top_k], the assignment of each row; rows are sorted by expert, then by token.
        inverse: int64 [N, top_k], the row of each assignment.
        offsets: int32 [E], the end row of each expert. Rows from ``offsets[-1]`` on belong to tokens that are not kept.
        probabilities: [N, E], the softmax of the logits.
    """

    weights: Tensor
    order: Tensor
    inverse: Tensor
    offsets: Tensor
    probabilities: Tensor

    @property
    def tokens(self) -> Tensor:
        """int64 [N * top_k], the token of each row."""
        return self.order // self.inverse.shape[1]

    def counts(self) -> Tensor:
        """int32 [E], rows of each expert."""
        return torch.diff(self.offsets, prepend=self.offsets.new_zeros(1))


def route(logits: Tensor, top_k: int, normalize: bool, keep: Tensor | None) -> Routing:
    """Choose ``top_k`` experts for each token.

    Args:
        logits: [N, E], float32 or float64.
        top_k: experts for each token.
        normalize: divide a token's weights by their sum (Mixtral, arXiv 2401.04088).
        keep: bool [N]; tokens where it is False go to no expert.
    """
    probabilities = torch.softmax(logits, dim=-1)
    weights, expert = probabilities.topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(weights, *sort_by_expert(expert, logits.shape[1], keep), probabilities)


def sort_by_expert(expert: Tensor, experts: int, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``order``, ``inverse`` and ``offsets`` of :class:`Routing` for expert ids int64 [N, top_k]."""
    if keep is not None:
        expert = torch.where(keep[:, None], expert, experts)  # one more group, after the last expert
    # a radix sort makes one pass for each byte of the key
    key_dtype = torch.uint8 if experts < 256 else torch.int32
    key, order = torch.sort(expert.flatten().to(key_dtype), stable=True)
    ids = torch.arange(experts, dtype=key_dtype, device=key.device)
    # the histogram as positions in the sorted keys: bincount reads its size back
    offsets = torch.searchsorted(key, ids, right=True, out_int32=True)
    rows = torch.arange(order.shape[0], device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, rows)
    return order, inverse.view(expert.shape), offsets


def spread(x: Tensor, token: Tensor, rows: Tensor, keep: Tensor | None = None) -> Tensor:
    """Copy tokens to rows: ``y[r] = x[token[r]]``, zero where the token is not kept. The adjoint of :func:`gather_sum`.

    Args:
        x: [N, C].
        token: int64 [R], the token of each row.
        rows: int64 [N, K], the rows that count for each token; only these bring a gradient back.
        keep: bool [N] or None for all.

    Returns:
        [R, C] of the dtype of x.
    """
    out: Tensor = _Spread.apply(x, token, rows, keep)  # type: ignore[no-untyped-call]
    return out


def gather_sum(y: Tensor, token: Tensor, rows: Tensor, keep: Tensor | None = None) -> Tensor:
    """Sum rows into tokens: ``x[n] = sum_k y[rows[n, k]]``, zero where the token is not kept.

    Adds in float32 and rounds once. Rows of tokens that are not kept may hold anything, NaN included.

    Args: as :func:`spread`, with y [R, C].

    Returns:
        [N, C] of the dtype of y.
    """
    out: Tensor = _GatherSum.apply(y, token, rows, keep)  # type: ignore[no-untyped-call]
    return out


def _masked(x: Tensor, keep: Tensor | None) -> Tensor:
    return (
        x if keep is None else torch.where(keep[:, None], x, torch.zeros((), dtype=x.dtype, device=x.device))
    )


def _copy_to_rows(x: Tensor, token: Tensor, keep: Tensor | None) -> Tensor:
    return _masked(x, keep).index_select(0, token)


def _add_from_rows(y: Tensor, rows: Tensor, keep: Tensor | None) -> Tensor:
    picked = y.index_select(0, rows.flatten()).view(*rows.shape, y.shape[1])
    return _masked(picked.sum(dim=1, dtype=y.dtype), keep)  # an explicit dtype: autocast would widen the sum


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, rows: Tensor, keep: Tensor | None) -> Tensor:
        ctx.save_for_backward(token, rows, keep)
        return _copy_to_rows(x, token, keep)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        _, rows, keep = ctx.saved_tensors
        return _add_from_rows(grads[0], rows, keep), None, None, None


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor, rows: Tensor, keep: Tensor | None) -> Tensor:
        ctx.save_for_backward(token, rows, keep)
        return _add_from_rows(y, rows, keep)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        token, _, keep = ctx.saved_tensors
        return _copy_to_rows(grads[0], token, keep), None, None, None


def load_balance_loss(probabilities: Tensor, counts: Tensor, keep: Tensor | None = None) -> Tensor:
    """Switch Transformer's balance loss (arXiv 2101.03961, eq. 4), 1 when the load is even.

    ``E * sum_e f_e * P_e`` with f the share of assignments and P the mean probability of expert e.

    Args:
        probabilities: [N, E].
        counts: int32 [E]; no gradient flows through it.
        keep: bool [N] or None; other tokens do not count.
    """
    load = counts.to(probabilities.dtype)
    share = load / load.sum().clamp(min=1)
    return probabilities.shape[1] * (share * _token_mean(probabilities, keep)).sum()


def router_z_loss(logits: Tensor, keep: Tensor | None = None) -> Tensor:
    """ST-MoE's z-loss (arXiv 2202.08906, eq. 5): the mean squared logsumexp of logits [N, E]; keeps them small."""
    return _token_mean(torch.logsumexp(logits, dim=-1).square()[:, None], keep).sum()


def _token_mean(x: Tensor, keep: Tensor | None) -> Tensor:
    """Mean over kept tokens, [N, C] to [C]; 0 when there are none."""
    if keep is None:
        return x.sum(dim=0) / max(x.shape[0], 1)
    return _masked(x, keep).sum(dim=0) / keep.sum().clamp(min=1)
