"""Writes in C: io_uring past the page cache, several in flight, or blocking ones; never with the GIL held."""

import os
import weakref
from collections.abc import Sequence
from typing import Any

from ._errors import EngineError, WriteError
from ._native import ffi, lib
from ._native_engine import RING_FIXES
from ._sinks import Sink, WriterInfo
from .engine import errno_text

Flight = tuple[Any, Any, Sink]  # the job, the memory it comes from, its file


class NativeBackend:
    """See WriteBackend."""

    def __init__(
        self, buffers: Sequence[Any], depth: int, chunk: int, *, want_ring: bool, reason: str
    ) -> None:  # fmt: skip
        views = [ffi.from_buffer("uint8_t[]", buffer) for buffer in buffers]
        addresses = ffi.new("uint64_t[]", [int(ffi.cast("uintptr_t", view)) for view in views])
        sizes = ffi.new("uint64_t[]", [len(view) for view in views])
        report = ffi.new("lf_write_info *")
        options = ffi.new(
            "lf_write_options *",
            {
                "want_ring": want_ring,
                "depth": depth,
                "chunk": chunk,
                "buffers": len(views),
                "addresses": addresses,
                "sizes": sizes,
            },
        )
        self._handle = lib.lf_writer_new(options, report)
        if self._handle == ffi.NULL:
            raise EngineError("no memory for a writer")
        self._info = _describe(report, chunk, sum(map(len, views)), want_ring, reason)
        # Memory that the kernel may read: it must outlive the transfers, also when nobody calls close().
        self._flying: list[Flight] = []
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _free, self._handle, self._pid, self._flying, views)

    def direct(self, sink: Sink) -> str:
        """See WriteBackend."""
        unit = ffi.new("uint32_t *")
        got = int(lib.lf_direct_sink(sink.fd, unit))
        if got < 0:
            return errno_text(-got)
        sink.direct, sink.unit = got, int(unit[0])
        return ""

    def reserve(self, sink: Sink, size: int) -> None:
        """See WriteBackend."""
        rc = int(lib.lf_reserve(sink.fd, size))
        if rc < 0:
            raise OSError(-rc, os.strerror(-rc))

    def write(self, sink: Sink, data: Any, offset: int, *, hashed: bool) -> int | None:
        """See WriteBackend."""
        view = ffi.from_buffer("uint8_t[]", data)
        job = ffi.new(
            "lf_write_job *",
            {
                "fd": sink.fd,
                "direct": sink.direct,
                "unit": sink.unit,
                "hash": hashed,
                "source": int(ffi.cast("uintptr_t", view)),
                "bytes": len(view),
                "offset": offset,
            },
        )
        self._flying.append((job, view, sink))
        while (kind := lib.lf_write(self._handle, job)) == lib.LF_PENDING:
            pass  # back in Python, where signals are delivered
        if kind != lib.LF_OK:
            self.wait(sink)
        self._settle(sink)
        return int(job.xxh3) if hashed else None

    def wait(self, sink: Sink) -> None:
        """See WriteBackend."""
        for job, _, owner in list(self._flying):
            while owner is sink and lib.lf_write_wait(self._handle, job) == lib.LF_PENDING:
                pass
        self._settle(sink)

    def drop(self, sink: Sink) -> None:
        """See WriteBackend."""
        if self._pid != os.getpid():
            return  # the parent's ring, and the parent's to wait for
        for job, _, owner in self._flying:
            if owner is sink:
                lib.lf_write_drop(self._handle, job)
        self._flying[:] = [flight for flight in self._flying if flight[2] is not sink]

    def info(self) -> WriterInfo:
        """See WriteBackend."""
        return self._info

    def close(self) -> None:
        """See WriteBackend."""
        self._finalizer()

    def abandon(self) -> None:
        """See WriteBackend."""
        self._finalizer()

    def _settle(self, sink: Sink) -> None:
        """Forget this file's jobs that are done; raise the first error among them."""
        done = [flight for flight in self._flying if flight[2] is sink and flight[0].flying == 0]
        if not done:
            return
        self._flying[:] = [flight for flight in self._flying if flight[2] is not sink or flight[0].flying]
        for job, _, _ in done:
            sink.direct_bytes += job.direct_bytes
            sink.bounced_bytes += job.bounced_bytes
            if job.refused and sink.direct >= 0:
                sink.retired, sink.direct, sink.io = sink.direct, -1, "buffered"
                sink.io_reason = f"direct writes were refused: {errno_text(job.refused)}"
        failed = [(int(job.failed_at), int(job.error)) for job, _, _ in done if job.error]
        if failed:
            raise WriteError(sink.path, "write", min(failed)[1], min(failed)[0])


def _free(handle: Any, pid: int, flying: list[Flight], views: list[Any]) -> None:
    if os.getpid() == pid:
        lib.lf_writer_free(handle)
    else:
        lib.lf_writer_abandon(handle)
    flying.clear()
    views.clear()


def _describe(report: Any, chunk: int, wanted: int, want_ring: bool, reason: str) -> WriterInfo:
    if not want_ring:
        return WriterInfo("pwrite", reason, 1, chunk)
    if not report.has_ring:
        text = errno_text(report.ring_error)
        fix = RING_FIXES.get(text.split()[0], "see io_uring_setup(2)")
        return WriterInfo("pwrite", f"io_uring: {text}: {fix}", 1, chunk)
    registered = int(report.registered_bytes)
    if report.register_error:
        reason += f"; buffers not registered ({errno_text(report.register_error)})"
    elif registered < wanted:
        reason += f"; {registered} of {wanted} bytes registered, the rest is beyond what a ring takes"
    return WriterInfo("io_uring", reason, int(report.depth), chunk, registered)
