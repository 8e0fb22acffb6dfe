"""Step hooks of the optimizer run around the replay, and writes that torch does not count are followed on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lf_graph import GraphError, TrainStep


def _made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    return model, optimizer


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_hooks_run_once_a_step_before_and_behind_the_update(kind: str) -> None:
    model, optimizer = _made(kind)
    weight = model[0].weight  # type: ignore[index]
    seen: list[tuple[str, Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", weight.detach().clone())))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after", weight.detach().clone())))
    x = torch.randn(3, 4)

    with TrainStep(model, optimizer, loss=lambda x: model(x).square().mean(), accumulate=2) as step:
        for _ in range(3):
            step.micro(x)
            step.micro(x)
            step.update()

    assert [name for name, _ in seen] == ["before", "after"] * 3
    values = [value for _, value in seen]
    assert all(torch.equal(values[i], values[i + 1]) for i in (1, 3))
    assert not any(torch.equal(values[i], values[i + 1]) for i in (0, 2, 4))


def test_a_hook_that_raises_leaves_the_step_as_it_was() -> None:
    model, optimizer = _made("AdamW")
    x = torch.randn(3, 4)
    with TrainStep(model, optimizer, loss=lambda x: model(x).square().mean()) as step:
        step(x)
        before = [p.detach().clone() for p in model.parameters()]

        def refuse(*_: Any) -> None:
            raise RuntimeError("not now")

        hook = optimizer.register_step_pre_hook(refuse)
        step.micro(x)
        with pytest.raises(RuntimeError, match="not now"):
            step.update()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        hook.remove()
        step.update()
        assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_early_updates_refuse_hooks() -> None:
    model, optimizer = _made("AdamW")
    optimizer.register_step_post_hook(lambda *_: None)
    loss = lambda x: model(x).square().mean()  # noqa: E731
    step = TrainStep(model, optimizer, loss=loss, release="fused", gate=False)
    with step, pytest.raises(GraphError, match="step hooks"):
        step(torch.randn(3, 4))


def test_writes_through_data_are_followed_behind_a_refresh() -> None:
    model, optimizer = _made("AdamW")
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    x = torch.randn(3, 4)
    with TrainStep(
        model, optimizer, loss=lambda x: model(x).square().mean(), autocast=torch.bfloat16
    ) as step:
        step(x)
        assert "bf16 shadows" in str(step.info())
        for p in model.parameters():
            p.data.fill_(0.5)
        step.refresh()
        found = step(x).loss.clone()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x).square().mean()
    torch.testing.assert_close(found, expected.float(), rtol=1e-2, atol=1e-2)
