"""Many tensors filled at once: what waits, what an error leaves behind, and what shares memory."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_states import assert_same, bits, copy_of

import lf_ckpt
from lf_ckpt import fetch, filling
from lf_ckpt.errors import CorruptError
from lf_ckpt.files import FileLayer
from lf_ckpt.filling import Filler
from lf_ckpt.loading import Wanted, load_step
from lf_ckpt.local import Window, batches
from lf_ckpt.reader import StepReader

COUNT = 60


class Gate(FileLayer):
    """Reads wait while the gate is closed; `before` runs in the reading thread, with the offset."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.begun = threading.Semaphore(0)
        self.ended = 0
        self.failing: set[int] = set()
        self._lock = threading.Lock()

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        if not self.opened.is_set():
            self.begun.release()
            if offset in self.failing:
                raise InterruptedError("read error")
            assert self.opened.wait(60)
        try:
            return super().read(fd, view, offset)
        finally:
            with self._lock:
                self.ended += 1


class FailsSecondRead(FileLayer):
    """The second read at one offset of a data file fails: the first was the check."""

    def __init__(self, offset: int) -> None:
        self.offset, self.seen, self.armed = offset, Counter[int](), False
        self._lock = threading.Lock()

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        with self._lock:
            self.seen[offset] += self.armed and len(view) > 4096
            bad = offset == self.offset and self.seen[offset] == 2
        if bad:
            raise OSError(errno.EIO, "read error")
        return super().read(fd, view, offset)


def tensors(seed: int = 0, count: int = COUNT) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"t{i:02}": torch.randn(5000, generator=generator) for i in range(count)}


def write(path: Path, *seeds: int) -> None:
    with lf_ckpt.open(path, compress="raw", full_every=0) as store:
        for step, seed in enumerate(seeds, 1):
            store.save(step, tensors(seed), {"blob": bytes(range(256)) * 40}).wait()


def opened(path: Path, files: FileLayer, step: int = 1) -> StepReader:
    return StepReader(files, str(path / "steps"), str(step))


def place_of(path: Path, name: str, step: int = 1) -> int:
    """File offset of the first byte of a tensor."""
    with opened(path, FileLayer(), step) as reader:
        (entry,) = (t for t in reader.manifest.tensors if t.name == name)
        return next(iter(reader.extents_of(entry.shards[0].placed)))[2].place


@contextmanager
def later(action: Any) -> Iterator[None]:
    """Run `action` in a thread a moment after the block has begun."""
    timer = threading.Timer(0.2, action)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_a_load_returns_when_its_bytes_are_there(tmp_path: Path) -> None:
    write(tmp_path, 3)
    gate = Gate()
    with opened(tmp_path, gate) as reader:
        gate.opened.clear()
        with later(gate.opened.set):
            fresh = load_step(reader, Wanted(io="buffered"), 4)
            gate.opened.clear()
        with later(gate.opened.set):
            into = {name: torch.zeros_like(t) for name, t in tensors(3).items()}
            load_step(reader, Wanted(into, io="buffered", precheck=False), 4)

    assert_same(fresh.tensors, tensors(3))
    assert_same(into, tensors(3))
    assert fresh.items["blob"] == bytes(range(256)) * 40


def test_a_bytes_item_is_whole_even_among_loads_that_are_not(tmp_path: Path) -> None:
    write(tmp_path, 0)
    gate = Gate()
    with opened(tmp_path, gate) as reader, Filler(reader, 2, True, "buffered") as filler:
        gate.opened.clear()
        with later(gate.opened.set), filler.together():
            found = filler.blob(reader.manifest.blobs[0])

    assert found == bytes(range(256)) * 40


