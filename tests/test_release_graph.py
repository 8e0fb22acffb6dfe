"""Released optimizers beside lf-graph: gradients summed inside graphs cannot be freed, and both sides say so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lf_graph import Chain, GraphCaptureError, Piece, TrainStep, check
from lf_memory.gradients import ReleaseError, release


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))


def test_a_step_is_not_captured_while_its_optimizer_is_released(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(4, 8)
    with release(model, optimizer, "exact", clip=1.0):
        step = TrainStep(model, optimizer, loss=lambda x: model(x).square().mean())
        with pytest.raises(
            GraphCaptureError, match="accumulated inside the graph, so the hook would never run"
        ):
            step(x)
    with TrainStep(model, optimizer, loss=lambda x: model(x).square().mean()) as step:
        assert step(x).loss > 0  # closed: the hooks are gone


def test_check_names_the_hooks_of_release(model: nn.Module) -> None:
    with release(model, torch.optim.SGD(model.parameters(), lr=0.1), "fused"):
        report = check(model, torch.randn(4, 8))
    assert not report.ok
    assert "_release.py" in str(report)


def test_gradients_that_a_chain_summed_in_its_graph_are_not_freed_behind_it(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8)
    with Chain([Piece(model)]) as chain:
        chain.capture(x)
        for p in model.parameters():
            p.grad = None
        with release(model, optimizer, "exact") as handle:
            chain(x).sum().backward()
            gradient = model[0].weight.grad
            with pytest.raises(ReleaseError, match="CUDA graph that accumulates by itself"):
                handle.step()
            assert gradient is not None
            assert model[0].weight.grad is gradient
