"""Small models for tests of capture, and comparisons with eager code."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def twins(make: Any) -> tuple[Any, Any]:
    """One model to capture and one to run eagerly, with the same weights."""
    torch.manual_seed(0)
    ours = make()
    return ours, copy.deepcopy(ours)


def same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert torch.equal(a.grad, b.grad), name


def same_state(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2))


def square(x: Tensor) -> Tensor:
    return x * x


def scaled(x: Tensor, by: float) -> Tensor:
    return x * by
