"""What the ways of writing share: a file's descriptors, one stretch of bytes, and the plain way in Python."""

import os
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from ._errors import WriteError

UNIT = 4096  # alignment of direct writes where nothing larger is asked for


@dataclass
class Sink:
    """A file open for writing.

    Attributes:
        path: its name when it was opened.
        fd: through the page cache.
        direct: a second, O_DIRECT, descriptor, or -1.
        retired: such a descriptor that refused, which earlier writes may still name; closed with the file.
        unit: bytes that direct writes begin and end on a multiple of.
        io, io_reason: "direct" or "buffered", and why.
        direct_bytes, bounced_bytes: written past the page cache; of them, copied to aligned memory first.
    """

    path: str
    fd: int
    direct: int = -1
    retired: int = -1
    unit: int = UNIT
    io: str = "buffered"
    io_reason: str = ""
    direct_bytes: int = 0
    bounced_bytes: int = 0


@dataclass(frozen=True)
class WriterInfo:
    """How a WriteEngine writes, and why.

    Attributes:
        name: "io_uring", "pwrite" or "python".
        reason: why this one; for a fallback, what was refused and by which errno.
        depth: writes in flight at most.
        chunk: bytes of each.
        registered_bytes: memory of the caller that is registered with the ring.
    """

    name: str
    reason: str
    depth: int = 1
    chunk: int = 0
    registered_bytes: int = 0


class Turn:
    """A lock for the threads of one process; in a forked child, where its holder may not exist, it is no lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def ours(self) -> bool:
        """Whether this is the process it was made in."""
        return os.getpid() == self._pid

    def __enter__(self) -> None:
        if self.ours:
            self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        if self.ours:
            self._lock.release()


class WriteBackend(Protocol):
    """Puts bytes at places of files. One thread at a time may call it."""

    def direct(self, sink: Sink) -> str:
        """Give the sink a direct descriptor and its unit; returns "" or why that cannot be had."""

    def reserve(self, sink: Sink, size: int) -> None:
        """Have the file system set `size` bytes aside. OSError where it cannot."""

    def write(self, sink: Sink, data: Any, offset: int, *, hashed: bool) -> int | None:
        """Hand bytes over, and hash them on the way. They must not change before `wait`. WriteError."""

    def wait(self, sink: Sink) -> None:
        """Block until all that was handed over for this file is with the kernel. WriteError."""

    def drop(self, sink: Sink) -> None:
        """Let what is in flight for a file land, not to be interrupted, and forget what became of it."""

    def info(self) -> WriterInfo:
        """What this is."""

    def close(self) -> None:
        """Let what is in flight land. Harmless when repeated."""

    def abandon(self) -> None:
        """In a forked child: let go of the parent's ring without waiting."""


class PythonBackend:
    """See WriteBackend: os.pwrite, one write at a time; needs no C module."""

    def __init__(self, reason: str) -> None:
        self._info = WriterInfo("python", reason)

    def direct(self, sink: Sink) -> str:
        """See WriteBackend."""
        return "needs the C module"

    def reserve(self, sink: Sink, size: int) -> None:
        """See WriteBackend."""
        os.posix_fallocate(sink.fd, 0, size)

    def write(self, sink: Sink, data: Any, offset: int, *, hashed: bool) -> int | None:
        """See WriteBackend."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(sink.fd, view[done:], offset + done)
            except OSError as error:
                raise WriteError(sink.path, "write", error.errno or 0, offset + done) from None
        return xxhash.xxh3_64_intdigest(view) if hashed else None

    def wait(self, sink: Sink) -> None:
        """See WriteBackend."""

    def drop(self, sink: Sink) -> None:
        """See WriteBackend."""

    def info(self) -> WriterInfo:
        """See WriteBackend."""
        return self._info

    def close(self) -> None:
        """See WriteBackend."""

    def abandon(self) -> None:
        """See WriteBackend."""
