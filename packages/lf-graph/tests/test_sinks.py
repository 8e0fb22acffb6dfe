"""Where a training step's gradients are left for its optimizer: each parameter has memory of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lf_graph import TrainStep
from lf_graph._sinks import Direct, Into


def index_of(*parameters: Tensor) -> dict[int, int]:
    return {id(p): i for i, p in enumerate(parameters)}


def test_direct_keeps_the_tensors_of_the_backward() -> None:
    p, q, g, h = (torch.ones(2) for _ in range(4))
    sink = Direct(index_of(p, q), 2)
    sink.take([q, p], [g, h])
    assert sink.gradients[0] is h
    assert sink.gradients[1] is g


def test_direct_separates_one_tensor_given_for_two_parameters() -> None:
    p, q, shared = (torch.ones(2) for _ in range(3))
    sink = Direct(index_of(p, q), 2)
    sink.take([p], [shared])
    sink.take([q], [shared])
    first, second = sink.gradients
    assert first is not None
    assert second is not None
    first.mul_(3)
    assert (first.tolist(), second.tolist()) == ([3.0, 3.0], [1.0, 1.0])


def test_direct_keeps_parts_of_one_tensor_without_a_copy() -> None:
    p, q, whole = torch.ones(2), torch.ones(2), torch.ones(4)
    sink = Direct(index_of(p, q), 2)
    parts = whole.split(2)  # what the backward of a concatenated weight gives
    sink.take([p, q], parts)
    assert all(a is b for a, b in zip(sink.gradients, parts, strict=True))


def test_direct_adds_what_a_tied_weight_gets_again() -> None:
    p = torch.ones(2)
    sink = Direct(index_of(p), 1)
    for value in (1.0, 2.0):
        sink.take([p], [torch.full((2,), value)])
    assert sink.gradients[0] is not None
    assert sink.gradients[0].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(("mode", "expected"), [("write", 3.0), ("add", 8.0)])
def test_into_writes_or_adds_and_always_adds_the_second_time(mode: Any, expected: float) -> None:
    p, buffer = torch.ones(2), torch.full((2,), 5.0)
    sink = Into(index_of(p), [buffer], mode)
    sink.take([p], [torch.full((2,), 1.0)])
    sink.take([p], [torch.full((2,), 2.0)])
    assert buffer.tolist() == [expected] * 2
    assert sink.adds is (mode == "add")


class Sum(nn.Module):
    """A weight as the sum of two parameters; the loss is (sum, 10), so gradients are scaled by 1/10."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.delta = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ (self.base + self.delta)).square().sum(), torch.tensor(10.0)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_that_are_added_train_like_eager(clip: float, optimizer: Any, accumulate: int) -> None:
    ours = Sum()
    theirs = copy.deepcopy(ours)
    reference = optimizer(theirs.parameters(), 0.1)
    with TrainStep(ours, optimizer(ours.parameters(), 0.1), clip=clip, accumulate=accumulate) as step:
        for _ in range(3):
            x = torch.randn(3, 4)
            step(x)
            total, count = theirs(x)
            reference.zero_grad()
            (total / count).backward()
            if clip:
                nn.utils.clip_grad_norm_(theirs.parameters(), clip)
            reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
