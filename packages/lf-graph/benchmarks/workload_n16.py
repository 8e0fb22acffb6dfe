"""``gr00t_n16_vla`` of lf-meta as a workload: the exact model, with embodiment tables, as its users train it.

Noise and flow time are inputs of the batch, as in the VLA class of the baselines, so that rows whose random numbers
differ (inductor has its own) still compute the same loss but for dropout. Needs lf-meta and what it needs (pydantic).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from workloads import Workload

from lf_meta.models import gr00t_vla
from lf_meta.models.gr00t_vla_batch import random_batch

TEXT_TOKENS = 92  # as in the VLA class: 128 image tokens and 92 of text


def batch_of(config: Any, size: int, text_tokens: int, device: torch.device) -> Any:
    """(mapping of the model's inputs, noise, flow time)."""
    seed = int(torch.randint(0, 2**31, ()))
    made = random_batch(config, size, text_tokens, seed=seed, device=device)
    noise = torch.randn(made["action"].shape, device=device)
    clean = torch.rand(size, device=device) ** (1 / config.time_alpha)
    return made, noise, (1 - clean) * config.time_scale


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's summed loss over its count."""
    total, count = model(*batch)
    loss: Tensor = total / count
    return loss


def vla_n16(size: str, text_tokens: int, batches: tuple[int, ...]) -> Workload:
    """The workload of one size of the model."""
    config = gr00t_vla.config_for(size)
    return Workload(
        name="n16",
        build=lambda: gr00t_vla.GR00TVLA(config),
        make_batch=lambda rows, device: batch_of(config, rows, text_tokens, device),
        blocks=lambda model: list(model.blocks()),
        batches=batches,
        freeze=lambda model: model.cast_frozen(torch.bfloat16),
        loss=mean_loss,
    )


def workloads(tiny: bool) -> tuple[Workload, ...]:
    """Size 3b on a GPU, the model's own miniature otherwise."""
    return (vla_n16("tiny", 5, (2, 1)) if tiny else vla_n16("3b", TEXT_TOKENS, (16, 4)),)
