"""The accelerator path: page-locked slab, copies on a side stream, saved on a GPU and loaded on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckpt_states import assert_same, copy_of, state

import lf_ckpt
from lf_ckpt import staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """A state on the device, with a strided view and a tie."""
    held = {name: tensor.cuda() for name, tensor in state(1, size=3_000_000).items()}
    return {**held, "strided": torch.randn(1100, 1000, device="cuda").t(), "tied": held["step"]}


@pytest.mark.parametrize("slab", [None, 8 << 20])
def test_a_device_state_is_staged_page_locked_and_loads_on_the_host(
    tmp_path: Path, tensors: dict[str, torch.Tensor], slab: int | None
) -> None:
    before = {name: tensor.cpu() for name, tensor in tensors.items()}
    with lf_ckpt.open(tmp_path, slab_bytes=slab) as store:
        handle = store.save(1, tensors)
        for tensor in tensors.values():
            tensor.add_(1)
        assert "page-locked" in handle.wait().slab
        loaded = store.load()

    assert all(tensor.device.type == "cpu" for tensor in loaded.tensors.values())
    assert_same(loaded.tensors, before)


def test_overlapped_staging_takes_the_values_of_the_save(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    before = copy_of(tensors)
    with lf_ckpt.open(tmp_path) as store:
        handle = store.save(1, tensors, overlap=True)
        torch.randn(4000, 4000, device="cuda") @ torch.randn(4000, 4000, device="cuda")
        handle.wait_staged()
        for tensor in tensors.values():
            tensor.add_(1)
        handle.wait()
        into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        store.load(into=into)

    assert_same(into, before)


def test_generators_of_the_device_continue(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, *lf_ckpt.rng_state()).wait()
        wanted = torch.rand(5, device="cuda")
        lf_ckpt.set_rng_state(store.load())

    assert torch.equal(torch.rand(5, device="cuda"), wanted)


def test_a_step_is_streamed_to_the_device(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, tensors).wait()
        loaded = store.load(device="cuda")
        half = {"layer0.weight": torch.zeros(3_000_000, device="cuda", dtype=torch.bfloat16)}
        store.load(into=half, only="layer0.weight", cast=True)

    assert all(tensor.is_cuda for tensor in loaded.tensors.values())
    assert_same(loaded.tensors, tensors)
    assert torch.equal(half["layer0.weight"], tensors["layer0.weight"].bfloat16())
    assert "page-locked" in loaded.report.devices[0]


def test_memory_that_kernels_still_use_is_not_overwritten_early(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, {"w": torch.ones(2_000_000)}).wait()
        into = {"w": torch.zeros(2_000_000, device="cuda")}
        factor = torch.randn(6000, 6000, device="cuda")
        for _ in range(20):
            factor = factor @ factor * 1e-3
        seen = into["w"] + factor[0, 0] * 0
        store.load(into=into)

    assert not seen.nan_to_num().any()
    assert bool((into["w"] == 1).all())


def busy() -> torch.Tensor:
    """Some tens of milliseconds of work queued on the current stream."""
    factor = torch.randn(6000, 6000, device="cuda")
    for _ in range(20):
        factor = factor @ factor * 1e-3
    return factor


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model that has taken a step, so that its optimizer has a state."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(1000, 3000), torch.nn.ReLU(), torch.nn.Linear(3000, 1000)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    train(model, optimizer)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step, without waiting for the device."""
    model(torch.randn(64, 1000, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("slab", "queued"), [(None, 128), (None, 1), (8 << 20, 128)])
def test_a_fenced_save_holds_the_values_before_the_step_that_follows(
    tmp_path: Path, slab: int | None, queued: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        staging, "QUEUED_COPIES", queued
    )  # of 5: what the caller leaves to the staging thread
    model, optimizer = trained()
    with lf_ckpt.open(tmp_path, slab_bytes=slab) as store:
        for number in range(4):
            wanted = copy_of(lf_ckpt.collect(model, optimizer).tensors)
            held = busy()  # the copies queue behind it, and the step behind the copies
            handle = store.save(number, *lf_ckpt.collect(model, optimizer), overlap=True, fence=optimizer)
            train(model, optimizer)
            handle.wait()
            assert_same(store.load(number).tensors, wanted)
            assert held.isfinite().all()
        changed = lf_ckpt.collect(model, optimizer).tensors
        assert not torch.equal(changed["model.0.weight"], wanted["model.0.weight"])


def test_memory_freed_behind_an_overlapped_save_is_not_given_away_before_it_is_copied(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        tensors = {f"t{i}": torch.full((2_000_000,), float(i), device="cuda") for i in range(8)}
        held = busy()
        handle = store.save(1, tensors, overlap=True)
        del tensors
        others = [torch.full((2_000_000,), -1.0, device="cuda") for _ in range(8)]
        handle.wait()
        loaded = store.load().tensors

    assert_same(loaded, {f"t{i}": torch.full((2_000_000,), float(i)) for i in range(8)})
    assert held.isfinite().all()
    assert all(bool((other == -1).all()) for other in others)


def test_a_save_in_another_stream_waits_for_what_that_stream_has_queued(tmp_path: Path) -> None:
    tensor = torch.zeros(3_000_000, device="cuda")
    stream = torch.cuda.Stream()
    with lf_ckpt.open(tmp_path) as store, torch.cuda.stream(stream):
        busy()
        tensor.fill_(7)
        handle = store.save(1, {"x": tensor})
        tensor.fill_(8)
        handle.wait()
        assert_same(store.load().tensors, {"x": torch.full((3_000_000,), 7.0)})


def test_page_locks_end_with_the_store(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    for number in range(3):  # memory that stayed locked could not be locked again
        with lf_ckpt.open(tmp_path) as store:
            assert "page-locked" in store.save(number, tensors).wait().slab


def test_weights_written_by_a_replayed_graph_are_those_of_its_last_replay(tmp_path: Path) -> None:
    weights = torch.zeros(2_000_000, device="cuda")
    weights.add_(1)  # what a capture runs must have run before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights.add_(1)
    with lf_ckpt.open(tmp_path) as store:
        for number in range(5):
            graph.replay()
            handle = store.save(number, {"w": weights}, overlap=True)
            handle.fence()
            graph.replay()
            handle.wait()
            assert bool((store.load(number).tensors["w"] == 2 * number + 2).all())


def test_a_group_over_nccl_saves_and_loads(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        with lf_ckpt.open(tmp_path / "store", group=torch.distributed.group.WORLD) as store:
            store.save(1, tensors).wait()
            into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            store.load(into=into)
    finally:
        torch.distributed.destroy_process_group()

    assert_same(into, tensors)
