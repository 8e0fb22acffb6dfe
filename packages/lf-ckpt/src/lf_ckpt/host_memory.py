"""Host memory for staging, made usable piece by piece in the background: populated, and page-locked for a device.

Fresh pages cost several times what copying into them costs, and page-locking several times more; a first save therefore
waits only for the pieces that it is about to fill. The memory comes from lf-memory's HostPool where that is installed
(huge pages, populated by several threads), from an anonymous mapping otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# One copy should lie in one registration: CUDA does not say that two may share it.
PIECE_BYTES = 256 << 20
# Below this the first copy populates the memory about as fast as a thread would be started.
SMALL_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; fills pages without touching their content
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device


class HostMemory:
    """`size` bytes, a multiple of 4096, page-aligned.

    pinned: page-lock for CUDA, as `lock` does later.
    """

    def __init__(self, size: int, pinned: bool) -> None:
        self.size = size
        self.seconds_locking = 0.0
        self._changed = threading.Condition()
        self._owner, self._source = _allocate(size)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._owner.memory, np.uint8)[:size]
        self.tensor = torch.from_numpy(self.array)
        self._populated = size if self._owner.populated or size <= SMALL_BYTES else 0
        self._locked = 0
        self._device: int | None = None
        self._problem = ""
        self._stop = False
        self._thread: threading.Thread | None = None
        self._registered: list[int] = []
        self._unlock = weakref.finalize(self, _unregister, self._registered, os.getpid())
        if pinned:
            self.lock()
        else:
            self._start()

    @property
    def pinned(self) -> bool:
        """Whether this memory is page-locked, or is being so."""
        return self._device is not None

    def lock(self) -> None:
        """Page-lock everything for CUDA in the background. A refusal is noted, and the memory serves unlocked."""
        with self._changed:
            if self._device is None and not self._problem:
                self._device = torch.cuda.current_device()
        self._start()

    def wait_ready(self, end: int) -> None:
        """Return when the first `end` bytes are as they shall be."""
        with self._changed:
            self._changed.wait_for(lambda: self._progress() >= end)

    def edges(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """Cut a range into (offset, length) that lie in one registration each."""
        end = offset + length
        while offset < end:
            stop = min(end, (offset // PIECE_BYTES + 1) * PIECE_BYTES)
            yield offset, stop - offset
            offset = stop

    def note(self) -> str:
        """Where the memory is from and what locking it came to."""
        if self._problem:
            return f"{self._source}, not page-locked: {self._problem}"
        if self._device is None:
            return self._source
        return f"{self._source}, page-locked {self._locked} bytes in {self.seconds_locking:.2f} s"

    def close(self) -> None:
        """Stop preparing and unlock; nothing may use the memory any more."""
        with self._changed:
            self._stop, thread = True, self._thread
        if thread is not None:
            thread.join()
        self._unlock()

    def _progress(self) -> int:
        return self._locked if self._device is not None else self._populated

    def _start(self) -> None:
        with self._changed:
            if self._thread is None and self._progress() < self.size:
                self._thread = threading.Thread(target=self._prepare, name="lf-ckpt-memory")
                self._thread.start()

    def _prepare(self) -> None:
        """Background thread: one piece after another until all are ready."""
        while True:
            with self._changed:
                device, at = self._device, self._progress()
                if self._stop or at >= self.size:
                    self._thread = None
                    return
            count = min(PIECE_BYTES, self.size - at)
            if at >= self._populated:
                self._populate(at, count)
            if device is not None:
                self._register(device, at, count)
            with self._changed:
                self._changed.notify_all()

    def _populate(self, at: int, count: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self.array.ctypes.data + at)
        done = libc.madvise(address, ctypes.c_size_t(count), _MADV_POPULATE_WRITE) == 0
        with self._changed:
            self._populated = at + count if done else self.size  # an old kernel: the first copy does it

    def _register(self, device: int, at: int, count: int) -> None:
        began = time.perf_counter()
        problem = _register_one(device, self.array.ctypes.data + at, count)
        with self._changed:
            self.seconds_locking += time.perf_counter() - began
            if problem:
                self._problem, self._device = problem, None
            else:
                self._registered.append(self.array.ctypes.data + at)
                self._locked = at + count


class _Owner:
    """Keeps memory alive; `populated` when every page is there already."""

    def __init__(self, memory: Any, keep: object, populated: bool) -> None:
        self.memory, self.keep, self.populated = memory, keep, populated


def _allocate(size: int) -> tuple[_Owner, str]:
    """(memory, source). A pool that cannot be had is named in the source."""
    if size > SMALL_BYTES:
        try:
            lf_memory = importlib.import_module("lf_memory")
        except ImportError:
            return _Owner(_mapping(size), None, False), "own pages (lf-memory is not installed)"
        try:
            pool = lf_memory.HostPool(size, 1, shared=False, safety=False)
        except lf_memory.PoolError as error:
            return _Owner(_mapping(size), None, False), f"own pages (lf-memory: {error})"
        lease = pool.acquire(0)
        return _Owner(lease.array, (pool, lease), True), f"lf-memory, {pool.stats().pages} pages"
    return _Owner(_mapping(size), None, False), "own pages"


def _mapping(size: int) -> mmap.mmap:
    # Private, since most systems give huge pages to it and not to shared memory.
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _mappings.add(memory)
    # Huge pages make the first touch several times cheaper; a forked child would make each next one copy a page.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without it
                memory.madvise(getattr(mmap, advice))
    return memory


_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _keep_in_child() -> None:
    """A forked child has the objects without their memory. It may have something else at these addresses by the time
    when it collects them, and would unmap that: a SIGSEGV of children that fork saw under load. So it never does."""
    for memory in tuple(_mappings):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


os.register_at_fork(after_in_child=_keep_in_child)


def _register_one(device: int, address: int, count: int) -> str:
    """Page-lock a range; what was refused, or ""."""
    try:
        with torch.cuda.device(device):  # a new thread would make a context on device 0
            runtime: Any = torch.cuda.cudart()
            code = runtime.cudaHostRegister(address, count, _PORTABLE)
            return "" if int(code) == 0 else f"cudaHostRegister: {runtime.cudaGetErrorString(code)}"
    except (
        Exception
    ) as error:  # as on a broken device; were this thread to die, others would wait for it for ever
        return f"cudaHostRegister: {error}"


def _unregister(addresses: list[int], pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child has the pages, but neither the device nor the registration
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())
