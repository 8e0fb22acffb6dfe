"""Stores on fsspec file systems: memory, a local directory seen through fsspec, and one that fails at random."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_states import assert_same, state
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import lf_ckpt
from lf_ckpt.cli import main
from lf_ckpt.objects import ObjectLayer

SEEDS = int(os.environ.get("LF_CKPT_FLAKY_SEEDS", "200"))


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty place in fsspec's memory, which is one for the whole process."""
    name = f"/lf-ckpt-{abs(hash(request.node.nodeid))}"
    yield f"memory:/{name}"
    for path in [p for p in MemoryFileSystem.store if p.startswith(name)]:
        del MemoryFileSystem.store[path]


def files_at(url: str) -> set[str]:
    root = url.removeprefix("memory:/")
    return {path.removeprefix(root + "/") for path in MemoryFileSystem.store if path.startswith(root)}


def test_a_url_is_a_store_like_any_other(url: str) -> None:
    states = {step: {**state(1), "step": torch.tensor(step)} for step in (1, 2, 3)}
    with lf_ckpt.open(url, keep=[lf_ckpt.Last(2)]) as store:
        for step, tensors in states.items():
            report = store.save(step, tensors, {"blob": b"x" * 10, "epoch": step}).wait()
        assert report.kind == "delta"
        assert store.path == url
        info = store.info()
        assert (info["storage"], info["mode"], info["commit"]) == ("fsspec memory", "object", "put last")
        assert info["lock"] == "owner record (advisory): object stores have no locks"

    with lf_ckpt.open(url, read_only=True) as store:
        assert store.steps() == (1, 2, 3)  # 1 is the base of 2 and 3
        loaded = store.load()
        assert_same(loaded.tensors, states[3])
        assert loaded.items == {"blob": b"x" * 10, "epoch": 3}
        into = {name: torch.zeros_like(tensor) for name, tensor in states[2].items()}
        store.load(2, into=into)
        assert_same(into, states[2])
    assert main(["verify", url, "--deep"]) == 0
    assert not [name for name in files_at(url) if name.endswith(".tmp")]
    assert "LOCK" not in files_at(url)


def test_reading_where_nothing_is_is_an_error_and_a_second_writer_is_refused(url: str) -> None:
    with pytest.raises(lf_ckpt.CkptError, match="not a checkpoint store"):
        lf_ckpt.open(url, read_only=True)
    with lf_ckpt.open(url) as store:
        with pytest.raises(lf_ckpt.LockedError, match="this process has it open"):
            lf_ckpt.open(url)
        store.save(1, state()).wait()
    lf_ckpt.open(url).close()


def test_requests_that_cannot_be_met_are_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(lf_ckpt.CkptError, match=r"mode=.local. is for paths"):
        lf_ckpt.open(url, mode="local")
    with pytest.raises(ValueError, match="leave `files` out"):
        lf_ckpt.open(url, files=lf_ckpt.FileLayer())
    with pytest.raises(ValueError, match="give it as a string"):
        lf_ckpt.open(Path(url))
    with pytest.raises(lf_ckpt.CkptError, match="nonsense"):
        lf_ckpt.open("nonsense://x")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(lf_ckpt.CkptError, match=r"pip install 'lf-ckpt\[fsspec\]'"):
        lf_ckpt.open(url)


def test_a_file_url_is_the_local_path(tmp_path: Path) -> None:
    with lf_ckpt.open(f"file://{tmp_path}/a%20b") as store:
        store.save(1, state()).wait()
        assert store.info()["lock"] == "OFD"
    with lf_ckpt.open(tmp_path / "a b", read_only=True) as reader:
        assert_same(reader.load().tensors, state())


