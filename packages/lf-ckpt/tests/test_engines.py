"""How long runs reach the disk: every engine writes the same bytes, says why it was chosen, and fails loudly."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_states import assert_same
from hypothesis import given
from hypothesis import strategies as st

import lf_ckpt
from lf_ckpt import staging_slab
from lf_ckpt.engines import PIECE_BYTES, Countdown, Ring, ThreadEngine, find_ring
from lf_ckpt.priority import NICE
from lf_ckpt.rate import BURST_SECONDS, Throttle
from lf_ckpt.sink import Sink
from lf_ckpt.sizing import predict_stall
from lf_ckpt.storage import Buffer

MIB = 1 << 20
NO_RING = find_ring(lf_ckpt.FileLayer())[1]
needs_ring = pytest.mark.skipif(bool(NO_RING), reason=NO_RING)


class Files(lf_ckpt.FileLayer):
    """Counts long writes; may refuse O_DIRECT when a file is opened or, later, when it is written."""

    def __init__(self, *, no_open: bool = False, no_write: bool = False) -> None:
        super().__init__()
        self.no_open, self.no_write = no_open, no_write
        self.direct: set[int] = set()
        self.long: list[tuple[bool, int]] = []
        self.threads: set[str] = set()

    def open_direct(self, path: str) -> int | None:
        fd = None if self.no_open else super().open_direct(path)
        if fd is not None:
            self.direct.add(fd)
        return fd

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        if fd in self.direct and self.no_write:
            raise OSError(errno.EINVAL, "Invalid argument")
        if sum(map(len, buffers)) >= MIB:
            self.long.append((fd in self.direct, offset))
            self.threads.add(threading.current_thread().name.rpartition("_")[0])
        super().write(fd, buffers, offset)


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 255, (21 * MIB + 5,), dtype=torch.uint8, generator=generator)
    return {
        "noise": noise,
        "small": torch.arange(10.0),
        "weights": torch.randn(3 * MIB // 4, generator=generator),
    }


@pytest.mark.parametrize("compress", ["raw", "zstd"])
@pytest.mark.parametrize(
    "options",
    [
        {"engine": "threads"},
        {"engine": "threads", "writers": 1},
        {"engine": "threads", "slab_bytes": 8 * MIB},
        {"engine": "threads", "io": "buffered"},
        pytest.param({"engine": "io_uring"}, marks=needs_ring),
        pytest.param({"engine": "io_uring", "slab_bytes": 8 * MIB}, marks=needs_ring),
        {"rate_limit": 10**9},
    ],
    ids=str,
)
def test_every_engine_stores_the_same_state(tmp_path: Path, options: dict[str, Any], compress: Any) -> None:
    tensors = state()
    with lf_ckpt.open(tmp_path, compress=compress, **options) as store:
        report = store.save(1, tensors).wait()
        loaded = store.load()

    assert_same(loaded.tensors, tensors)
    wanted = {"threads": "threads", "io_uring": "io_uring"}.get(options.get("engine", ""), "")
    assert wanted in report.io


@needs_ring
def test_auto_takes_the_ring_and_a_file_layer_of_ones_own_sees_every_write(tmp_path: Path) -> None:
    files = Files()
    with lf_ckpt.open(tmp_path / "a") as store:
        assert "io_uring" in store.save(1, state()).wait().io
    with lf_ckpt.open(tmp_path / "b", files=files, compress="raw") as store:
        report = store.save(1, state()).wait()

    assert "Files must see every write" in report.io
    assert len(files.long) == 2 + 2 + 1  # chunks of 16 and 6 MiB in pieces of 8, and the weights
    assert files.threads == {"lf-ckpt-pwrite"}  # how many of them is up to the machine


def test_without_lf_iouring_threads_write_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lf_iouring", None)
    with lf_ckpt.open(tmp_path) as store:
        assert "pip install lf-ckpt[iouring]" in store.save(1, state()).wait().io
    with pytest.raises(lf_ckpt.CkptError, match="not installed"):
        lf_ckpt.open(tmp_path, engine="io_uring")
    lf_ckpt.open(tmp_path).close()  # the refusal left no lock behind


def test_where_direct_writes_are_refused_the_page_cache_serves(tmp_path: Path) -> None:
    for number, (files, says) in enumerate(
        [(Files(no_open=True), "refuses O_DIRECT"), (Files(no_write=True), "in part buffered: refused")]
    ):
        with lf_ckpt.open(tmp_path / str(number), files=files) as store:
            report = store.save(1, state()).wait()
            assert_same(store.load().tensors, state())
        assert says in report.io
        assert files.long
        assert not any(direct for direct, _ in files.long)


def test_direct_writes_that_were_asked_for_and_are_refused_are_an_error(tmp_path: Path) -> None:
    with (
        lf_ckpt.open(tmp_path, files=Files(no_open=True), io="direct") as store,
        pytest.raises(lf_ckpt.CkptError, match=r"io='direct' cannot be had: .*O_DIRECT.*use io='auto'"),
    ):
        store.save(1, state())
    assert not list((tmp_path / "steps").iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "aio"},
        {"writers": 0},
        {"rate_limit": 0},
        {"priority": "idle"},
        {"expected_bytes": -1},
        {"slab_bytes": (4 << 20) - 1},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        lf_ckpt.open(tmp_path, **options)
    with pytest.raises(lf_ckpt.CkptError, match="contradicts"):
        lf_ckpt.open(tmp_path, engine="io_uring", io="buffered")


def test_an_error_of_one_thread_stops_the_rest_and_is_raised_once_memory_is_free(tmp_path: Path) -> None:
    class Broken(lf_ckpt.FileLayer):
        def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

    memory = np.zeros(3 * PIECE_BYTES, np.uint8)
    landed: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        engine = ThreadEngine(Broken(), pool, -1, None)
        engine.submit(memory, 0, lambda: landed.append(1))
        with pytest.raises(OSError, match="Input/output"):
            engine.flush()
        assert landed == [1]  # the slab may have it back
        with pytest.raises(OSError, match="Input/output"):
            engine.submit(memory, 0, lambda: None)
        engine.close()


class LateWriter:
    """Stands for lf-iouring's FileWriter: takes memory, and writes all of it no earlier than at `flush`."""

    def __init__(self, path: str) -> None:
        self.path, self.kept = path, list[tuple[Any, int]]()

    def write(self, memory: Any, offset: int) -> None:
        self.kept.append((memory, offset))

    def flush(self) -> None:
        with open(self.path, "r+b") as file:
            for memory, offset in self.kept:
                file.seek(offset)
                file.write(memory.data)
        self.kept.clear()

    def info(self) -> Any:
        return SimpleNamespace(io="direct")

    def abort(self) -> None:
        self.kept.clear()


