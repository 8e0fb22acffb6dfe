"""Files written past the page cache: WriteEngine, which owns a ring, and the FileWriters it makes.

A file that must appear complete or not at all is written under another name and renamed:

    with engine.create("step-7.tmp") as file:
        file.write(array)
    os.replace("step-7.tmp", "step-7")
    lf_iouring.sync_folder(".")
"""

import errno
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from ._errors import EngineError, LoaderError, WriteError
from ._sinks import PythonBackend, Sink, Turn, WriteBackend, WriterInfo

_ENGINES = ("auto", "io_uring", "pwrite", "python")
_IO = ("auto", "direct", "buffered")
_CHUNK_UNIT = 64 << 10  # the largest unit of a file system that direct writes are used on


class Extent(NamedTuple):
    """Where a write went.

    offset, nbytes: in the file. xxh3: XXH3, 64 bits, seed 0, of the bytes, or None if not asked for.
    """

    offset: int
    nbytes: int
    xxh3: int | None


@dataclass(frozen=True)
class FileInfo:
    """How a file is being written.

    Attributes:
        io: "direct" or "buffered".
        io_reason: why.
        reserve_reason: why nothing was reserved although it was asked for, or "".
        unit: direct writes begin and end on a multiple of so many bytes; what lies before and behind
            goes through the page cache.
        nbytes: of the file, up to the end of what was handed over.
        direct_bytes: landed past the page cache; complete after `flush`.
        bounced_bytes: of these, copied first because they were not aligned to 4 KiB in memory.
    """

    io: str
    io_reason: str
    reserve_reason: str
    unit: int
    nbytes: int
    direct_bytes: int
    bounced_bytes: int


class WriteEngine:
    """A ring, and memory registered with it, that any number of files are written through, one or several at a time.

    Args:
        buffers: contiguous memory that most writes come from (a slab, a pool's buffer). It is registered with the
            ring, 1 GiB at a time, if RLIMIT_MEMLOCK allows; `info()` tells. Writes from elsewhere work as well.
        engine: "auto" (io_uring, else blocking pwrite, with the reason in `info()`), or one of "io_uring",
            "pwrite", "python" and nothing else.
        depth: writes in flight at most, 1 to 256.
        chunk: bytes of each, a multiple of 64 KiB up to 64 MiB.

    Threads may share an engine; they take turns. A forked child cannot use it. Raises EngineError for an engine
    that cannot be had, LoaderError for other arguments that do not fit.
    """

    def __init__(
        self, buffers: Sequence[Any] = (), *, engine: str = "auto", depth: int = 8, chunk: int = 1 << 20
    ) -> None:
        if engine not in _ENGINES:
            raise EngineError(f"engine={engine!r}: choose one of {', '.join(_ENGINES)}")
        if not 1 <= depth <= 256:
            raise LoaderError(f"depth={depth!r}: it must be in 1..256")
        if not _CHUNK_UNIT <= chunk <= 64 << 20 or chunk % _CHUNK_UNIT:
            raise LoaderError(f"chunk={chunk!r}: it must be a multiple of 64 KiB, 64 MiB at most")
        self._backend = _backend(engine, buffers, depth, chunk)
        self._turn = Turn()
        self._closed = False

    def create(
        self, path: str | Path, *, reserve: int = 0, io: str = "auto", durable: bool = True
    ) -> "FileWriter":
        """Open a file for writing; what it held is lost.

        Args:
            path: of the file; its folder must exist.
            reserve: bytes to have set aside on the file system at once, so that a full disk is an error now, and
                writes need not wait for each other to make the file longer. Cut back at close to what was written.
            io: "direct" past the page cache, "buffered" through it, "auto" for direct where the file system allows.
            durable: close() returns when the bytes are on the device.

        Raises WriteError if the file cannot be opened or the space not be had, EngineError for io="direct" where
        that is refused.
        """
        if io not in _IO:
            raise EngineError(f"io={io!r}: choose one of {', '.join(_IO)}")
        with self._turn:
            self._require_usable()
            return FileWriter(self, str(path), reserve, io, durable)

    def info(self) -> WriterInfo:
        """Which engine writes, why, and what is registered."""
        return self._backend.info()

    def close(self) -> None:
        """Let what is in flight land and give the ring up. Files still open cannot go on. Harmless when repeated."""
        with self._turn:
            if self._closed:
                return
            self._closed = True
            if self._turn.ours:
                self._backend.close()
            else:
                self._backend.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _require_usable(self) -> None:
        if self._closed:
            raise EngineError("the write engine is closed")
        if not self._turn.ours:
            raise EngineError("a write engine cannot be used after fork; make one in the child")