def test_a_file_system_that_shows_unfinished_files_gets_the_guarded_marker(tmp_path: Path) -> None:
    layer = ObjectLayer(LocalFileSystem())
    with lf_ckpt.open(str(tmp_path / "s"), files=layer) as store:
        store.save(1, state(1)).wait()
        store.save(2, state(2)).wait()
        assert (store.info()["storage"], store.info()["commit"]) == ("fsspec file", "marker last")
    with lf_ckpt.open(tmp_path / "s", read_only=True) as reader:  # the files are those of any store
        assert_same(reader.load().tensors, state(2))
        assert reader.steps() == (1, 2)
    (tmp_path / "s/steps/2/MANIFEST").write_bytes(b"{")
    (tmp_path / "s/steps/2/MANIFEST.tmp").write_bytes(b"{")
    with lf_ckpt.open(str(tmp_path / "s"), files=layer) as store:
        assert store.steps() == (1,)
    assert sorted(os.listdir(tmp_path / "s/steps")) == ["1"]


def test_long_files_are_streamed_in_parts_and_small_ones_put_at_once(url: str) -> None:
    system = Counting()
    layer = ObjectLayer(system, part_bytes=1 << 16)
    root = url.removeprefix("memory:/")
    with lf_ckpt.open(root, files=layer, compress="raw") as store:
        store.save(1, state(1, layers=2, size=50_000)).wait()
        assert_same(store.load().tensors, state(1, layers=2, size=50_000))
    assert system.opened == [f"{root}/steps/1/rank-0.lfckpt"]
    assert f"{root}/steps/1/MANIFEST" in system.put


