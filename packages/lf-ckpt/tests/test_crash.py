"""Nothing is lost and nothing is torn: kill, power cut and failing calls at every point of a save."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_faults import FailAtCall, KillAtByte, Killed, Recorder, StopAtCall, Volatile
from ckpt_states import assert_same, files_under, state

import lf_ckpt

SIZE = 6_000
STATES = {
    1: state(1, size=SIZE),
    2: {**state(1, size=SIZE), "layer0.weight": torch.zeros(SIZE)},
    3: state(3, size=SIZE),
}


def write_steps(path: Path, files: lf_ckpt.FileLayer, steps: tuple[int, ...], **options: object) -> None:
    with lf_ckpt.open(path, files=files, **options) as store:  # type: ignore[arg-type]
        if store.steps():
            store.load()  # so that the next save may be a delta
        for step in steps:
            store.save(step, STATES[step]).wait()


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


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def byte_edges() -> list[int]:
    """Cases A1: the first bytes, every record edge, the middle between two, the end."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        write_steps(Path(folder), lf_ckpt.FileLayer(), (1,))
        write_steps(Path(folder), recorder, (2,))
    # The manifest holds times, so the last bytes may be a few fewer in the run that is killed.
    end = recorder.written - 16
    edges = sorted({min(before, end) for _, before in recorder.calls} | {end})
    middles = [(a + b) // 2 for a, b in itertools.pairwise(edges)]
    return sorted({0, 1, 4095, 4096, 4097, *edges, *middles})


@pytest.mark.parametrize("limit", byte_edges())
def test_kill_9_at_any_byte_leaves_the_previous_step(tmp_path: Path, limit: int) -> None:  # case A1
    write_steps(tmp_path, lf_ckpt.FileLayer(), (1,))

    def save() -> None:
        write_steps(tmp_path, KillAtByte(limit), (2,))
        os.kill(os.getpid(), signal.SIGKILL)  # the manifest holds times: a save may end a few bytes early

    status = in_child(save)

    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    committed = (tmp_path / "steps/2/MANIFEST").exists()
    assert check_store(tmp_path, 1) == (2 if committed else 1)


@pytest.mark.parametrize("limit", [4096, 500_000, 3 << 20, (3 << 20) + 4097, 5 << 20])
def test_kill_9_inside_long_direct_writes(tmp_path: Path, limit: int) -> None:
    old, new = {"x": torch.zeros(2_000_000)}, {"x": torch.ones(2_000_000)}
    with lf_ckpt.open(tmp_path, compress="raw") as store:
        store.save(1, old).wait()

    def save() -> None:
        lf_ckpt.open(tmp_path, compress="raw", files=KillAtByte(limit)).save(2, new).wait()

    assert os.WIFSIGNALED(in_child(save))
    with lf_ckpt.open(tmp_path) as store:
        assert_same(store.load().tensors, old)


def count_effects(tmp_path: Path, keep: list[object]) -> int:
    path = tmp_path / "count"
    write_steps(path, lf_ckpt.FileLayer(), (1, 2))
    recorder = Recorder()
    write_steps(path, recorder, (3,), keep=keep)
    return len(recorder.calls)


@pytest.mark.parametrize("keep", [[], [lf_ckpt.Last(1)]], ids=["keep all", "keep one"])
def test_stopping_at_any_call_leaves_a_loadable_store(tmp_path: Path, keep: list[object]) -> None:
    for at in range(count_effects(tmp_path, keep)):
        path = tmp_path / str(at)
        write_steps(path, lf_ckpt.FileLayer(), (1, 2))
        files = StopAtCall()
        with pytest.raises(Killed):
            stop_during(path, files, at, keep)

        check_store(path, 2)


def stop_during(path: Path, files: StopAtCall, at: int, keep: list[object]) -> None:
    """Save step 3 and die at effect `at`; what a finished process would have cleaned up stays."""
    files.arm(at)
    store = lf_ckpt.open(path, files=files, keep=keep)  # type: ignore[arg-type]
    try:
        store.load()
        store.save(3, STATES[3]).wait()
        files.arm(0)
        files.effect("end", lambda: None)
    finally:
        with contextlib.suppress(Killed):  # the dead cannot erase the lock's record
            store.close()


@pytest.mark.parametrize(("lose_data", "lose_names"), [(True, False), (False, True), (True, True)])
def test_a_power_cut_at_any_call_leaves_a_loadable_store(
    tmp_path: Path, lose_data: bool, lose_names: bool
) -> None:
    keep: list[object] = [lf_ckpt.Last(1)]
    for at in range(count_effects(tmp_path, keep)):
        path = tmp_path / str(at)
        write_steps(path, lf_ckpt.FileLayer(), (1, 2))
        files = Volatile()
        with pytest.raises(Killed):
            stop_during(path, files, at, keep)
        files.cut_power(lose_data=lose_data, lose_names=lose_names)

        check_store(path, 2)


def test_a_durable_step_survives_a_power_cut_right_after_wait(tmp_path: Path) -> None:
    files = Volatile()
    store = lf_ckpt.open(tmp_path, files=files)
    store.save(1, STATES[1]).wait()
    files.cut_power(lose_data=True, lose_names=True)
    store.close()

    assert check_store(tmp_path, 1) == 1


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_error_at_any_call_is_raised_and_the_store_goes_on(tmp_path: Path, code: int) -> None:
    for at in range(count_effects(tmp_path, [])):
        path = tmp_path / str(at)
        files = FailAtCall(at, code)
        with lf_ckpt.open(path, files=files) as store:
            store.save(1, STATES[1]).wait()
            before = files_under(path)
            files.armed = True
            try:
                store.save(2, STATES[2]).wait()
            except (lf_ckpt.DiskFullError, OSError) as error:
                assert isinstance(error, lf_ckpt.DiskFullError) == (code == errno.ENOSPC)  # noqa: PT017
                assert store.steps() == (1,)
                assert files_under(path) == before
                assert_same(store.load().tensors, STATES[1])
            files.armed = False
            store.save(3, STATES[3]).wait()
            assert_same(store.load().tensors, STATES[3])


class BlockAtSync(lf_ckpt.FileLayer):
    """Reports on a pipe and then never returns from the first fsync after `armed`."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.armed = pipe, False

    def sync(self, fd: int) -> None:
        if self.armed:
            os.write(self.pipe, b"x")
            select.select([], [], [])
        super().sync(fd)


def test_nothing_moves_or_goes_before_the_new_step_is_durable(tmp_path: Path) -> None:  # case A3
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            files = BlockAtSync(writer)
            store = lf_ckpt.open(tmp_path, files=files, keep=[lf_ckpt.Last(1)])
            store.save(1, STATES[1]).wait()
            files.armed = True
            store.save(2, STATES[2]).wait()
        finally:
            os._exit(1)
    assert os.read(reader, 1) == b"x"
    try:
        with lf_ckpt.open(tmp_path, read_only=True) as store:
            assert store.latest() == 1
            assert_same(store.load().tensors, STATES[1])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)

    assert check_store(tmp_path, 1) == 1


def test_a_process_that_forgets_to_close_still_finishes_its_save(tmp_path: Path) -> None:
    code = f"import torch, lf_ckpt; lf_ckpt.open({str(tmp_path)!r}).save(5, {{'x': torch.ones(3_000_000)}})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

    with lf_ckpt.open(tmp_path, read_only=True) as store:
        assert torch.equal(store.load().tensors["x"], torch.ones(3_000_000))
