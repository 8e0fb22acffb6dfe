"""Engines that keep several long writes to one file in flight: threads, or lf-iouring's ring where it is installed.

An engine belongs to one save and is called by one thread. What is handed over must lie still until `landed` is called,
which may happen in another thread.
"""

from __future__ import annotations

import errno
import importlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any, Protocol

from .codec import Bytes
from .errors import CkptError
from .files import FileLayer
from .storage import Storage

# On a virtual disk pieces of 8 MiB cost a third of the CPU of 1 MiB ones per byte (0.07 against 0.20 s per GB); longer
# ones leave the last thread alone with the tail.
PIECE_BYTES = 8 << 20
# The same for the ring: 0.04 s of CPU per GB with 8 MiB, 0.10 with 1 MiB, at equal speed.
_RING_DEPTH = 8
_RING_PIECE = 8 << 20


class Engine(Protocol):
    """Long aligned writes to one file, in any order."""

    refused: bool
    """Whether the file system took back its consent to writes past the page cache; known after `flush`."""

    def submit(self, memory: Bytes, offset: int, landed: Callable[[], None]) -> None:
        """Begin to write; raises the OSError of an earlier write that has failed meanwhile."""

    def relieve(self) -> None:
        """The caller is about to wait for memory that may be in here: let it land, or be sure that it does."""

    def flush(self) -> None:
        """Return when everything has landed; raises the first error."""

    def close(self) -> None:
        """Return when no memory is in use any more, whatever failed; never raises. Harmless when repeated."""


class ThreadEngine:
    """`pwrite` in the threads of a pool; the kernel works without the GIL.

    fd: where long runs go. fallback: the same file through the page cache, for a file system that opens files with
    O_DIRECT and then refuses a write; None when `fd` is such a descriptor already.
    """

    def __init__(self, files: Storage, pool: Executor, fd: int, fallback: int | None) -> None:
        self._files, self._pool, self._fd, self._fallback = files, pool, fd, fallback
        self._flying: set[Future[None]] = set()
        self._error: BaseException | None = None
        self.refused = False

    def submit(self, memory: Bytes, offset: int, landed: Callable[[], None]) -> None:
        """See Engine."""
        self._raise()
        starts = range(0, memory.size, PIECE_BYTES)
        countdown = Countdown(len(starts), landed)
        for at in starts:
            piece = memory[at : at + PIECE_BYTES]
            self._flying.add(self._pool.submit(self._write, piece, offset + at, countdown))
        self._flying = {future for future in self._flying if not future.done()}

    def relieve(self) -> None:
        """Memory lands by itself."""

    def flush(self) -> None:
        """See Engine."""
        self.close()
        self._raise()

    def close(self) -> None:
        """See Engine."""
        wait(self._flying)
        self._flying.clear()

    def _write(self, piece: Bytes, offset: int, countdown: Countdown) -> None:
        if self._error is None:  # after an error the file is lost: the rest would only keep the disk busy
            try:
                self._write_piece(piece, offset)
            except BaseException as error:
                self._error = error
        countdown.one_less()

    def _write_piece(self, piece: Bytes, offset: int) -> None:
        if not self.refused:
            try:
                self._files.write(self._fd, [piece.data], offset)
                return
            except OSError as error:
                if error.errno != errno.EINVAL or self._fallback is None:
                    raise
            self.refused = True
        assert self._fallback is not None
        self._files.write(self._fallback, [piece.data], offset)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class RingEngine:
    """lf-iouring's FileWriter, which one thread keeps busy.

    writer: lf_iouring.FileWriter of the file. budget: bytes after which what has been handed over is waited for, so
    that a slab smaller than the state is given back; None never waits before `flush`.
    """

    def __init__(self, writer: Any, budget: int | None) -> None:
        self._writer, self._budget = writer, budget
        self._landed: list[Callable[[], None]] = []
        self._bytes = 0
        self.refused = False

    def submit(self, memory: Bytes, offset: int, landed: Callable[[], None]) -> None:
        """See Engine."""
        self._writer.write(memory, offset)
        self._landed.append(landed)
        self._bytes += memory.size
        if self._budget is not None and self._bytes >= self._budget:
            self.flush()

    def relieve(self) -> None:
        """See Engine. What is written may be a small part of what it keeps from the slab: raw bytes compress, and
        a ring gives nothing back before its oldest piece."""
        if self._budget is not None and self._landed:
            self.flush()

    def flush(self) -> None:
        """See Engine."""
        self._writer.flush()
        self.refused = self._writer.info().io != "direct"
        for landed in self._landed:
            landed()
        self._landed.clear()
        self._bytes = 0

    def close(self) -> None:
        """See Engine; the descriptors of lf-iouring are given back, the store's own stay open."""
        self._writer.abort()


class Countdown:
    """Calls back when the last of `count` parts, each ended by any thread, has ended."""

    def __init__(self, count: int, callback: Callable[[], None]) -> None:
        self._left, self._callback, self._lock = count, callback, threading.Lock()

    def one_less(self) -> None:
        """One part has ended."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._callback()


class Ring:
    """lf-iouring's write engine with a slab registered, kept from save to save and made anew with the slab."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._engine: Any = None
        self._slab: Bytes | None = None

    def file(self, path: str, slab: Bytes) -> tuple[Any | None, str]:
        """(FileWriter of an existing, empty file, how it writes), or (None, why it cannot be written so)."""
        if self._engine is None or self._slab is not slab:
            self.close()
            self._engine = self._module.WriteEngine([slab], depth=_RING_DEPTH, chunk=_RING_PIECE)
            self._slab = slab
        writer = self._engine.create(path, io="auto", durable=False)
        if writer.info().io != "direct":
            writer.abort()
            return None, f"lf-iouring: {writer.info().io_reason}"
        info = self._engine.info()
        registered = f", {info.registered_bytes >> 20} MiB registered" if info.registered_bytes else ""
        return writer, f"io_uring of lf-iouring, {info.depth} in flight{registered}"

    def close(self) -> None:
        """Give the ring up."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._slab = None


def find_ring(files: Storage) -> tuple[Ring | None, str]:
    """(ring, "") where this process may have one, else (None, reason)."""
    if type(files) is not FileLayer:
        return None, f"{type(files).__name__} must see every write"
    try:
        module = importlib.import_module("lf_iouring")
    except ImportError as error:
        return None, f"lf-iouring is not installed ({error}): pip install lf-ckpt[iouring]"
    try:
        probe = module.WriteEngine(depth=1)
    except module.EngineError as error:
        return None, str(error)
    info = probe.info()
    probe.close()
    return (Ring(module), "") if info.name == "io_uring" else (None, str(info.reason))


def require_ring(files: Storage) -> Ring:
    """The ring, or CkptError with the reason why there is none."""
    ring, reason = find_ring(files)
    if ring is None:
        raise CkptError(f"engine='io_uring' cannot be had: {reason}; use engine='auto' or 'threads'")
    return ring
