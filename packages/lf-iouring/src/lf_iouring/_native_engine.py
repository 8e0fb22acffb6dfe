"""The engine in C: io_uring with page-cache reads first, or blocking reads, in threads without the GIL."""

import contextlib
import os
import weakref
from dataclasses import replace
from typing import Any

import numpy as np

from ._direct import Decision, Files
from ._errors import EngineError, LoaderError
from ._layout import Slot
from ._native import ffi, lib
from ._reads import Reads
from .engine import (
    POLLING,
    Array,
    Counters,
    EngineInfo,
    errno_text,
    short_read,
    wrong_extent,
    wrong_hash,
)

_MAX_REGISTERED = 1 << 30  # bytes; the kernel takes no larger buffer
_WAIT_MS = 100  # how often a waiting thread looks for signals

_SETUP_FLAGS = {1 << 12: "SINGLE_ISSUER", 1 << 13: "DEFER_TASKRUN"}
RING_FIXES = {
    "EPERM": "a seccomp profile or kernel.io_uring_disabled denies it; allow system calls 425-427",
    "ENOSYS": "the kernel has no io_uring, or a seccomp profile hides it; Linux 5.6 or newer is needed",
    "ENOMEM": "RLIMIT_MEMLOCK is too low; raise it (ulimit -l)",
    "EMFILE": "too few descriptors; raise ulimit -n",
}


def xxh3_64(data: bytes | memoryview | Array, seed: int = 0) -> int:
    """XXH3, 64 bits, of contiguous bytes."""
    view = ffi.from_buffer("uint8_t[]", data)
    return int(lib.lf_xxh3_64(view, len(view), seed))


class NativeEngine:
    """See Engine. `by_name` tells the report whether the user chose."""

    def __init__(
        self, threads: int, pool: Array, dataset: Any, files: Files, decision: Decision, depth: int,
        cache_bytes: int, *, want_ring: bool, by_name: bool, polling: str,
    ) -> None:  # fmt: skip
        report = ffi.new("lf_info *")
        fds = ffi.new("int32_t[]", [*files.fds, *files.direct])
        codings, kept = _codings(dataset)
        options = ffi.new(
            "lf_options *",
            {
                "threads": threads,
                "want_ring": want_ring,
                "entries": depth,
                "files": len(files.fds),
                "direct": bool(files.direct),
                "mapped": decision.io == "mapped",
                "span": files.span,
                "fds": fds,
                "pool": int(pool.ctypes.data),
                "pool_bytes": pool.nbytes if pool.nbytes <= _MAX_REGISTERED else 0,
                "codings": codings,
                "coding_count": len(codings),
                "cache_bytes": cache_bytes,
                # with interrupts off, only direct reads can complete
                "polling": POLLING.index(polling) if polling != "iopoll" or files.direct else 0,
            },
        )
        self._handle = lib.lf_engine_new(options, report)
        if self._handle == ffi.NULL:
            files.close()
            raise EngineError(f"no thread could be started: {errno_text(report.start_error)}")
        info = _describe(report, threads, want_ring, by_name)
        io, io_reason = decision.io, decision.reason
        if report.map_error:
            io, io_reason = "buffered", f"{io_reason}, but no mapping: {errno_text(report.map_error)}"
        polls, why = _polling(report, polling, io)
        self._info = replace(info, io=io, io_reason=io_reason, polling=polls, polling_reason=why)
        # Memory that C threads may write: it must outlive them, also when nobody calls close().
        self._flying: dict[int, tuple[Reads, int, Slot, Any]] = {}
        # The C view of the newest window; consecutive batches share it.
        self._window: tuple[Reads, Any] | None = None
        self._fault = ffi.new("lf_fault *")
        self._last = Counters()
        self._closed = False
        self._finalizer = weakref.finalize(
            self, _free, self._handle, os.getpid(), self._flying, (pool, codings, kept), files
        )

    def submit(self, reads: Reads, batch: int, slot: Slot) -> int:
        """See Engine."""
        window = self._window
        if window is None or window[0] is not reads:
            window = self._window = (reads, _to_c(reads))
        # Noted before the call: an interrupt right after it must not free what C threads are about to write.
        ticket = int(lib.lf_next_ticket(self._live()))
        self._flying[ticket] = (reads, batch, slot, window)
        lib.lf_submit(self._handle, window[1][0], batch, slot.address)
        return ticket

    def wait(self, ticket: int) -> None:
        """See Engine."""
        while (kind := lib.lf_wait(self._live(), ticket, _WAIT_MS, self._fault)) == lib.LF_PENDING:
            pass  # back in Python, where signals are delivered
        reads, batch, _, _ = self._flying.pop(ticket)
        if kind != lib.LF_OK:
            raise _error(reads, batch, kind, self._fault)

    def settle(self) -> None:
        """See Engine."""
        for ticket in list(self._flying):
            with contextlib.suppress(LoaderError):
                self.wait(ticket)

    def info(self) -> EngineInfo:
        """See Engine."""
        return self._info

    def counters(self) -> Counters:
        """See Engine."""
        if self._finalizer.alive:
            self._last = _counters(self._handle)
        return self._last

    def close(self) -> None:
        """See Engine."""
        self.counters()
        self._closed = True
        self._finalizer()

    def abandon(self) -> None:
        """See Engine."""
        self._closed = True
        self._finalizer()

    def _live(self) -> Any:
        if self._closed:  # `finalizer.alive` looks into a registry, twice a batch
            raise EngineError("the engine is closed")
        return self._handle