class Counting(MemoryFileSystem):
    """Notes how files arrive."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.put: list[str] = []

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> MemoryFile:
        if mode == "wb" and kwargs.get("data") is None:
            self.opened.append(path)
        return super()._open(path, mode, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.put.append(path)
        super().pipe_file(path, value, mode, **kwargs)


class TestLayer:
    """The contract of Storage where it is not that of POSIX."""

    def test_nothing_is_visible_before_sync_and_nothing_at_all_without_it(self, url: str) -> None:
        layer, path = ObjectLayer(MemoryFileSystem()), url.removeprefix("memory:/") + "/x"
        fd = layer.create(path)
        layer.write(fd, [b"abc", memoryview(b"def")], 0)
        assert not layer.exists(path)
        layer.close(fd)
        assert not layer.exists(path)

        fd = layer.create(path)
        layer.write(fd, [], 0)
        layer.sync(fd)
        layer.sync(fd)
        layer.close(fd)
        assert layer.size(layer.open(path)) == 0

    def test_pieces_in_any_order_become_one_file_and_a_hole_is_an_error(self, url: str) -> None:
        layer, path = ObjectLayer(MemoryFileSystem(), part_bytes=1000), url.removeprefix("memory:/") + "/x"
        data = random.Random(0).randbytes(10_000)
        pieces = [(at, data[at : at + 700]) for at in range(0, len(data), 700)]
        random.Random(1).shuffle(pieces)
        fd = layer.create(path)
        threads = [threading.Thread(target=layer.write, args=(fd, [piece], at)) for at, piece in pieces]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        layer.sync(fd)
        with pytest.raises(OSError, match="written twice"):
            layer.write(fd, [b"x"], 0)
        layer.close(fd)
        found = bytearray(20_000)
        assert layer.read(layer.open(path), memoryview(found), 0) == len(data)
        assert found[: len(data)] == data

        fd = layer.create(path)
        layer.write(fd, [b"late"], 10)
        with pytest.raises(OSError, match="bytes from 0 on were never written"):
            layer.sync(fd)

    def test_errors_have_an_errno_and_a_lost_network_is_not_a_missing_file(self, url: str) -> None:
        layer = ObjectLayer(Flaky(0, 1.0))
        for use in (layer.exists, layer.names, layer.open, layer.unlink):
            with pytest.raises(OSError, match=r".") as caught:
                use("/nowhere")
            assert caught.value.errno == errno.EIO
        with pytest.raises(FileNotFoundError) as missing:
            ObjectLayer(MemoryFileSystem()).open("/nowhere")
        assert missing.value.errno == errno.ENOENT
        assert ObjectLayer(MemoryFileSystem()).names("/nowhere") == []

    def test_the_wrong_kind_of_descriptor_is_refused(self, url: str) -> None:
        layer, path = ObjectLayer(MemoryFileSystem()), url.removeprefix("memory:/") + "/x"
        assert layer.claim(path, b"1")
        assert not layer.claim(path, b"2")
        with pytest.raises(OSError, match="for reading"):
            layer.write(layer.open(path), [b"x"], 0)
        with pytest.raises(OSError, match="for writing"):
            layer.size(layer.create(path))
        for refused in (
            lambda: layer.rename(path, path),
            lambda: layer.lock(path),
            lambda: layer.put(1, b""),
        ):
            with pytest.raises(OSError, match="object stores"):
                refused()


class NetworkError(Exception):
    """What a client library may raise: no OSError."""


class Flaky(MemoryFileSystem):
    """Each call fails with a chance: before it has an effect, or after it (the answer is lost)."""

    cachable = False

    def __init__(self, seed: int, chance: float) -> None:
        super().__init__()
        self.store, self.pseudo_dirs = {}, [""]  # fsspec's memory is one for the whole process
        self.random, self.chance, self.armed = random.Random(seed), chance, True
        self.turn = threading.Lock()

    def risk(self) -> None:
        with self.turn:
            if self.armed and self.random.random() < self.chance:
                kind = self.random.choice((OSError, NetworkError, TimeoutError))
                raise kind("lost")

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        self.risk()
        file = super()._open(path, mode, **kwargs)
        self.risk()
        return TornFile(self, file) if mode == "wb" and kwargs.get("data") is None else file

    def info(self, path: str, **kwargs: Any) -> Any:
        self.risk()
        return super().info(path, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self.risk()
        return super().ls(path, detail, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        self.risk()
        return super().cat_file(path, start, end, **kwargs)

    def rm_file(self, path: str) -> None:
        self.risk()
        super()._rm(path)
        self.risk()


class TornFile:
    """A stream that writes only part of what it is given when it fails."""

    def __init__(self, system: Flaky, file: MemoryFile) -> None:
        self.system, self.file = system, file

    def write(self, data: bytes) -> int:
        self.file.write(data[: len(data) // 2])
        self.system.risk()
        return self.file.write(data[len(data) // 2 :])

    def close(self) -> None:
        self.system.risk()

    def discard(self) -> None:
        self.system.store.pop(self.file.path, None)


FLAKY_STATES = {
    step: {**state(step % 3, layers=2, size=3_000), "step": torch.tensor(step)} for step in range(1, 5)
}


def save_through(system: Flaky) -> set[int]:
    """Four saves through a failing file system; the steps that were reported durable."""
    durable: set[int] = set()
    try:
        store = lf_ckpt.open("/s", files=ObjectLayer(system, part_bytes=4096), on_error="warn", full_every=2)
    except (lf_ckpt.CkptError, OSError):
        return durable
    for step, tensors in FLAKY_STATES.items():
        if store.save(step, tensors).wait().error is None:
            durable.add(step)
    with contextlib.suppress(lf_ckpt.CkptError, OSError):
        store.close()
    return durable


def check_whole(system: Flaky, durable: set[int]) -> None:
    """Everything that can be seen loads bit for bit, and so does every step that was reported durable."""
    if not system.exists("/s/FORMAT"):
        assert not durable
        return
    with lf_ckpt.open("/s", files=ObjectLayer(system), read_only=True) as reader:
        assert durable <= set(reader.steps())
        for step in reader.steps():
            assert_same(reader.load(step).tensors, FLAKY_STATES[step])
        if reader.steps():
            assert reader.load().report.fallbacks == ()


def test_a_step_on_a_file_system_that_fails_at_random_is_whole_or_invisible() -> None:
    outcomes = [0, 0]
    for seed in range(SEEDS):
        system = Flaky(seed, chance=random.Random(seed).choice((0.01, 0.03, 0.1)))
        durable = save_through(system)
        system.armed = False

        check_whole(system, durable)
        lf_ckpt.break_lock("/s", files=ObjectLayer(system))
        with lf_ckpt.open("/s", files=ObjectLayer(system)) as store:
            store.save(9, FLAKY_STATES[4]).wait()
            assert_same(store.load().tensors, FLAKY_STATES[4])
        outcomes[0] += len(durable)
        outcomes[1] += len(FLAKY_STATES) - len(durable)
    assert min(outcomes) > SEEDS / 10, "saves should have ended in both ways"
