"""The simulated device keeps the contract that the other suites lean on, and catches who breaks it. contract-only."""

from __future__ import annotations

import copy

import pytest
import torch
from simulated import ContractError, Simulated, install
from torch import nn


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 4))


def train(model: nn.Module, device: torch.device, **options: bool) -> list[float]:
    """Losses of five steps."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(32, 8), torch.randint(0, 4, (32,))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, **options)
    losses = []
    for step in range(5):
        torch.manual_seed(step)
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_device_is_the_accelerator_of_the_process(simulated: Simulated, device: torch.device) -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device(simulated.name)
    assert torch.get_device_module(device) is simulated.module


def test_views_share_the_storage_that_the_device_really_has(device: torch.device) -> None:
    base = torch.arange(12.0, device=device).view(3, 4)
    column = base.t()[1]
    column += 100
    assert column.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert column.stride() == (4,)
    assert base.cpu().tolist()[0] == [0.0, 101.0, 2.0, 3.0]


@pytest.mark.parametrize("way", ["fused", "foreach", "plain"])
def test_a_training_has_the_bits_of_the_host(device: torch.device, way: str) -> None:
    options = {} if way == "plain" else {way: True}
    ours = network()
    host = copy.deepcopy(ours)
    ours.to(device)

    assert train(ours, device, **options) == train(host, torch.device("cpu"), **options)
    for mine, other in zip(ours.parameters(), host.parameters(), strict=True):
        assert torch.equal(mine.detach().cpu(), other)


def test_operators_without_a_kernel_are_counted_in_one_fallback(
    simulated: Simulated, device: torch.device
) -> None:
    since = simulated.log.mark()
    x = torch.ones(2, 2, device=device)
    (x @ x + x).sum().item()
    assert simulated.log.counted("fallback", since) == {
        "aten::fill_": 1, "aten::mm": 1, "aten::add": 1, "aten::sum": 1, "aten::_local_scalar_dense": 1,
    }  # fmt: skip
    numbers = [call.number for call in simulated.log.since(since)]
    assert numbers == list(range(since, since + len(numbers)))


def test_autocast_lowers_matrix_products_and_nothing_else(device: torch.device) -> None:
    x = torch.ones(4, 4, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32


def test_its_generator_is_its_own_and_follows_the_seed(simulated: Simulated, device: torch.device) -> None:
    torch.manual_seed(3)
    first = torch.rand(4, device=device)
    state = simulated.module.get_rng_state()
    second = torch.rand(4, device=device)
    assert not torch.equal(first.cpu(), second.cpu())
    torch.rand(9)  # of the host
    simulated.module.set_rng_state(state)
    assert torch.equal(second.cpu(), torch.rand(4, device=device).cpu())
    torch.manual_seed(3)
    assert torch.equal(first.cpu(), torch.rand(4, device=device).cpu())


def test_memory_is_counted_and_ends(simulated: Simulated, device: torch.device) -> None:
    before = simulated.module.memory_allocated()
    held = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    assert simulated.module.memory_allocated() - before == 1 << 20
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device=device)
    del held
    assert simulated.module.memory_allocated() == before


def test_a_copy_to_the_host_arrives_when_it_is_waited_for(simulated: Simulated, device: torch.device) -> None:
    source, target = torch.full((4,), 7.0, device=device), torch.zeros(4)
    target.copy_(source, non_blocking=True)
    event = simulated.module.Event()
    event.record()
    assert target.tolist() == [0.0] * 4
    assert not event.query()
    event.synchronize()
    assert target.tolist() == [7.0] * 4


def test_a_copy_from_the_host_may_read_late(simulated: Simulated, device: torch.device) -> None:
    source = torch.zeros(4)
    target = source.to(device, non_blocking=True)
    source.fill_(9)  # who does this without a wait gets it
    assert target.cpu().tolist() == [9.0] * 4
    waited = source.to(device, non_blocking=True)
    simulated.module.synchronize()
    source.fill_(1)
    assert waited.cpu().tolist() == [9.0] * 4


def test_a_stream_that_waits_for_an_event_may_read_what_is_before_it(
    simulated: Simulated, device: torch.device
) -> None:
    module, side = simulated.module, simulated.module.Stream()
    x = torch.ones(4, device=device)
    written = module.current_stream().record_event()
    side.wait_event(written)
    with module.stream(side):
        y = x + 1
    module.current_stream().wait_stream(side)
    assert (y * 2).cpu().tolist() == [4.0] * 4


def test_a_stream_that_waits_for_nothing_is_caught(
    simulated: Simulated, device: torch.device, misuse: None
) -> None:
    since, side = simulated.log.mark(), simulated.module.Stream()
    x = torch.ones(4, device=device)
    with simulated.module.stream(side):
        x + 1
    assert [text.split(" on ")[0] for text in simulated.log.violations(since)] == ["aten::add reads"]


def test_an_overwrite_under_a_reader_is_caught(
    simulated: Simulated, device: torch.device, misuse: None
) -> None:
    since, side = simulated.log.mark(), simulated.module.Stream()
    x = torch.ones(4, device=device)
    side.wait_stream(simulated.module.current_stream())
    with simulated.module.stream(side):
        x + 1
    x.zero_()
    assert ["under a reader" in text for text in simulated.log.violations(since)] == [True]


def test_an_event_that_is_waited_for_before_it_is_recorded_is_caught(
    simulated: Simulated, device: torch.device, misuse: None
) -> None:
    since, event = simulated.log.mark(), simulated.module.Event()
    with pytest.raises(ContractError, match="waited for before it is recorded"):
        simulated.module.current_stream().wait_event(event)
    assert len(simulated.log.violations(since)) == 1


def test_a_call_of_torch_cuda_is_caught(simulated: Simulated, device: torch.device, misuse: None) -> None:
    since = simulated.log.mark()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError):
        torch.cuda.Event()
    (called, event) = simulated.log.counted("cuda", since)
    assert called.startswith("torch.cuda.synchronize from device:")
    assert event.startswith("torch.cuda.Event from device:")


def test_host_tensors_among_those_of_the_device_are_refused(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"[Ee]xpected all tensors"):
        torch.ones(4, device=device) + torch.ones(4)
    with pytest.raises(ContractError, match="expected all tensors on"):
        torch.ones(4, 4, device=device).index_select(0, torch.tensor([1]))


def test_another_index_and_another_name_are_refused(simulated: Simulated, device: torch.device) -> None:
    with pytest.raises(ContractError, match="no device"):
        simulated.module.set_device(1)
    with pytest.raises(RuntimeError, match="renames PrivateUse1 once"):
        install("mlu" if simulated.name == "npu" else "npu")
