"""Small models and batches of gr00t_n16_vla for the tests beside this file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lf_meta.models import gr00t_vla
from lf_meta.models.gr00t_vla import GR00TVLA
from lf_meta.models.gr00t_vla_batch import random_batch

Batch = dict[str, Tensor]
TEXT = 12


def tiny(**args: Any) -> GR00TVLA:
    torch.manual_seed(0)
    return gr00t_vla.build("tiny", **args)


def batch_for(model: GR00TVLA, rows: int = 3, seed: int = 0) -> Batch:
    batch = random_batch(model.config, rows, TEXT, seed=seed)
    batch["action_mask"] &= torch.rand(batch["action_mask"].shape, generator=generator(seed)) < 0.7
    if model.config.state_loss:
        shape = (rows, 3, model.config.state_dim)
        batch["next_state"] = torch.randn(shape, generator=generator(seed + 1))
        batch["next_state_mask"] = torch.rand(shape, generator=generator(seed + 2)) < 0.7
    return batch


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fixed(batch: Batch, seed: int = 5) -> dict[str, Tensor]:
    """noise and time for a batch."""
    noise = torch.randn(batch["action"].shape, generator=generator(seed)).to(batch["action"].dtype)
    time = torch.rand(len(noise), generator=generator(seed + 1))
    return {"noise": noise, "time": time}


def in_float64(batch: Batch) -> Batch:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def rows_of(batch: Batch, rows: slice) -> Batch:
    return {k: v[rows] for k, v in batch.items()}
