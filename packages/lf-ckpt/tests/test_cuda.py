"""The accelerator path: page-locked slab, copies on a side stream, saved on a GPU and loaded on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckpt_states import assert_same, copy_of, state

import lf_ckpt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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
