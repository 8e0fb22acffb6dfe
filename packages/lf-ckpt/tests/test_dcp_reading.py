"""The DCP reader fills many tensors at once, as `Store.load` does, and none that share memory."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_states import assert_same
from test_filling import place_of, tensors, write

import lf_ckpt
from lf_ckpt.dcp import LfLoadPlanner, LfStorageReader
from lf_ckpt.files import FileLayer


class Pair(FileLayer):
    """Reads of two places wait for each other: they end only if they are in flight together."""

    def __init__(self, *places: int) -> None:
        super().__init__()
        self.places, self.meeting = places, threading.Barrier(len(places))

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        if offset in self.places:
            try:
                self.meeting.wait(timeout=30)
            except threading.BrokenBarrierError as error:
                raise OSError(errno.ETIMEDOUT, "read alone") from error
        return super().read(fd, view, offset)


def load(path: Path, into: dict[str, torch.Tensor], files: FileLayer | None = None) -> None:
    with lf_ckpt.open(path, read_only=True, files=files) as store:
        dcp.load(into, storage_reader=LfStorageReader(store), planner=LfLoadPlanner())


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}


def test_tensors_are_read_at_the_same_time(tmp_path: Path) -> None:
    write(tmp_path, 0)
    into = zeros()
    load(tmp_path, into, Pair(place_of(tmp_path, "t03"), place_of(tmp_path, "t04")))
    assert_same(into, tensors())


def test_a_plan_larger_than_a_group_is_read_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0)
    monkeypatch.setattr("lf_ckpt.dcp.reading._GROUP_BYTES", 30_000)  # a tensor has 20 000 bytes
    into: dict[str, torch.Tensor] = {n: t.double() for n, t in zeros().items()}
    load(tmp_path, into)
    assert_same(into, {name: tensor.double() for name, tensor in tensors().items()})


def test_of_names_that_share_memory_in_the_state_dict_the_last_one_stays(tmp_path: Path) -> None:
    write(tmp_path, 0)
    for _ in range(5):
        into = zeros()
        into["t05"] = into["t02"].view(1, 5000)[0]
        load(tmp_path, into)
        assert_same(into, tensors() | {"t02": tensors()["t05"]})
