"""Threads, signals, forks, exits, limits and moved files: nothing hangs, nothing wrong is stored, errors are typed."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ckpt_states import assert_same, state

import lf_ckpt
from lf_ckpt import cli

pytestmark = pytest.mark.timeout(60)


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program of its own; it may not outlive a minute."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


# -- readers beside a writer -----------------------------------------------------------------------------------------


class RetiresMeanwhile(lf_ckpt.FileLayer):
    """Just before `name` of a folder is opened, a writer saves a new step and retires all older ones."""

    def __init__(self, path: Path, folder: str, name: str) -> None:
        self.path, self.target, self.done = path, f"{folder}/{name}", False

    def open(self, path: str) -> int:
        if path.endswith(self.target) and not self.done:
            self.done = True
            with lf_ckpt.open(self.path, keep=[lf_ckpt.Last(1)]) as store:
                store.save(9, state(9)).wait()
        return super().open(path)


@pytest.mark.parametrize(
    ("folder", "name"), [("2", "MANIFEST"), ("2", "rank-0.lfckpt"), ("1", "MANIFEST"), ("1", "rank-0.lfckpt")]
)
def test_a_delta_and_its_base_that_go_while_a_reader_opens_them_are_no_damage(
    tmp_path: Path, folder: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, state(1)).wait()
        assert store.save(2, {**state(1), "step": torch.tensor(2)}).wait().kind == "delta"
    files = RetiresMeanwhile(tmp_path, folder, name)
    with lf_ckpt.open(tmp_path, read_only=True, files=files) as reader:
        loaded = reader.load()

    assert files.done
    assert loaded.step == 9
    assert loaded.report.fallbacks == ()
    assert_same(loaded.tensors, state(9))
    assert "cannot be used" not in caplog.text


def test_an_explicit_step_that_goes_while_it_is_read_is_named(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, state(1)).wait()
    files = RetiresMeanwhile(tmp_path, "1", "rank-0.lfckpt")
    with (
        lf_ckpt.open(tmp_path, read_only=True, files=files) as reader,
        pytest.raises(lf_ckpt.NoCheckpointError, match="step 1: a writer removed it"),
    ):
        reader.load(1)


def test_a_reader_in_a_loop_beside_fifty_retentions_always_gets_a_whole_step(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, keep=[lf_ckpt.Last(1)], full_every=3) as store:
        store.save(0, state(0, size=2000)).wait()
        over, seen, errors = threading.Event(), [], []

        def read() -> None:
            try:
                with lf_ckpt.open(tmp_path, read_only=True) as reader:
                    while not over.is_set():
                        loaded = reader.load()
                        assert loaded.report.fallbacks == ()
                        assert_same(loaded.tensors, state(loaded.step, size=2000))
                        seen.append(loaded.step)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        for step in range(1, 51):
            store.save(step, state(step, size=2000)).wait()
        over.set()
        thread.join()

    assert errors == []
    assert seen == sorted(seen)
    assert len(seen) > 3


# -- the process lacks something -------------------------------------------------------------------------------------


@contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """Room for `spare` more open files."""
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_descriptors_are_an_error_and_no_reason_to_load_an_older_step(tmp_path: Path) -> None:
    """A delta needs two files open, its base one: falling back would resume from an older step."""
    new = {**state(1), "step": torch.tensor(2)}
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, state(1)).wait()
        assert store.save(2, new).wait().kind == "delta"
        for spare in range(6):
            with few_descriptors(spare):
                try:
                    loaded = store.load()
                except OSError as error:
                    assert error.errno == errno.EMFILE  # noqa: PT017
                else:
                    assert (loaded.step, loaded.report.fallbacks) == (2, ())
        assert_same(store.load().tensors, new)


def test_a_save_without_descriptors_fails_and_the_next_one_works(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, state(1)).wait()
        failed = 0
        for spare in range(4):
            with few_descriptors(spare):
                try:
                    store.save(10 + spare, state(2)).wait()
                except OSError as error:
                    assert error.errno == errno.EMFILE  # noqa: PT017
                    failed += 1
        assert failed > 0
        store.save(20, state(3)).wait()
        assert_same(store.load().tensors, state(3))
    assert cli.main(["verify", str(tmp_path), "--deep"]) == 0


LITTLE_MEMORY = """
import resource, sys, torch, lf_ckpt
torch.set_num_threads(1)
state = {"x": torch.arange(2_000_000.0)}
with lf_ckpt.open(sys.argv[1]) as store:
    store.save(1, state).wait()
    big = torch.zeros(1).expand(400 << 20)
    pages = int(open("/proc/self/statm").read().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (256 << 20), hard))
    try:
        store.save(2, {"x": big}).wait()
    except (MemoryError, OSError, RuntimeError, lf_ckpt.CkptError) as error:
        print("refused", type(error).__name__)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    store.save(3, state).wait()
    assert torch.equal(store.load(3).tensors["x"], state["x"])
    print("steps", store.steps())
