"""The engine protocol: rows of a batch from disk into a slot, checked; and the choice among the engines."""

import errno
import os
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ._direct import Decision, Files, decide, files_of, memory_limit, refused
from ._errors import DataError, EngineError
from ._reads import Reads

Array = npt.NDArray[Any]
CHOICES = ("auto", "io_uring", "pread", "python")
MAX_FLYING = 60  # batches one engine holds at a time; the C queue has 64 places


class Target(NamedTuple):
    """Where one batch goes.

    tokens: [rows, edge] in the stored dtype, each row contiguous.
    mask: uint8[rows, edge] for the unpacked loss mask, or None.
    address, mask_address: first bytes of the two, for native code; 0 without a mask.
    """

    tokens: Array
    mask: npt.NDArray[np.uint8] | None
    address: int
    mask_address: int


@dataclass(frozen=True)
class EngineInfo:
    """Which engine works and why.

    Attributes:
        name: "io_uring", "pread", "python" or "records" (record by record through lf-format).
        reason: why this one, in words; for a fallback, what was refused and by which errno.
        threads: threads that read.
        ring_entries: reads in flight a thread at most, 0 without rings.
        setup_flags: io_uring set-up flags in use, by name.
        registered: the pool is registered with every ring (READ_FIXED).
        registered_files: so are the files.
        io: "buffered" or "direct".
        io_reason: why.
    """

    name: str
    reason: str
    threads: int
    ring_entries: int = 0
    setup_flags: tuple[str, ...] = ()
    registered: bool = False
    registered_files: bool = False
    io: str = "buffered"
    io_reason: str = "the only way of this engine"


@dataclass(frozen=True)
class Counters:
    """What an engine has done since its start.

    Attributes:
        cached_reads: extents served from the page cache without blocking.
        direct_reads: extents read past the page cache, by ring or pread.
        ring_reads: extents that went through io_uring.
        pread_reads: extents read by a blocking pread.
        bytes: payload bytes asked for.
        read_s: seconds its threads were busy, hashing included.
        hash_s: seconds of it spent in record hashes; the C engines time one row a batch and scale.
    """

    cached_reads: int = 0
    direct_reads: int = 0
    ring_reads: int = 0
    pread_reads: int = 0
    bytes: int = 0
    read_s: float = 0.0
    hash_s: float = 0.0


class Engine(Protocol):
    """Reads batches in its own threads. One thread at a time may call it."""

    def submit(self, reads: Reads, batch: int, target: Target) -> int:
        """Start reading batch `batch` of `reads`; at most MAX_FLYING at a time. Returns a ticket.

        Rows are padded with zeros; empty rows are all zero.
        """

    def wait(self, ticket: int) -> None:
        """Block until a batch is complete and forget it. DataError if a record is not as written."""

    def info(self) -> EngineInfo:
        """What this engine is."""

    def counters(self) -> Counters:
        """What it has done."""

    def close(self) -> None:
        """Finish what is being read, stop the threads. Harmless when repeated."""

    def abandon(self) -> None:
        """In a forked child: drop the parent's engine without waiting for threads that are not there."""


def choose(
    name: str, threads: int, pool: Array, *, raw: bool, dataset: Any, io: str = "auto", depth: int = 64
) -> Engine:
    """The engine asked for.

    Args:
        name: one of CHOICES.
        threads: number of reading threads, >= 1.
        pool: uint8 memory that targets lie in, for registration.
        raw: whether every record lies in a raw block; others are read through `dataset.record`.
        io: "buffered", "direct", or "auto" for direct where the page cache cannot hold the data set.
        depth: reads in flight a thread, at most.

    Raises EngineError naming cause and fix when an explicit choice cannot be had.
    """
    if name not in CHOICES:
        raise EngineError(f"engine={name!r}: choose one of {', '.join(CHOICES)}")
    files = files_of(dataset)
    decision = decide(io, files.size, memory_limit(), "pread" if name == "pread" else "io_uring")
    if not raw or name == "python":
        _refuse_direct(io, "engine='python' has no such reads" if raw else "lf-format reads coded blocks")
        return _python(threads, "asked for by name") if raw else _records(name, threads, dataset)
    try:
        engine = _native(name, threads, pool, files, decision, io, depth)
    except ImportError as error:
        _refuse_direct(io, f"the C module is not built ({error})")
        return _not_built(name, threads, error)
    if name == "io_uring" and engine.info().name != "io_uring":
        reason = engine.info().reason
        engine.close()
        raise EngineError(f"engine='io_uring' cannot be had: {reason}; or use engine='auto'")
    return engine


def _refuse_direct(io: str, why: str) -> None:
    if io == "direct":
        raise EngineError(f"io='direct' cannot be had: {why}; use io='auto' or io='buffered'")


def _native(
    name: str, threads: int, pool: Array, files: Files, decision: Decision, io: str, depth: int
) -> Engine:
    from ._native_engine import NativeEngine, open_direct

    def make(decision: Decision) -> Engine:
        opened = files
        if decision.direct:
            opened, (path, why) = open_direct(files)
            if not opened.direct:
                if io == "direct":
                    raise refused(path, why)
                decision = Decision(False, f"{decision.reason}, but no direct reads of {path}: {why}")
        return NativeEngine(
            threads, pool, opened, decision.reason, depth, want_ring=name != "pread", by_name=name != "auto"
        )

    engine = make(decision)
    if io == "auto" and engine.info().io == "direct" and engine.info().name != "io_uring":
        engine.close()
        engine = make(decide(io, files.size, memory_limit(), engine.info().name))
    return engine


def _python(threads: int, reason: str) -> Engine:
    from ._python_engine import PythonEngine

    return PythonEngine(threads, reason)


def _records(name: str, threads: int, dataset: Any) -> Engine:
    from ._python_engine import RecordEngine

    if name in ("io_uring", "pread"):
        raise EngineError(
            f"engine={name!r} reads raw blocks, and this data set has coded ones: use engine='auto', or "
            "write the data set with the raw codec"
        )
    return RecordEngine(threads, "the data set has coded blocks", dataset)


def _not_built(name: str, threads: int, error: ImportError) -> Engine:
    if name != "auto":
        raise EngineError(
            f"engine={name!r} needs the C module, which this installation lacks ({error}): install a C "
            "compiler and reinstall lf-iouring, or use engine='auto'"
        ) from error
    return _python(threads, f"the C module is not built ({error})")


def errno_text(code: int) -> str:
    """ "EPERM Operation not permitted" for 1."""
    return f"{errno.errorcode.get(code, str(code))} {os.strerror(code)}"


def short_read(reads: Reads, batch: int, row: int, field: int, expected: int, found: int) -> DataError:
    """The error for a file that ends inside an extent."""
    return reads.error(batch, row, field, f"{expected} bytes", f"{found} bytes, then the end of the file")


def wrong_hash(reads: Reads, batch: int, row: int, expected: int, found: int) -> DataError:
    """The error for bytes that are not those that were written."""
    return reads.error(batch, row, 0, f"record hash 0x{expected:08x}", f"0x{found:08x}")
