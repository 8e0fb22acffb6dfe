"""lf-memory's gradient half on a simulated device: bits of the ordinary loop, copies in order. contract-only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from simulated import Simulated
from torch import Tensor, nn

from lf_memory import HostPool, PoolError, TorchRegistrar, VariablePool
from lf_memory.gradients import PlanError, offload, predict, release, verify


def network(device: torch.device, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(dropout)) for _ in range(4)]
    return nn.Sequential(*layers).to(device)


def ordinary(device: torch.device, clip: float | None) -> list[Tensor]:
    """Parameters after three steps of the loop that everybody writes."""
    model = network(device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    for step in range(3):
        loss_of(model, step).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def backward(model: nn.Module, step: int) -> Tensor:
    loss = loss_of(model, step)
    loss.backward()
    return loss


def loss_of(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(step)
    x = torch.randn(16, 64).to(next(model.parameters()).device)
    return model(x).square().mean()


@pytest.mark.parametrize(("mode", "clip"), [("fused", None), ("exact", 0.1), ("two_pass", 0.1)])
def test_gradients_released_early_give_the_bits_of_the_ordinary_loop(
    device: torch.device, mode: str, clip: float | None
) -> None:
    model = network(device)
    with release(
        model, torch.optim.AdamW(model.parameters(), 0.01, fused=True), mode=mode, clip=clip
    ) as handle:
        for step in range(3):
            if mode == "two_pass":
                handle.step(lambda step=step: backward(model, step))
            else:
                loss_of(model, step).backward()
                handle.step()
    found = [parameter.detach().cpu() for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, ordinary(device, clip), strict=True))


def gradients(model: nn.Module, around: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    around().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def test_saved_tensors_travel_on_a_side_stream_and_come_back(
    simulated: Simulated, device: torch.device
) -> None:
    model = network(device)
    plain = gradients(model, lambda: loss_of(model, 0))
    since = simulated.log.mark()
    with VariablePool(16 << 20) as pool:

        def offloaded() -> Tensor:
            with offload(pool, min_bytes=1 << 10, keep=model) as session:
                loss = loss_of(model, 0)
            assert session.stats().stored > 4
            return loss

        found = gradients(model, offloaded)
        simulated.module.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    calls = simulated.log.since(since)
    out = {call.stream for call in calls if call.what == "device to host" and call.stream}
    back = {call.stream for call in calls if call.what == "host to device" and call.stream}
    assert len(out) == 1
    assert out == back


def test_a_plan_is_made_without_the_device_and_its_measuring_is_refused_by_name(
    simulated: Simulated, device: torch.device
) -> None:
    model = network(device, dropout=0.0)
    x = torch.randn(16, 64, device=device)
    since, generator = simulated.log.mark(), simulated.module.get_rng_state()
    plan = predict(lambda: model(x).square().mean(), model=model, mode="fused")
    assert torch.equal(simulated.module.get_rng_state(), generator)
    host = network(torch.device("cpu"), dropout=0.0)
    y = x.cpu()
    assert (
        plan.step_peak_bytes
        == predict(lambda: host(y).square().mean(), model=host, mode="fused").step_peak_bytes
    )
    assert not simulated.log.counted("fallback", since)["aten::mm"]
    with pytest.raises(PlanError, match=f"allocations on {device.type} cannot be watched"):
        verify(plan, lambda: model(x).square().mean(), model=model)


def test_a_rehearsal_on_real_tensors_leaves_the_devices_generator_where_it_was(
    simulated: Simulated, device: torch.device
) -> None:
    model = network(device)
    x = torch.randn(16, 64, device=device)
    before = simulated.module.get_rng_state()
    predict(lambda: model(x).square().mean(), model=model, mode="fused", tensors="real")
    assert torch.equal(simulated.module.get_rng_state(), before)


def test_page_locking_for_another_device_is_refused_by_name(device: torch.device) -> None:
    with pytest.raises(PoolError, match=r"torch\.cuda\.is_available\(\) is False"):
        HostPool(1 << 16, 2, registrar=TorchRegistrar())