"""


def test_a_save_that_finds_no_memory_is_an_error_and_the_next_one_works(tmp_path: Path) -> None:
    done = python(LITTLE_MEMORY, tmp_path / "store")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] in ("steps (1, 3)", "steps (1, 2, 3)")


# -- places and clocks -----------------------------------------------------------------------------------------------


def test_a_store_that_is_moved_while_open_fails_its_next_save_and_stays_whole(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "a") as store:
        store.save(1, state(1)).wait()
        shutil.move(tmp_path / "a", tmp_path / "b")
        with pytest.raises(OSError, match="No such file"):
            store.save(2, state(2)).wait()
        shutil.move(tmp_path / "b", tmp_path / "a")
        store.save(3, state(3)).wait()
        assert store.steps() == (1, 3)


@pytest.mark.parametrize("now", [-5.0, 0.0, 4e9])
def test_a_clock_that_jumps_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: float
) -> None:
    from lf_ckpt import team

    with lf_ckpt.open(tmp_path, keep=[lf_ckpt.EverySeconds(60), lf_ckpt.Last(2)]) as store:
        store.save(1, state(1)).wait()
        monkeypatch.setattr(team.time, "time", lambda: now)
        for step in (2, 3, 4):
            store.save(step, state(step)).wait()
        assert_same(store.load().tensors, state(4))
        assert store.steps()[-2:] == (3, 4)


def test_steps_that_go_back_are_kept_and_load_by_number(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, keep=[lf_ckpt.Last(2)]) as store:
        for step in (10, 11, 5, 4):
            store.save(step, state(step)).wait()
            assert_same(store.load(step).tensors, state(step))
        assert store.load().step == 11


class SwapsFile(lf_ckpt.FileLayer):
    """Overwrites a byte of the data file after `reads` reads of it: between the check and the copy of a load."""

    def __init__(self, path: Path, reads: int) -> None:
        self.path, self.left, self.fd = path, reads, -1

    def open(self, path: str) -> int:
        fd = super().open(path)
        if path == str(self.path):
            self.fd = fd
        return fd

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        if fd == self.fd:
            self.left -= 1
            if self.left == 0:
                data = bytearray(self.path.read_bytes())
                for at in range(4096, len(data) - 8192, 4096):
                    data[at] ^= 1
                self.path.write_bytes(data)
        return super().read(fd, view, offset)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_file_that_changes_while_it_is_read_never_loads_wrong(tmp_path: Path, in_place: bool) -> None:
    wanted = state(1)
    with lf_ckpt.open(tmp_path / "good") as store:
        store.save(1, wanted).wait()
    for reads in range(1, 14):
        path = tmp_path / str(reads)
        shutil.copytree(tmp_path / "good", path)
        into = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()} if in_place else None
        files = SwapsFile(path / "steps/1/rank-0.lfckpt", reads)
        with lf_ckpt.open(path, read_only=True, files=files) as store:
            try:
                assert_same(store.load(1, into=into).tensors, wanted)
            except lf_ckpt.CorruptError as error:
                assert error.path.endswith("rank-0.lfckpt")  # noqa: PT017
                assert not any(tensor.any() for tensor in (into or {}).values())
            except lf_ckpt.HalfLoadedError as error:
                assert in_place
                assert isinstance(error.__cause__, lf_ckpt.CorruptError)  # noqa: PT017


def test_a_pipe_or_folder_in_place_of_a_file_is_damage_and_does_not_block(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, state(1)).wait()
        store.save(2, state(2)).wait()
    for name in ("MANIFEST", "rank-0.lfckpt"):
        path = tmp_path / "steps/2" / name
        kept = path.read_bytes()
        for make in (os.mkfifo, os.mkdir):
            path.unlink()
            make(path)
            with lf_ckpt.open(tmp_path, read_only=True) as store:
                assert store.load().step == 1
                with pytest.raises((lf_ckpt.CorruptError, OSError)):
                    store.load(2)
            assert cli.main(["verify", str(tmp_path)]) == 1
            path.rmdir() if path.is_dir() else path.unlink()
            path.write_bytes(kept)
    assert cli.main(["verify", str(tmp_path)]) == 0
