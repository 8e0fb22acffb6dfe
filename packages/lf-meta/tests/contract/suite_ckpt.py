"""lf-ckpt on a simulated device: bits of device state, and the order of its copies. contract-only."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from simulated import Simulated
from torch import Tensor, nn

import lf_ckpt
from lf_ckpt import staging


def state(device: torch.device) -> dict[str, Tensor]:
    """Tensors of several dtypes, strides and sizes, over 1 MiB in all."""
    torch.manual_seed(4)
    base = torch.randn(300, 1100)
    found = {
        "f32": base,
        "transposed": base.t(),
        "bf16": base[:7].bfloat16(),
        "int": torch.arange(17),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    return {name: tensor.to(device) for name, tensor in found.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[n].cpu(), b[n].cpu()) and a[n].dtype == b[n].dtype for n in a
    )


def trained(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 64, device=next(model.parameters()).device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("overlap", [False, True])
def test_device_state_comes_back_bit_for_bit(tmp_path: Path, device: torch.device, overlap: bool) -> None:
    tensors = state(device)
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, tensors, overlap=overlap).wait()
        into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        store.load(into=into)
        assert same(store.load().tensors, tensors)
    assert same(into, tensors)
    assert all(tensor.device == device for tensor in into.values())


def test_a_delta_of_device_state_comes_back(tmp_path: Path, device: torch.device) -> None:
    tensors = state(device)
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, tensors).wait()
        tensors["f32"][3] += 1
        report = store.save(2, tensors).wait()
        assert report.kind == "delta"
        assert same(store.load().tensors, tensors)


def test_a_save_copies_on_a_side_stream_behind_the_callers(
    tmp_path: Path, simulated: Simulated, device: torch.device
) -> None:
    tensors = state(device)
    with lf_ckpt.open(tmp_path) as store:
        since = simulated.log.mark()
        store.save(1, tensors, overlap=True).wait()
    calls = simulated.log.since(since)
    copies = [call for call in calls if call.what == "device to host"]
    (side,) = {call.stream for call in copies}
    assert side != 0
    waited = next(call for call in calls if call.kind == "wait" and call.stream == side)
    assert waited.what == "stream 0"
    assert waited.number < copies[0].number
    records = [call.what for call in calls if call.kind == "record" and call.stream == side]
    waits = [call.what for call in calls if call.kind == "host_wait"]
    assert records
    assert records[-1] in waits


def test_a_fenced_save_holds_the_values_before_the_step_that_follows(
    tmp_path: Path, simulated: Simulated, device: torch.device
) -> None:
    model, optimizer = trained(device)
    with lf_ckpt.open(tmp_path) as store:
        for number in range(3):
            wanted = {n: t.clone() for n, t in lf_ckpt.collect(model, optimizer).tensors.items()}
            handle = store.save(number, *lf_ckpt.collect(model, optimizer), overlap=True, fence=optimizer)
            train(model, optimizer)
            handle.wait()
            assert same(dict(store.load(number).tensors), wanted)


@pytest.fixture
def host_waits_later(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No thread of the host comes past an event of the device before this is set: only streams give an order."""
    gate, event = threading.Event(), simulated.module.Event
    wait, ask = event.synchronize, event.query
    monkeypatch.setattr(event, "synchronize", lambda self: (gate.wait(30), wait(self))[1])
    monkeypatch.setattr(event, "query", lambda self: gate.is_set() and ask(self))
    return gate


def test_a_fenced_step_waits_on_its_stream(
    tmp_path: Path, device: torch.device, host_waits_later: threading.Event
) -> None:
    model, optimizer = trained(device)
    with lf_ckpt.open(tmp_path) as store:
        handle = store.save(1, *lf_ckpt.collect(model, optimizer), overlap=True, fence=optimizer)
        train(model, optimizer)
        host_waits_later.set()
        handle.wait()


def test_a_step_that_does_not_wait_for_a_save_is_caught(
    tmp_path: Path,
    simulated: Simulated,
    device: torch.device,
    host_waits_later: threading.Event,
    misuse: None,
) -> None:
    model, optimizer = trained(device)
    with lf_ckpt.open(tmp_path) as store:
        since = simulated.log.mark()
        handle = store.save(1, *lf_ckpt.collect(model, optimizer), overlap=True)  # no fence
        train(model, optimizer)
        host_waits_later.set()
        handle.wait()
    assert any("_fused_adamw_ overwrites, under a reader" in text for text in simulated.log.violations(since))


def test_bytes_are_written_only_behind_their_event(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = state(device)

    def never(*arguments: object) -> None:  # the copy is queued, and nobody is told when it has arrived
        real(*arguments)  # type: ignore[arg-type]

    real = staging._copy_in
    with lf_ckpt.open(tmp_path / "right") as store:
        store.save(1, tensors).wait()
        assert same(store.load().tensors, tensors)
    monkeypatch.setattr(staging, "_copy_in", never)
    with lf_ckpt.open(tmp_path / "wrong") as store:
        store.save(1, tensors).wait()
        assert not same(store.load().tensors, tensors)


def test_a_load_copies_on_a_side_stream_and_waits_for_it(
    tmp_path: Path, simulated: Simulated, device: torch.device
) -> None:
    tensors = state(device)
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, tensors).wait()
        into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        since = simulated.log.mark()
        report = store.load(into=into).report
    calls = simulated.log.since(since)
    copies = [call for call in calls if call.what == "host to device"]
    (side,) = {call.stream for call in copies}
    assert side != 0
    assert any(
        c.kind == "host_wait" and c.what == f"stream {side}" for c in calls if c.number > copies[-1].number
    )
    assert f"{device}: streamed through" in str(report)


def test_the_devices_generator_is_saved_and_set(tmp_path: Path, device: torch.device) -> None:
    saved = lf_ckpt.rng_state()
    assert f"rng.{device.type}.0" in saved.tensors
    drawn = torch.rand(5, device=device)
    lf_ckpt.set_rng_state(saved)
    assert torch.equal(torch.rand(5, device=device).cpu(), drawn.cpu())


def test_a_file_of_the_device_loads_on_the_host_and_back(tmp_path: Path, device: torch.device) -> None:
    tensors = state(device)
    with lf_ckpt.open(tmp_path / "a") as store:
        store.save(1, tensors).wait()
        on_host = {name: torch.zeros_like(t, device="cpu") for name, t in tensors.items()}
        store.load(into=on_host)
    with lf_ckpt.open(tmp_path / "b") as store:
        store.save(1, on_host).wait()
        back = {name: torch.zeros_like(t) for name, t in tensors.items()}
        store.load(into=back)
    assert same(back, tensors)