def test_few_parts_wait_however_many_tensors_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0)
    threads, submitted = 2, threading.Semaphore(0)

    class Counted(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
            submitted.release()
            return super().submit(*args, **kwargs)

    monkeypatch.setattr(filling, "ThreadPoolExecutor", Counted)
    bound, gate = filling._AHEAD * threads, Gate()
    assert bound < COUNT
    with opened(tmp_path, gate) as reader:
        gate.opened.clear()
        loaded: list[Any] = []
        loader = threading.Thread(target=lambda: loaded.append(load_step(reader, Wanted(), threads)))
        loader.start()
        for _ in range(bound):
            assert submitted.acquire(timeout=60)
        one_more = submitted.acquire(
            timeout=0.3
        )  # the loader is waiting: nothing can end before the gate opens
        gate.opened.set()
        loader.join()

    assert not one_more
    assert_same(loaded[0].tensors, tensors())


def test_nothing_is_filled_any_more_when_an_error_is_raised(tmp_path: Path) -> None:
    write(tmp_path, 0)
    gate = Gate()
    gate.failing = {place_of(tmp_path, "t00")}
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    with opened(tmp_path, gate) as reader, Filler(reader, 2, True, "buffered") as filler:
        entries = {entry.name: entry for entry in reader.manifest.tensors}

        def fill(names: Iterable[str]) -> dict[str, torch.Tensor]:
            """Fill tensors; all as they are at the very moment when that ends."""
            with suppress(InterruptedError), filler.together():
                for name in names:
                    filler.fill_window(entries[name], Window(into[name], entries[name].shards[0].box))
            return copy_of(into)

        def release() -> None:
            for _ in range(2):  # t01 is being read when t00 has failed
                assert gate.begun.acquire(timeout=60)
            gate.opened.set()

        gate.opened.clear()
        with later(release):
            then = fill(into)
        reads = gate.ended
        fill(["t05"])

    assert bits(then["t01"]) == bits(tensors()["t01"])  # had begun: waited for, not abandoned
    assert not then["t10"].any()  # had not begun: never will
    assert gate.ended == reads + 1
    assert bits(into.pop("t05")) == bits(tensors()["t05"])
    assert_same(into, {name: then[name] for name in into})


@pytest.mark.parametrize("number", [0, 17, COUNT - 1])
def test_a_damaged_tensor_anywhere_leaves_all_others_alone(tmp_path: Path, number: int) -> None:
    write(tmp_path, 0)
    data = tmp_path / "steps/1/rank-0.lfckpt"
    content = bytearray(data.read_bytes())
    content[place_of(tmp_path, f"t{number:02}") + 11] ^= 4
    data.write_bytes(content)
    into = {name: torch.full_like(tensor, 7) for name, tensor in tensors().items()}

    with lf_ckpt.open(tmp_path, read_only=True) as store, pytest.raises(CorruptError, match=f"t{number:02}"):
        store.load(1, into=into)

    assert_same(into, {name: torch.full_like(tensor, 7) for name, tensor in into.items()})


@pytest.mark.parametrize("strict", [True, False])
def test_a_disk_that_fails_after_the_check_is_said_to_have_left_a_mixture(
    tmp_path: Path, strict: bool
) -> None:
    write(tmp_path, 1)
    files = FailsSecondRead(place_of(tmp_path, "t30"))
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    with lf_ckpt.open(tmp_path, read_only=True, files=files) as store:
        files.armed = True
        with pytest.raises(lf_ckpt.HalfLoadedError, match="t00, t01") as caught:
            store.load(1, into=into, strict=strict, io="buffered")

    assert "t30" in caught.value.touched
    assert isinstance(caught.value.__cause__, OSError)
    changed = {name for name, tensor in into.items() if tensor.any()}
    assert "t00" in changed
    assert changed <= set(caught.value.touched)


def test_an_older_step_overwrites_a_mixture_only_where_it_has_every_name(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    place = place_of(tmp_path, "t30", step=2)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}

    files = FailsSecondRead(place)
    with lf_ckpt.open(tmp_path, read_only=True, files=files) as store:
        files.armed = True
        loaded = store.load(into=into, io="buffered")
    assert loaded.step == 1
    assert "may hold a mixture" in loaded.report.fallbacks[0][1]
    assert_same(into, tensors(1))

    files = FailsSecondRead(place)
    with lf_ckpt.open(tmp_path, read_only=True, files=files) as store:
        files.armed = True
        with pytest.raises(lf_ckpt.HalfLoadedError, match="step 2"):
            store.load(into=into, strict=False, io="buffered")


def test_of_names_that_share_memory_here_the_last_one_stays(tmp_path: Path) -> None:
    saved = {"a": torch.randn(600_000), "b": torch.randn(600_000), "c": torch.randn(600_000)}
    with lf_ckpt.open(tmp_path, compress="raw") as store:
        store.save(1, saved).wait()
        for _ in range(5):
            one, flat = torch.zeros(600_000), torch.zeros(600_000)
            store.load(into={"a": one, "b": flat, "c": one.view(600_000)})
            assert bits(one) == bits(saved["c"])
            assert bits(flat) == bits(saved["b"])


def test_only_tensors_that_share_memory_are_filled_apart() -> None:
    flat = torch.zeros(100)
    parts = list(flat.split(10))
    assert batches(parts) == [range(10)]
    assert batches([*parts, flat[25:35]]) == [range(2), range(2, 3), range(3, 10), range(10, 11)]
    assert batches([flat[:50].view(5, 10)[:, :5], flat[:50].view(5, 10)[:, 5:]]) == [range(1), range(1, 2)]
    assert batches([flat[:60], flat[10:20], flat[50:70], flat[70:], torch.zeros(3)]) == [
        range(1), range(1, 2), range(2, 5),
    ]  # fmt: skip
    assert batches([torch.zeros(0), flat, torch.zeros(0)]) == [range(3)]
    assert batches([]) == []


class Past(FileLayer):
    """Direct reads on any file system."""

    def open_direct_read(self, path: str) -> int | None:
        return os.open(path, os.O_RDONLY)

    def cached(self, fd: int, offset: int) -> bool:
        return False


class Settling:
    """Stands for `settle`: waits while `opened` is not set; tensors in `failing` raise when another one is waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failing: str) -> None:
        self.opened, self.begun, self.landed = (
            threading.Event(),
            threading.Semaphore(0),
            threading.Semaphore(0),
        )
        self._settle, self._land, self._failing = filling.settle, filling.land, failing
        monkeypatch.setattr(filling, "settle", self.settle)
        monkeypatch.setattr(filling, "land", self.land)

    def land(self, *args: Any) -> Any:
        found = self._land(*args)
        self.landed.release()
        return found

    def settle(self, run: Any, landed: Any, out: Any, name: str, *, verify: bool) -> None:
        if name in self._failing:
            assert self.begun.acquire(timeout=60)
            raise InterruptedError("hash")
        self.begun.release()
        assert self.opened.wait(60)
        self._settle(run, landed, out, name, verify=verify)


def test_the_disk_reads_on_while_others_settle_but_only_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0)
    threads, gate = 2, Settling(monkeypatch)
    loaded: list[Any] = []
    with opened(tmp_path, Past()) as reader:
        loader = threading.Thread(
            target=lambda: loaded.append(load_step(reader, Wanted(io="direct"), threads))
        )
        loader.start()
        for _ in range(2 * threads):  # twice as many as can be settling
            assert gate.landed.acquire(timeout=60)
        one_more = gate.landed.acquire(timeout=0.3)
        gate.opened.set()
        loader.join()

    assert not one_more
    assert_same(loaded[0].tensors, tensors())


@pytest.mark.parametrize("memory", ["lent", "own"])
def test_what_was_read_is_settled_before_an_error_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    write(tmp_path, 0)
    gate = Settling(monkeypatch, "t00")
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    if memory == "lent":
        monkeypatch.setattr(fetch.DirectFile, "reaches", lambda *_: False)

    with opened(tmp_path, Past()) as reader, later(gate.opened.set), pytest.raises(InterruptedError):
        load_step(reader, Wanted(into, io="direct", precheck=False), 2)
    then = copy_of(into)

    assert bits(then["t01"]) == bits(tensors()["t01"])
    assert not then["t40"].any()
    lent = [fetch._lend() for _ in range(fetch._bounces.qsize())]
    assert len({memory.ctypes.data for memory in lent}) == len(lent)  # none was given back twice
    for one in lent:
        fetch._bounces.put(one)


def test_bytes_that_fail_their_hash_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0)
    with next((tmp_path / "steps/1").glob("*.lfckpt")).open("r+b") as file:
        file.seek(place_of(tmp_path, "t07"))
        file.write(b"\xff\xff\xff")
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    monkeypatch.setattr(fetch.DirectFile, "reaches", lambda *_: False)
    with opened(tmp_path, Past()) as reader, pytest.raises(CorruptError, match="hash") as caught:
        load_step(reader, Wanted(into, io="direct", precheck=False), 2)

    assert caught.value.tensor == "t07"
    assert not into["t07"].any()
