"""Threads that save, close and log, forks and exits beside a save: nothing hangs, errors are typed."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from ckpt_states import assert_same, state
from test_abuse import python

import lf_ckpt
from lf_ckpt import cli
from lf_ckpt.storage import Buffer

pytestmark = pytest.mark.timeout(60)


def test_two_threads_that_save_take_turns(tmp_path: Path) -> None:
    """Documented as one thread at a time; the slab is shared, so a second one inside would store a mixture."""
    errors: list[BaseException] = []
    with lf_ckpt.open(tmp_path, full_every=0, compress="raw") as store:

        def save(first: int) -> None:
            try:
                for step in range(first, first + 8):
                    store.save(step, {"x": torch.full((300_000,), float(step))})
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=save, args=(first,)) for first in (0, 100, 200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.wait()
        assert errors == []
        for step in store.steps():
            assert bool((store.load(step).tensors["x"] == step).all()), step
        assert len(store.steps()) == 24


def test_closing_during_a_save_of_another_thread_ends_both(tmp_path: Path) -> None:
    for _ in range(5):
        store = lf_ckpt.open(tmp_path)
        ended: list[object] = []

        def save(store: lf_ckpt.Store = store, ended: list[object] = ended) -> None:
            try:
                for step in range(50):
                    store.save(step, state(step))
            except lf_ckpt.CkptError as error:
                ended.append(error)

        thread = threading.Thread(target=save)
        thread.start()
        store.close()
        thread.join()
        assert len(ended) <= 1
        lf_ckpt.open(tmp_path).close()
    assert cli.main(["verify", str(tmp_path), "--deep"]) == 0


class Slow(lf_ckpt.FileLayer):
    """Every fsync waits for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def sync(self, fd: int) -> None:
        self.gate.wait()
        super().sync(fd)


def test_a_fork_during_a_save_hurts_neither_side(tmp_path: Path) -> None:
    files = Slow()
    files.gate.set()
    with lf_ckpt.open(tmp_path, files=files) as store:
        store.save(1, state(1)).wait()
        files.gate.clear()
        handle = store.save(2, state(2))
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            try:
                assert_same(store.load().tensors, state(1))
                with pytest.raises(lf_ckpt.CkptError, match="forked"):
                    handle.wait()
                store.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        files.gate.set()
        handle.wait()
        assert_same(store.load().tensors, state(2))


EXIT = """
import atexit, sys, torch, lf_ckpt
torch.set_num_threads(1)

def late():
    try:
        stores[-1].save(6, {"x": torch.zeros(10)}).wait()
    except (RuntimeError, lf_ckpt.CkptError) as error:
        print("refused", type(error).__name__)
    stores[-1].close()
    print("closed")

atexit.register(late)
options = [{}, {"engine": "threads"}, {"threads": 2}, {"slab_bytes": 4 << 20, "engine": "threads", "io": "buffered"}]
stores = []
for number, option in enumerate([*options, *options]):
    # Beside busy neighbours threads of low priority starve: 79 s, for what takes 4.
    stores.append(lf_ckpt.open(f"{sys.argv[1]}/{number}", priority="normal", **option))
    stores[-1].save(5, {"x": torch.arange(3_000_000.0)}, overlap=number >= len(options))
"""


def test_an_exit_waits_for_saves_in_flight_and_a_save_during_it_does_not_hang(tmp_path: Path) -> None:
    done = python(EXIT, tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "closed"
    for number in range(8):
        with lf_ckpt.open(tmp_path / str(number), read_only=True) as store:
            assert_same(store.load(5).tensors, {"x": torch.arange(3_000_000.0)})


class NoThread:
    """Stands in for an executor of a process that may start no more threads."""

    def submit(self, *_: object) -> None:
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("which", ["_writer", "_stager"])
def test_a_save_that_gets_no_thread_is_an_error_and_the_next_one_works(
    tmp_path: Path, which: str, overlap: bool
) -> None:
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, state(1)).wait()
        saver = store._saver
        real = getattr(saver, which)
        setattr(saver, which, NoThread())
        if overlap or which == "_writer":
            with pytest.raises(RuntimeError, match="thread"):
                store.save(2, state(2), overlap=overlap)
        setattr(saver, which, real)
        try:
            store.save(3, state(3)).wait()
        except lf_ckpt.CkptError:  # the writer had the job already: its error comes here
            store.save(3, state(3)).wait()
        assert store.steps() == (1, 3)
        assert_same(store.load().tensors, state(3))
    assert not (tmp_path / "steps/2").exists()


def test_a_log_handler_that_fails_does_not_keep_a_save_from_ending(tmp_path: Path) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("broken handler")

    log, handler = logging.getLogger("lf_ckpt"), Broken()
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, state(1)).wait()
        log.addHandler(handler)
        level = log.level
        log.setLevel(logging.INFO)
        try:
            assert store.save(2, state(2)).wait(timeout=30).kind == "full"
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
        assert_same(store.load(2).tensors, state(2))


class FailsOnce(lf_ckpt.FileLayer):
    """When armed, the first write behind the header of a data file waits for `inside` and fails."""

    def __init__(self) -> None:
        self.armed, self.inside = False, threading.Event()

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        if self.armed and offset > 0:
            self.armed = False
            assert self.inside.wait(20)
            raise OSError(errno.EIO, "disk error")
        super().write(fd, buffers, offset)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_overlapped_save_leaves_nothing_in_the_slab_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """The copier of the failed save is held inside the slab while the next save begins."""
    from lf_ckpt import staging

    files, copy, gate, left = FailsOnce(), staging.copy_range, threading.Event(), [3]

    def slow(*arguments: object, **options: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            files.inside.set()
            gate.wait(20)
        copy(*arguments, **options)  # type: ignore[arg-type]

    old = {f"t{i}": torch.full((100_000,), float(i)) for i in range(6)}
    new = {name: tensor + 100 for name, tensor in old.items()}
    with lf_ckpt.open(tmp_path, files=files, compress="raw") as store:
        store.save(1, old).wait()
        monkeypatch.setattr(staging, "copy_range", slow)
        files.armed = True
        handle = store.save(2, {name: tensor - 1 for name, tensor in old.items()}, overlap=True)
        with pytest.raises(OSError, match="disk error"):
            handle.wait(20)
        threading.Timer(0.3, gate.set).start()
        store.save(3, new, overlap=overlap).wait()
        assert_same(store.load(3).tensors, new)
