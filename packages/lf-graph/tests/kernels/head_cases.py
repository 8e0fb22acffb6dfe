"""Inputs and references of the tests of linear_cross_entropy."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from kernel_cases import DEVICE
from torch import Tensor

from lf_graph.kernels._choice import Implementation

BOTH: tuple[Implementation, ...] = ("plain", "triton")
IGNORE = -100


def inputs(
    tokens: int,
    vocab: int,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    ignored: float = 0.2,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight (leaves of one dtype) and targets, some of them ignored; logits have a deviation of about 2."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, dim, generator=generator)
    weight = torch.randn(vocab, dim, generator=generator) * 2 / math.sqrt(dim)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < ignored] = IGNORE
    leaves = [t.to(DEVICE, dtype).requires_grad_() for t in (hidden, weight)]
    return leaves[0], leaves[1], targets.to(DEVICE)


def reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    **options: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Summed loss in float64 and the gradients of its inputs, of unfused operators."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    logits = F.linear(*leaves)
    loss = F.cross_entropy(logits, targets, reduction="sum", **options)
    used = (targets != options.get("ignore_index", IGNORE)).double()
    loss = loss + z_loss * (logits.logsumexp(1).square() * used).sum()
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


def gradients(*leaves: Tensor | None, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [t for t in leaves if t is not None]))
