"""A model, and the two ways to put it into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lf_graph import (
    TrainStep,
    capture,
)

WIDTH = 4


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))


def x() -> Tensor:
    return torch.randn(6, WIDTH)


def called(model: nn.Module) -> Callable[[], Any]:
    graphed = capture(model, x())
    return lambda: graphed(x())


def stepped(model: nn.Module) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    step = TrainStep(model, optimizer, loss=lambda x: model(x).square().mean())
    step(x())
    return lambda: step(x())


WAYS = pytest.mark.parametrize("way", [called, stepped])
