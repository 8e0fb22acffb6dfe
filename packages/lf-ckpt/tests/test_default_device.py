"""A default device that is no host, as of `torch.set_default_device("cuda")`: host memory is asked for by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_states import assert_same, copy_of, state

import lf_ckpt
from lf_ckpt.dcp import LfLoadPlanner, LfSavePlanner, LfStorageReader, LfStorageWriter

STATE = {**state(1, size=300_000), "small": torch.arange(12.0).view(3, 4), "none": torch.empty(0, 3)}


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    """The meta device stands for CUDA: what is made on it by mistake has no bytes either."""
    with torch.device("meta"):
        yield


def test_a_state_is_saved_and_loaded_fresh_and_in_place(tmp_path: Path) -> None:
    into = {name: tensor.clone().zero_() for name, tensor in STATE.items()}
    into["small"] = torch.zeros(4, 3, device="cpu").t().reshape(2, 6)
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, STATE, {"blob": b"x" * 10}).wait()
        assert_same(store.load().tensors, STATE)
        store.load(into=into, reshape=True)
    assert_same(into, {**STATE, "small": STATE["small"].reshape(2, 6)})


def test_a_tensor_without_a_view_of_the_saved_shape_is_filled_through_a_copy(tmp_path: Path) -> None:
    live = torch.zeros(4, 3, device="cpu").t()
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, {"x": torch.arange(12.0, device="cpu")}).wait()
        store.load(into={"x": live}, reshape=True)
    assert live.flatten().tolist() == list(range(12))


def test_other_formats_go_out_and_come_in(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "store") as store:
        store.save(1, STATE).wait()
        lf_ckpt.export_safetensors(store, 1, tmp_path / "weights")
        lf_ckpt.export_file(store, 1, tmp_path / "one.lfckpt")
    assert_same(lf_ckpt.import_safetensors(tmp_path / "weights").tensors, STATE)
    assert_same(lf_ckpt.load_file(tmp_path / "one.lfckpt").tensors, STATE)


def test_dcp_saves_and_loads_also_another_dtype(tmp_path: Path) -> None:
    writer = LfStorageWriter(tmp_path)
    dcp.save(copy_of(STATE), storage_writer=writer, planner=LfSavePlanner())
    writer.close()
    into = {name: tensor.double().zero_() for name, tensor in STATE.items()}
    dcp.load(into, storage_reader=LfStorageReader(tmp_path), planner=LfLoadPlanner())
    assert_same(into, {name: tensor.double() for name, tensor in STATE.items()})


def test_a_run_is_collected_and_restored_with_its_generators(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, device="cpu")).sum().backward()
    with torch.device("cpu"):  # torch 2.6 makes AdamW's counters on the default device
        optimizer.step()
    before = copy_of(lf_ckpt.collect(model, optimizer).tensors)
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, *lf_ckpt.collect(model, optimizer, rng=True)).wait()
        optimizer.step()
        assert lf_ckpt.resume(store, model, optimizer, rng=True) == 1
    assert_same(lf_ckpt.collect(model, optimizer).tensors, before)
