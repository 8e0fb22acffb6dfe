"""Staging memory is ready when it is waited for, page-locked piece by piece, and unlocked once."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lf_ckpt
from lf_ckpt import host_memory
from lf_ckpt.host_memory import HostMemory

MIB = 1 << 20


class Runtime:
    """Stands for CUDA's runtime, which is not here: keeps the books and refuses what the real one refuses."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.fail_at: int | None = None

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        assert address % 4096 == 0
        if self.fail_at is not None and len(self.locked) >= self.fail_at:
            return 2
        assert all(address + count <= a or a + n <= address for a, n in self.locked.items())
        self.locked[address] = count
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]  # KeyError: unlocked twice
        return 0

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return f"error {code}"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 4 * MIB)
    yield runtime
    gc.collect()
    assert not runtime.locked


@pytest.fixture(params=["lf-memory", "own pages"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(host_memory, "SMALL_BYTES", MIB)
    if request.param == "own pages":
        monkeypatch.setitem(__import__("sys").modules, "lf_memory", None)
    else:
        pytest.importorskip("lf_memory")
    return str(request.param)


def test_memory_is_aligned_writable_and_named(source: str) -> None:
    memory = HostMemory(10 * MIB + 4096, pinned=False)
    memory.wait_ready(memory.size)
    memory.tensor.fill_(7)

    assert memory.size == 10 * MIB + 4096 == memory.array.size
    assert memory.array.ctypes.data % 4096 == 0
    assert memory.array.min() == 7
    assert source in memory.note()
    memory.close()


def test_pages_are_locked_in_pieces_and_unlocked_by_close(source: str, runtime: Runtime) -> None:
    memory = HostMemory(10 * MIB, pinned=True)
    memory.wait_ready(memory.size)

    assert sorted(runtime.locked.values()) == [2 * MIB, 4 * MIB, 4 * MIB]
    assert memory.pinned
    assert f"page-locked {10 * MIB} bytes" in memory.note()
    memory.close()
    assert not runtime.locked
    memory.close()


def test_a_wait_needs_no_more_pieces_than_it_asks_for(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HostMemory(12 * MIB, pinned=False)
    seen: list[int] = []
    real = host_memory._register_one

    def watched(device: int, address: int, count: int) -> str:
        if len(runtime.locked) == 1:
            memory.wait_ready(4 * MIB)  # would hang if it waited for what comes now
            seen.append(len(runtime.locked))
        return real(device, address, count)

    monkeypatch.setattr(host_memory, "_register_one", watched)
    memory.lock()
    memory.wait_ready(memory.size)
    assert seen == [1]
    memory.close()


def test_memory_in_use_can_be_locked_later(source: str, runtime: Runtime) -> None:
    memory = HostMemory(6 * MIB, pinned=False)
    memory.wait_ready(memory.size)
    memory.tensor.fill_(3)
    memory.lock()
    memory.wait_ready(memory.size)

    assert len(runtime.locked) == 2
    assert memory.array.min() == 3
    memory.close()


def test_a_refusal_is_noted_and_nobody_waits_for_ever(runtime: Runtime) -> None:
    runtime.fail_at = 1
    memory = HostMemory(12 * MIB, pinned=True)
    memory.wait_ready(memory.size)

    assert not memory.pinned
    assert "not page-locked: cudaHostRegister: error 2" in memory.note()
    memory.lock()
    memory.wait_ready(memory.size)
    memory.close()


def test_a_device_that_raises_leaves_memory_unlocked_and_nobody_waiting(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "device", broken)
    memory = HostMemory(12 * MIB, pinned=True)
    memory.wait_ready(memory.size)

    assert not memory.pinned
    assert "illegal memory access" in memory.note()
    memory.close()


def test_memory_prepared_ahead_is_locked_through_the_device_of_the_caller(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.local()  # as CUDA has it: each thread begins on device 0
    used: list[int] = []

    @contextlib.contextmanager
    def on(device: int) -> Iterator[None]:
        before, here.device = getattr(here, "device", 0), device
        yield
        here.device = before

    real = host_memory._register_one
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(here, "device", 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(host_memory, "_register_one", lambda *a: used.append(a[0]) or real(*a))
    with on(3), lf_ckpt.open(tmp_path, expected_bytes=5 * MIB) as store:
        assert store._saver is not None
        assert store._saver._slab._early is not None
        store._saver._slab._early.result(30)
        assert store._saver._slab._slab is not None
        store._saver._slab._slab.memory.wait_ready(5 * MIB)
    assert set(used) == {3}


def test_forgotten_memory_is_unlocked_by_the_collector(runtime: Runtime) -> None:
    memory = HostMemory(5 * MIB, pinned=True)
    memory.wait_ready(memory.size)
    assert runtime.locked
    del memory
    gc.collect()
    assert not runtime.locked


def test_no_copy_spans_two_registrations(runtime: Runtime) -> None:
    memory = HostMemory(12 * MIB, pinned=True)
    parts = list(memory.edges(3 * MIB, 6 * MIB))

    assert parts == [(3 * MIB, MIB), (4 * MIB, 4 * MIB), (8 * MIB, MIB)]
    memory.close()


def test_an_old_kernel_leaves_populating_to_the_first_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SMALL_BYTES", MIB)
    monkeypatch.setitem(__import__("sys").modules, "lf_memory", None)
    refusing: Any = SimpleNamespace(madvise=lambda *_: -1)
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda *_, **__: refusing)
    memory = HostMemory(8 * MIB, pinned=False)
    memory.wait_ready(memory.size)
    memory.tensor.fill_(1)

    assert bool((memory.tensor == 1).all())
    assert memory.note().startswith("own pages")
    memory.close()


def test_a_forked_child_that_collects_a_slab_loses_no_memory_of_its_own() -> None:
    """The slab is not copied to the child, which may get the addresses for something else before it collects."""
    memory = HostMemory(1 << 20, pinned=False)
    cycle: list[object] = [memory]
    cycle.append(cycle)  # only the collector frees it
    del memory, cycle
    pid = os.fork()
    if pid == 0:
        own = [mmap.mmap(-1, 1 << 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(64)]
        for each in own:
            each[:] = b"7" * (1 << 16)
        gc.collect()
        os._exit(0 if all(each[0] == ord("7") for each in own) else 1)
    assert os.waitpid(pid, 0)[1] == 0