def _to_c(reads: Reads) -> tuple[Any, ...]:
    places = reads.places
    arrays = {
        "fd": ("int32_t[]", reads.fd),
        "block": ("int32_t[]", reads.block),
        "hash": ("uint32_t[]", reads.hash),
        "offset": ("uint64_t[]", reads.offset),
        "nbytes": ("uint32_t[]", reads.nbytes),
        "items": ("uint32_t[]", reads.items),
        "place": ("uint64_t[]", places.place),
        "room": ("uint64_t[]", places.room),
        "used": ("uint64_t[]", places.used),
        "kind": ("uint8_t[]", reads.kinds),
        "blocks": ("lf_block[]", reads.blocks),
    }
    window = ffi.new("lf_window *")
    views = [ffi.from_buffer(kind, np.ascontiguousarray(array)) for kind, array in arrays.values()]
    for name, view in zip(arrays, views, strict=True):
        setattr(window, name, view)
    window.batches, window.rows = reads.records.shape
    window.fields = reads.fields
    window.verify = reads.verify
    return (window, *views)


def _codings(dataset: Any) -> tuple[Any, list[Any]]:
    """lf_coding[] of all files in order, and what it points to."""
    every = [(coding, reader.vocab_size) for reader in dataset.readers for coding in reader.codings()]
    table, kept = ffi.new("lf_coding[]", len(every)), []
    for entry, (coding, vocabulary) in zip(table, every, strict=True):
        entry.bits, entry.width, entry.vocabulary = coding.bits, coding.dtype.itemsize, vocabulary
        if coding.dictionary is not None:
            content = ffi.from_buffer("uint8_t[]", coding.dictionary.as_bytes())
            entry.dictionary, entry.dictionary_bytes = content, len(content)
            kept.append(content)
        if coding.table is not None:
            ranks = ffi.from_buffer("uint32_t[]", np.ascontiguousarray(coding.table, "<u4"))
            entry.table = ranks
            kept.append(ranks)
    return table, kept


def zstd_version() -> int:
    """Number of the libzstd found at run time, as 10000 * major + 100 * minor + release; 0 without one."""
    return int(lib.lf_zstd_version())


def open_direct(files: Files) -> tuple[Files, tuple[str, str]]:
    """The files with O_DIRECT descriptors, or as they were with the path that refused and why."""
    opened: list[int] = []
    for fd, path in zip(files.fds, files.paths, strict=True):
        got = int(lib.lf_direct_open(fd))
        if got < 0:
            replace(files, direct=tuple(opened)).close()
            return files, (path, errno_text(-got))
        opened.append(got)
    return replace(files, direct=tuple(opened)), ("", "")


def _free(handle: Any, pid: int, flying: dict[int, Any], kept: Any, files: Files) -> None:
    if os.getpid() == pid:
        lib.lf_engine_free(handle)
    else:
        lib.lf_engine_abandon(handle)
    flying.clear()
    files.close()
    del kept


def _counters(handle: Any) -> Counters:
    c = ffi.new("lf_counters *")
    lib.lf_engine_counters(handle, c)
    reads = (c.mapped_reads, c.cached_reads, c.direct_reads, c.ring_reads, c.pread_reads)
    return Counters(*reads, c.bytes, c.busy_ns / 1e9, c.hash_ns / 1e9, c.decoded_blocks, c.decode_ns / 1e9)


def _error(reads: Reads, batch: int, kind: int, fault: Any) -> Exception:
    row, field = fault.row, fault.field
    if kind == lib.LF_HASH:
        return wrong_hash(reads, batch, row, fault.expected, fault.found)
    if kind == lib.LF_SHORT:
        return short_read(reads, batch, row, field, fault.expected, fault.found)
    if kind == lib.LF_EXTENT:
        return wrong_extent(reads, batch, row, field, fault.expected, fault.found)
    if kind == lib.LF_BLOCK_HASH:
        return reads.error(batch, row, 0, f"block hash 0x{fault.expected:016x}", f"0x{fault.found:016x}")
    if kind == lib.LF_DECODE:
        expected = f"a block of {fault.expected} bytes"
        return reads.error(batch, row, 0, expected, f"{fault.found} stored bytes that do not decode to that")
    return reads.error(batch, row, field, f"{fault.expected} bytes", errno_text(fault.error))


def _polling(report: Any, wanted: str, io: str) -> tuple[str, str]:
    """Polling as it is, and why it is not as wanted."""
    if wanted == "off" or (report.polling and report.polling == report.ring_threads):
        return wanted, ""
    if report.polling_error:
        why = f"a read of the data did not come back by polling: {errno_text(report.polling_error)}"
    elif not report.ring_threads:
        why = "there is no ring"
    else:
        why = f"device polling needs direct reads, and these are {io}: use io='direct'"
    return "off", why


def _describe(report: Any, threads: int, want_ring: bool, by_name: bool) -> EngineInfo:
    started = int(report.threads)
    few = "" if started == threads else f"; {started} of {threads} threads could be started"
    if not want_ring:
        return EngineInfo("pread", "asked for by name" + few, started)
    if report.ring_threads == 0:
        text = errno_text(report.ring_error)
        fix = RING_FIXES.get(text.split()[0], "see io_uring_setup(2)")
        return EngineInfo("pread", f"io_uring: {text}: {fix}" + few, started)
    reason = "asked for by name" if by_name else "available"
    if report.ring_threads < started:
        text = errno_text(report.ring_error)
        reason += f"; only {report.ring_threads} of {started} threads got a ring ({text})"
    if report.register_error:
        reason += f"; buffers not registered ({errno_text(report.register_error)})"
    if report.files_error:
        reason += f"; files not registered ({errno_text(report.files_error)})"
    names = tuple(name for bit, name in _SETUP_FLAGS.items() if report.setup_flags & bit)
    registered = report.registered == report.ring_threads
    files = report.registered_files == report.ring_threads
    return EngineInfo("io_uring", reason + few, started, int(report.entries), names, registered, files)
