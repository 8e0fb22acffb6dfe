"""init_loong_dist says what it enabled, all ranks alike, and names what is missing."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest
import start_jobs as jobs
import torch
import torch.distributed as dist
from comm_ranks import Ranks

import lf_comm
from lf_comm import BackendMissingError, Rates, init_loong_dist

RATES = Rates(1e-5, 1e-9, 1e-9, 1e-9, 1e-10, 1e-10, 1e-10)


@pytest.mark.parametrize("world", [1, 2])
def test_a_loong_name_turns_on_what_there_is_for_a_job(ranks: Ranks, tmp_path: Path, world: int) -> None:
    found = ranks.call(jobs.whole, world, store=str(tmp_path / "s"), backend="loonggloo", options={})
    for rank, each in enumerate(found):
        assert each["on"]["process group"]
        assert each["on"]["watch"]
        assert each["on"]["topology"]
        assert each["on"]["rates"]
        assert not each["on"]["order of ranks"]
        assert not each["on"]["row-sparse sums"]
        assert each["ages"] == list(range(world))
        assert each["ranks"] == tuple(range(world))
        assert isinstance(each["rates"], Rates)
        assert each["given"] == each["rates"] == found[0]["rates"]
        assert each["warnings"] == ()
        assert f"rank {rank} of {world}, backend gloo, device cpu" in each["text"]
        assert "on  watch: backend loonggloo" in each["text"]
        assert ("1 peer by Gloo/TCP (host bridge)" in each["text"]) == (world == 2)
        assert each["left"]
        assert not each["beats"]


def test_a_plain_name_turns_on_nothing_unasked(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks.call(jobs.whole, 1, store=str(tmp_path / "s"), backend="gloo", options={})
    assert [name for name, on in found["on"].items() if on] == ["process group"]
    assert found["ages"] is found["ranks"] is found["rates"] is None
    assert "off watch: backend gloo, without 'loong'" in found["text"]
    chosen = {"rates": RATES, "watch": False}
    both = ranks.call(jobs.whole, 2, store=str(tmp_path / "t"), backend="loonggloo", options=chosen)
    for each in both:
        assert each["rates"] == each["given"] == RATES
        assert each["ages"] is None
        assert "off watch: watch=False" in each["text"]


def test_ranks_that_ask_for_different_things_fail_together(ranks: Ranks, tmp_path: Path) -> None:
    for text, initialized in ranks.call(jobs.apart, 3, store=str(tmp_path / "s")):
        assert "on rank 0 and" in text
        assert "on rank 1" in text
        assert not initialized


def test_a_second_group_is_refused(ranks: Ranks) -> None:
    assert "process group already" in ranks.call(jobs.twice, 1)[0]


def test_unknown_names_are_refused() -> None:
    for name in ("", "loong", "nvcc", "loongmpi", "NCCL"):
        with pytest.raises(ValueError, match="nccl, gloo, hccl, cncl"):
            init_loong_dist(name)


@pytest.mark.parametrize(("backend", "package"), [("loonghccl", "torch_npu"), ("cncl", "torch_mlu")])
def test_absent_vendors_are_named_before_anything_is_joined(
    backend: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendMissingError, match=f"{package} is not installed") as caught:
        init_loong_dist(backend)
    assert caught.value.backend == backend.removeprefix("loong")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    (tmp_path / f"{package}.py").write_text("raise OSError('libascendcl.so: cannot open')")
    with pytest.raises(BackendMissingError, match=r"cannot be imported .OSError: libascendcl.so"):
        init_loong_dist(backend)
    # Installed, but it registers no backend with torch.
    (tmp_path / f"{package}.py").write_text("")
    sys.modules.pop(package, None)
    with pytest.raises(BackendMissingError, match="made for this torch"):
        init_loong_dist(backend)
    sys.modules.pop(package, None)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_nccl_without_a_device_is_named() -> None:
    before = dict(os.environ)
    with pytest.raises(BackendMissingError, match="nccl"):
        init_loong_dist()
    assert dict(os.environ) == before
    assert not dist.is_initialized()


def test_nccl_with_fewer_devices_than_ranks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(
        BackendMissingError,
        match=r"2 cuda devices are visible \(CUDA_VISIBLE_DEVICES=4,5\), and LOCAL_RANK is 2",
    ):
        lf_comm.init_loong_dist("nccl")
