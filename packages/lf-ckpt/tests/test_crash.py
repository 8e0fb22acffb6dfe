"""Nothing is lost and nothing is torn: what the matrix of test_matrix.py does not hold."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ckpt_children import wait_status
from ckpt_faults import KillAtByte, Volatile
from ckpt_states import assert_same, files_under, state

import lf_ckpt
from lf_ckpt import cli

SIZE = 6_000
STATES = {
    1: state(1, size=SIZE),
    2: {**state(1, size=SIZE), "layer0.weight": torch.zeros(SIZE)},
    3: state(3, size=SIZE),
}


def check_store(path: Path, at_least: int) -> int:
    """The newest step loads bit for bit, is no older than `at_least`, and the store can be written again."""
    with lf_ckpt.open(path, read_only=True) as store:
        loaded = store.load()
        assert loaded.report.fallbacks == ()
        assert_same(loaded.tensors, STATES[loaded.step])
        assert loaded.step >= at_least
    with lf_ckpt.open(path) as store:
        store.save(9, STATES[3]).wait()
        assert_same(store.load().tensors, STATES[3])
        assert_same(store.load(loaded.step).tensors, STATES[loaded.step])
    assert not [name for name in files_under(path) if name.endswith(".tmp")]
    return loaded.step


@pytest.mark.parametrize("limit", [4096, 500_000, 3 << 20, (3 << 20) + 4097, 5 << 20])
def test_kill_9_inside_long_direct_writes(tmp_path: Path, limit: int) -> None:
    old, new = {"x": torch.zeros(2_000_000)}, {"x": torch.ones(2_000_000)}
    with lf_ckpt.open(tmp_path, compress="raw") as store:
        store.save(1, old).wait()

    def save() -> None:
        lf_ckpt.open(tmp_path, compress="raw", files=KillAtByte(limit)).save(2, new).wait()

    assert os.WIFSIGNALED(wait_status(save))
    with lf_ckpt.open(tmp_path) as store:
        assert_same(store.load().tensors, old)


def test_a_durable_step_survives_a_power_cut_right_after_wait(tmp_path: Path) -> None:
    files = Volatile()
    store = lf_ckpt.open(tmp_path, files=files)
    store.save(1, STATES[1]).wait()
    files.cut_power(lose_data=True, lose_names=True)
    store.close()

    assert check_store(tmp_path, 1) == 1


class BlockAtSync(lf_ckpt.FileLayer):
    """Reports on a pipe and then never returns from the first fsync after `armed`."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.armed = pipe, False

    def sync(self, fd: int) -> None:
        if self.armed:
            os.write(self.pipe, b"x")
            select.select([], [], [])
        super().sync(fd)


@contextmanager
def held_up(path: Path) -> Iterator[None]:
    """A process that has committed step 1 and hangs in the first fsync of step 2, until it is killed at the end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            files = BlockAtSync(writer)
            store = lf_ckpt.open(path, files=files, keep=[lf_ckpt.Last(1)])
            store.save(1, STATES[1]).wait()
            files.armed = True
            store.save(2, STATES[2]).wait()
        finally:
            os._exit(1)
    assert os.read(reader, 1) == b"x"
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def test_nothing_moves_or_goes_before_the_new_step_is_durable(tmp_path: Path) -> None:  # case A3
    with held_up(tmp_path), lf_ckpt.open(tmp_path, read_only=True) as store:
        assert store.latest() == 1
        assert_same(store.load().tensors, STATES[1])

    assert check_store(tmp_path, 1) == 1


def test_what_a_living_writer_has_half_written_is_touched_by_no_one(tmp_path: Path) -> None:
    with held_up(tmp_path):
        before = {name: (tmp_path / name).read_bytes() for name in files_under(tmp_path)}
        assert "steps/2/rank-0.lfckpt" in before
        with pytest.raises(lf_ckpt.LockedError):
            lf_ckpt.open(tmp_path)
        assert cli.main(["gc", str(tmp_path), "--keep", "last:1"]) == 2
        assert cli.main(["repair", str(tmp_path), "--yes"]) == 2
        assert {name: (tmp_path / name).read_bytes() for name in files_under(tmp_path)} == before

    assert check_store(tmp_path, 1) == 1
    assert not (tmp_path / "steps/2").exists()


def test_a_process_that_forgets_to_close_still_finishes_its_save(tmp_path: Path) -> None:
    code = f"import torch, lf_ckpt; lf_ckpt.open({str(tmp_path)!r}).save(5, {{'x': torch.ones(3_000_000)}})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

    with lf_ckpt.open(tmp_path, read_only=True) as store:
        assert torch.equal(store.load().tensors["x"], torch.ones(3_000_000))
