"""Cross entropy of rows of logits in plain PyTorch, in place: the twin of the Triton kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """What is added to or left out of the negative log likelihood of a row."""

    ignore_index: int
    z_loss: float
    label_smoothing: float


def plain_rows(logits: Tensor, targets: Tensor, losses: Tensor, terms: Terms, gradient: bool) -> None:
    """Writes the loss of every row, and with ``gradient`` its derivative over the logits.

    Args:
        logits: [rows, vocab], rows may be strided.
        targets: int64 [rows].
        losses: float32 or float64 [rows], written.
        terms: see ``linear_cross_entropy``.
        gradient: whether ``logits`` become the derivatives of the row's loss with respect to them.
    """
    x = logits.to(losses.dtype)
    used = targets != terms.ignore_index
    unknown = used & ((targets < 0) | (targets >= logits.shape[1]))
    picked = torch.where(used & ~unknown, targets, 0)[:, None]
    lse = x.logsumexp(1)
    loss = lse - (1 - terms.label_smoothing) * x.gather(1, picked)[:, 0] + terms.z_loss * lse.square()
    if terms.label_smoothing:
        loss -= terms.label_smoothing * x.mean(1)
    losses.copy_(loss.masked_fill_(~used, 0.0).masked_fill_(unknown, math.nan))
    if gradient:
        logits.copy_(_derivative(x, lse, picked, terms).masked_fill_(~used[:, None], 0.0))
        logits.masked_fill_(unknown[:, None], math.nan)


def _derivative(x: Tensor, lse: Tensor, picked: Tensor, terms: Terms) -> Tensor:
    """Of the loss of rows, over ``x``."""
    x.sub_(lse[:, None]).exp_()
    if terms.z_loss:
        x.mul_((1 + 2 * terms.z_loss * lse)[:, None])
    if terms.label_smoothing:
        x.sub_(terms.label_smoothing / x.shape[1])
    return x.scatter_add_(1, picked, x.new_full((len(x), 1), terms.label_smoothing - 1))
