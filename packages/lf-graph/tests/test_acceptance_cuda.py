"""Rows of the acceptance table (README.md) that need a device, beside test_cuda.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lf_graph import GraphPool, TrainStep, capture

pytestmark = pytest.mark.gpu


def test_a_loss_of_another_stream_may_be_held_over_a_capture() -> None:
    """Row 11, pytorch#180090."""
    model, x = nn.Linear(64, 64).cuda(), torch.randn(8, 64, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        held = model(x).sum()
    torch.cuda.synchronize()
    with capture(model, x) as graphed:
        graphed(x).sum().backward()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, x.sum(0).expand(64, 64), rtol=1e-4, atol=1e-4)
    assert held.grad_fn is not None


def test_graphs_of_a_pool_survive_the_end_of_one_with_matrix_products() -> None:
    """Row 12, pytorch#193402: cuBLAS's workspace is shared."""
    pool, models = GraphPool("cuda"), [nn.Linear(512, 512).cuda() for _ in range(2)]
    x = torch.randn(256, 512, device="cuda")
    first, second = (capture(m, x, pool=pool) for m in models)
    first.close()
    torch.cuda.empty_cache()
    taken = torch.zeros(1 << 24, device="cuda")
    for _ in range(3):
        torch.testing.assert_close(second(x), models[1](x), rtol=1e-3, atol=1e-3)
    assert taken.count_nonzero().item() == 0
    second.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_step_trains_on_a_device_that_is_not_the_current_one() -> None:
    """Row 13, pytorch#87794: temporary memory went to cuda:0."""
    torch.cuda.set_device(0)
    before = torch.cuda.memory_allocated(0)
    model = nn.Linear(64, 1).to("cuda:1")
    x = torch.randn(8, 64, device="cuda:1")
    with TrainStep(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), loss=lambda x: model(x).square().mean()
    ) as step:
        losses = [step(x).loss.item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert torch.cuda.memory_allocated(0) == before