class FileWriter:
    """One file; made by `WriteEngine.create`.

    After an error or an interrupt the file is incomplete: every further write raises, and close() only gives
    the descriptors back. Leaving a `with` block by an exception does the same; the file stays, for you to remove.
    Nobody should read the file, or write it in another way, before it is closed.
    """

    def __init__(self, engine: WriteEngine, path: str, reserve: int, io: str, durable: bool) -> None:
        self._engine = engine
        self._backend: WriteBackend = engine._backend
        self._durable = durable
        self._end = 0
        self._reserved = 0
        self._reserve_reason = ""
        self._failed = self._closed = False
        self._sink = Sink(path, _open(path))
        self._finalizer = weakref.finalize(self, _let_go, engine._turn, self._backend, self._sink)
        try:
            self._choose(io)
            self._reserve(reserve)
        except BaseException:
            self.abort()
            raise

    @property
    def path(self) -> str:
        """The name it was opened by."""
        return self._sink.path

    @property
    def end(self) -> int:
        """Bytes of the file: where the next write goes that names no offset."""
        return self._end

    def write(self, data: Any, offset: int | None = None, *, xxh3: bool = False) -> Extent:
        """Hand the bytes of a contiguous buffer over; they must not change before `flush` or `close`.

        Args:
            data: bytes, array or any other C-contiguous buffer of any length and alignment. What is aligned to
                4 KiB in memory and in the file is written as it lies.
            offset: in the file; None for its end. What lies between stays zero. Writes that overlap need
                a `flush` between them.
            xxh3: also hash the bytes, in the same pass.

        Returns as soon as all bytes are on their way. Raises WriteError, also for an earlier write that has
        failed meanwhile.
        """
        with self._engine._turn:
            self._require_open()
            at = self._end if offset is None else offset
            if at < 0:
                raise LoaderError(f"offset={offset}: it must not be negative")
            view = memoryview(data)
            if not view.c_contiguous:
                raise LoaderError("only contiguous memory can be written; make a contiguous copy first")
            try:
                digest = self._backend.write(self._sink, data, at, hashed=xxh3)
            except BaseException:
                self._failed = True
                raise
            if view.nbytes:
                self._end = max(self._end, at + view.nbytes)
            return Extent(at, view.nbytes, digest)

    def flush(self) -> None:
        """Wait until every write has landed; their memory is free then. Not yet durable. WriteError."""
        with self._engine._turn:
            self._require_open()
            self._flush()

    def sync(self) -> None:
        """`flush`, and have the device keep it (fdatasync), size included. WriteError."""
        with self._engine._turn:
            self._require_open()
            self._flush()
            self._call("fdatasync", os.fdatasync)

    def close(self) -> None:
        """Finish: flush, cut to size, fdatasync if `durable`, and give the descriptors back in any case.

        Harmless when repeated, and after an error. Raises WriteError if the file is not complete by now.
        """
        with self._engine._turn:
            if self._closed:
                return
            if self._failed:
                self.abort()
                return
            try:
                self._require_open()
                self._flush()
                if self._reserved > self._end:
                    self._call("truncate", lambda fd: os.ftruncate(fd, self._end))
                if self._durable:
                    self._call("fdatasync", os.fdatasync)
            except BaseException:
                self.abort()
                raise
            self._closed = True
            self._finalizer()

    def abort(self) -> None:
        """Give the descriptors back without finishing; returns when no memory is in use any more."""
        with self._engine._turn:
            self._closed = True
            self._finalizer()

    def info(self) -> FileInfo:
        """How it is being written; see FileInfo."""
        sink = self._sink
        return FileInfo(
            io=sink.io,
            io_reason=sink.io_reason,
            reserve_reason=self._reserve_reason,
            unit=sink.unit,
            nbytes=self._end,
            direct_bytes=sink.direct_bytes,
            bounced_bytes=sink.bounced_bytes,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _choose(self, io: str) -> None:
        if io == "buffered":
            self._sink.io_reason = "asked for by name"
            return
        why = self._backend.direct(self._sink)
        if why and io == "direct":
            raise EngineError(
                f"io='direct' cannot be had: {self.path}: {why}; use io='auto' or io='buffered'"
            )
        self._sink.io = "buffered" if why else "direct"
        self._sink.io_reason = f"no direct writes: {why}" if why else "the file system allows it"

    def _reserve(self, size: int) -> None:
        if size <= 0:
            return
        try:
            self._backend.reserve(self._sink, size)
            self._reserved = size
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise WriteError(self.path, "reserve", error.errno or 0) from None
            self._reserve_reason = f"the file system cannot reserve: {error.strerror}"

    def _flush(self) -> None:
        try:
            self._backend.wait(self._sink)
        except BaseException:
            self._failed = True
            raise

    def _call(self, operation: str, call: Any) -> None:
        try:
            call(self._sink.fd)
        except OSError as error:
            self._failed = True
            raise WriteError(self.path, operation, error.errno or 0) from None

    def _require_open(self) -> None:
        self._engine._require_usable()
        if self._closed:
            raise LoaderError(f"{self.path}: the writer is closed")
        if self._failed:
            raise LoaderError(
                f"{self.path}: an earlier write failed or was interrupted; the file is incomplete"
            )


def sync_folder(path: str | Path) -> None:
    """Make the names in a folder durable, as after a rename. WriteError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise WriteError(str(path), "fsync", error.errno or 0) from None


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise WriteError(path, "open", error.errno or 0) from None


def _let_go(turn: Turn, backend: WriteBackend, sink: Sink) -> None:
    """Close a file's descriptors, but not before the last write that names them: their numbers are soon others'."""
    with turn:
        backend.drop(sink)
        _close(sink)


def _close(sink: Sink) -> None:
    """All descriptors, whatever happens; a network file system may report a lost write only here."""
    failure: OSError | None = None
    for fd in (sink.direct, sink.retired, sink.fd):
        if fd >= 0:
            try:
                os.close(fd)
            except OSError as error:
                failure = error
    sink.direct = sink.retired = sink.fd = -1
    if failure is not None:
        raise WriteError(sink.path, "close", failure.errno or 0)


def _backend(engine: str, buffers: Sequence[Any], depth: int, chunk: int) -> WriteBackend:
    if engine == "python":
        return PythonBackend("asked for by name")
    try:
        from ._native_writer import NativeBackend
    except ImportError as error:
        if engine != "auto":
            raise EngineError(
                f"engine={engine!r} needs the C module, which this installation lacks ({error}): install a C "
                "compiler and reinstall lf-iouring, or use engine='auto'"
            ) from error
        return PythonBackend(f"the C module is not built ({error})")
    reason = "available" if engine == "auto" else "asked for by name"
    backend = NativeBackend(buffers, depth, chunk, want_ring=engine != "pwrite", reason=reason)
    if engine == "io_uring" and backend.info().name != "io_uring":
        reason = backend.info().reason
        backend.close()
        raise EngineError(f"engine='io_uring' cannot be had: {reason}; or use engine='auto'")
    return backend