def test_a_ring_that_keeps_one_piece_does_not_hold_up_a_small_slab(tmp_path: Path) -> None:
    noise = torch.randint(0, 255, (MIB,), dtype=torch.uint8)  # stays in the ring: less than its budget
    many = {f"zeros.{k:02}": torch.zeros(MIB // 4) for k in range(20)}  # not written at all, next to nothing
    ring = SimpleNamespace(file=lambda path, slab: (LateWriter(path), "late"), close=lambda: None)
    with lf_ckpt.open(tmp_path, slab_bytes=8 * MIB) as store:
        assert store._saver is not None
        store._saver._writing._ring = ring  # type: ignore[assignment]
        report = store.save(1, {"noise": noise, **many}, overlap=True).wait(60)
        loaded = store.load(1)

    assert "late" in report.io
    assert_same(loaded.tensors, {"noise": noise, **many})


class Registers:
    """Stands for lf_iouring: its engines hold the memory that is registered with them until they are closed."""

    def __init__(self) -> None:
        self.held = 0

    def WriteEngine(self, slabs: Sequence[Any], **_: Any) -> Any:  # noqa: N802
        self.held += sum(slab.size for slab in slabs)

        def close() -> None:
            self.held -= sum(slab.size for slab in slabs)

        info = SimpleNamespace(registered_bytes=0, depth=1)
        create = lambda path, **_: LateWriter(path)  # noqa: E731
        return SimpleNamespace(close=close, create=create, info=lambda: info)


def test_a_ring_lets_go_of_a_slab_before_a_larger_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, seen = Registers(), []
    with lf_ckpt.open(tmp_path, compress="raw") as store:
        assert store._saver is not None
        store._saver._writing._ring = Ring(module)
        store.save(1, {"x": torch.ones(MIB)}).wait()
        assert module.held >= 4 * MIB

        real = staging_slab.Slab
        monkeypatch.setattr(staging_slab, "Slab", lambda *a: seen.append(module.held) or real(*a))
        store.save(2, {"x": torch.ones(5 * MIB)}).wait()
        assert seen == [0]
        assert module.held >= 20 * MIB
        assert_same(store.load().tensors, {"x": torch.ones(5 * MIB)})
    assert module.held == 0


def test_a_descriptor_that_does_not_close_leaves_no_other_open(tmp_path: Path) -> None:
    class Broken(Files):
        closed: list[int] = []  # noqa: RUF012

        def close(self, fd: int) -> None:
            self.closed.append(fd)
            raise OSError(errno.EIO, "Input/output error")

    files = Broken()
    sink = Sink(files, [101, 102])
    with pytest.raises(OSError, match="Input/output"):
        sink.close()
    sink.close()
    assert files.closed == [102, 101]


def test_a_countdown_calls_back_once_at_its_end() -> None:
    calls: list[int] = []
    countdown = Countdown(3, lambda: calls.append(1))
    for wanted in (0, 0, 1):
        countdown.one_less()
        assert len(calls) == wanted


def test_background_threads_are_lowered_and_the_caller_is_not(tmp_path: Path) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    nices: set[int] = set()

    class Watching(lf_ckpt.FileLayer):
        def sync(self, fd: int) -> None:
            nices.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            super().sync(fd)

    with lf_ckpt.open(tmp_path, files=Watching()) as store:
        nices.clear()
        report = store.save(1, state()).wait()

    assert nices == {max(NICE, mine)}
    assert "nice" in report.priority
    assert "I/O" in report.priority
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_normal_priority_leaves_the_threads_alone(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, priority="normal") as store:
        assert store.save(1, state()).wait().priority == "normal, as asked"


def test_a_refused_priority_is_reported_and_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr("lf_ckpt.priority._IOPRIO_SET", {})
    with lf_ckpt.open(tmp_path) as store:
        report = store.save(1, state()).wait()
    assert "CPU priority unchanged (Permission denied), I/O priority unchanged" in report.priority


@given(st.lists(st.tuples(st.integers(0, 50 * MIB), st.floats(0, 2)), max_size=40), st.integers(1, 10**9))
def test_a_throttle_never_lets_more_through_than_rate_and_burst(
    takes: list[tuple[int, float]], rate: int
) -> None:
    now = [0.0]
    throttle = Throttle(rate, lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + seconds))
    sent = 0
    for count, pause in takes:
        now[0] += pause
        throttle.take(count)
        assert (
            sent <= rate * (now[0] + BURST_SECONDS) * (1 + 1e-9) + 1
        )  # what went out before this one is paid for
        sent += count


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.floats(1, 1e11))
def test_the_predicted_stall_is_what_does_not_fit_at_the_rate_of_earlier_saves(
    state_bytes: int, slab: int, rate: float
) -> None:
    stall = predict_stall(state_bytes, slab, rate)
    assert stall is not None
    assert stall == (0 if state_bytes <= slab else (state_bytes - slab) / rate)
    assert (predict_stall(state_bytes, slab, None) is None) == (state_bytes > slab)


def test_a_small_slab_states_its_stall_before_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with lf_ckpt.open(tmp_path, slab_bytes=8 * MIB) as store:
        first = store.save(1, state())
        first.wait()
        second = store.save(2, state())
        report = second.wait()
        small = store.save(3, {"x": torch.zeros(5)})

    assert first.predicted_stall is None
    assert second.predicted_stall is not None
    assert second.predicted_stall > 0
    assert report.predicted_stall == second.predicted_stall
    assert small.predicted_stall == 0
    assert "unknown, nothing has been written yet" in caplog.text
    assert caplog.text.count("staging waits for the disk") == 2


def test_the_slab_of_an_expected_state_is_made_before_the_first_save(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, expected_bytes=24 * MIB) as store:
        assert store._saver is not None
        made = store._saver._slab
        assert made._early is not None
        made._early.result(30)
        early = made._slab
        assert early is not None
        assert early.size == 24 * MIB
        store.save(1, {"x": torch.zeros(MIB)}).wait()
        assert made._slab is early
