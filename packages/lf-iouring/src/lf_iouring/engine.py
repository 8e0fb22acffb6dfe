"""The engine protocol: rows of a batch from disk into a slot, checked; and the choice among the engines."""

import errno
import os
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ._direct import Decision, Files, decide, files_of, memory_limit, refused
from ._errors import DataError, EngineError
from ._layout import Slot
from ._reads import Reads

Array = npt.NDArray[Any]
CHOICES = ("auto", "io_uring", "pread", "python")
ZSTD_CODECS = (1, 3)  # of blocks, as in SPEC.md of lf-format
POLLING = ("off", "sqpoll", "iopoll")
MAX_FLYING = 60  # batches one engine holds at a time; the C queue has 64 places


class Target(NamedTuple):
    """Views of one batch of token rows.

    tokens: [rows, edge] in the stored dtype, each row contiguous.
    mask: uint8[rows, edge] for the unpacked loss mask, or None.
    """

    tokens: Array
    mask: npt.NDArray[np.uint8] | None


@dataclass(frozen=True)
class EngineInfo:
    """Which engine works and why.

    Attributes:
        name: "io_uring", "pread" or "python".
        reason: why this one, in words; for a fallback, what was refused and by which errno.
        threads: threads that read.
        ring_entries: reads in flight a thread at most, 0 without rings.
        setup_flags: io_uring set-up flags in use, by name.
        registered: the pool is registered with every ring (READ_FIXED).
        registered_files: so are the files.
        io: "mapped", "buffered" or "direct".
        io_reason: why.
        polling: "off", "sqpoll" or "iopoll".
        polling_reason: why not, where it was asked for.
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
    polling: str = "off"
    polling_reason: str = ""


@dataclass(frozen=True)
class Counters:
    """What an engine has done since its start.

    Attributes:
        mapped_reads: extents copied from a mapping of the file.
        cached_reads: extents served from the page cache without blocking.
        direct_reads: extents read past the page cache, by ring or pread.
        ring_reads: extents that went through io_uring.
        pread_reads: extents read by a blocking pread.
        bytes: payload bytes asked for.
        read_s: seconds its threads were busy, hashing included.
        hash_s: seconds of it spent in record hashes; the C engines time one row a batch and scale.
        decoded_blocks: coded blocks decoded; rows that find theirs decoded do not count.
        decode_s: seconds spent hashing and decoding them.
    """

    mapped_reads: int = 0
    cached_reads: int = 0
    direct_reads: int = 0
    ring_reads: int = 0
    pread_reads: int = 0
    bytes: int = 0
    read_s: float = 0.0
    hash_s: float = 0.0
    decoded_blocks: int = 0
    decode_s: float = 0.0


class Engine(Protocol):
    """Reads batches in its own threads. One thread at a time may call it."""

    def submit(self, reads: Reads, batch: int, slot: Slot) -> int:
        """Start reading batch `batch` of `reads` into host memory; at most MAX_FLYING at a time. Returns a ticket.

        Values are padded with zeros; those of empty rows are all zero.
        """

    def wait(self, ticket: int) -> None:
        """Block until a batch is complete and forget it. DataError if a record is not as written."""

    def settle(self) -> None:
        """Let everything in flight land and forget it, faults too; also what an interrupted `submit` has begun."""

    def info(self) -> EngineInfo:
        """What this engine is."""

    def counters(self) -> Counters:
        """What it has done."""

    def close(self) -> None:
        """Finish what is being read, stop the threads. Harmless when repeated."""

    def abandon(self) -> None:
        """In a forked child: drop the parent's engine without waiting for threads that are not there."""


def choose(
    name: str, threads: int, pool: Array, dataset: Any, *, io: str, depth: int, cache_bytes: int, polling: str
) -> Engine:
    """The engine asked for.

    Args:
        name: one of CHOICES.
        threads: number of reading threads, >= 1.
        pool: uint8 memory that slots lie in, for registration.
        io: one of IO_CHOICES; "auto" is decided by the size of the data set, see `decide`.
        depth: reads in flight a thread, at most.
        cache_bytes: of decoded blocks kept.
        polling: one of POLLING; a wish, see EngineInfo.

    Raises EngineError naming cause and fix when an explicit choice cannot be had.
    """
    if name not in CHOICES:
        raise EngineError(f"engine={name!r}: choose one of {', '.join(CHOICES)}")
    if polling not in POLLING:
        raise EngineError(f"polling={polling!r}: choose one of {', '.join(POLLING)}")
    files = files_of(dataset)
    decision = decide(io, files.size, memory_limit(), "pread" if name == "pread" else "io_uring")
    if name == "python":
        _refuse_io(io, "engine='python' has no such reads")
        return _python(threads, "asked for by name", dataset)
    missing = _missing(dataset)
    if missing:
        _refuse_io(io, missing)
        if name != "auto":
            raise EngineError(f"engine={name!r} cannot be had: {missing}; or use engine='auto'")
        return _python(threads, missing, dataset)
    engine = _native(name, threads, pool, dataset, files, decision, io, depth, cache_bytes, polling)
    if name == "io_uring" and engine.info().name != "io_uring":
        reason = engine.info().reason
        engine.close()
        raise EngineError(f"engine='io_uring' cannot be had: {reason}; or use engine='auto'")
    return engine


def _refuse_io(io: str, why: str) -> None:
    """EngineError where what was asked for by name needs the engines in C."""
    if io in ("direct", "mapped"):
        raise EngineError(f"io={io!r} cannot be had: {why}; use io='auto' or io='buffered'")


def _missing(dataset: Any) -> str:
    """What this machine lacks for the engines in C to read a data set; "" for nothing."""
    try:
        from ._native_engine import zstd_version
    except ImportError as error:
        return f"the C module is not built ({error}): install a C compiler and reinstall lf-iouring"
    compressed = any(bool(np.isin(r.opened.index.block_codec, ZSTD_CODECS).any()) for r in dataset.readers)
    if compressed and not zstd_version():
        return "the data set has zstd blocks and there is no libzstd.so.1: install libzstd (Debian: libzstd1)"
    return ""


def _native(
    name: str, threads: int, pool: Array, dataset: Any, files: Files, decision: Decision, io: str, depth: int,
    cache_bytes: int, polling: str,
) -> Engine:  # fmt: skip
    from ._native_engine import NativeEngine, open_direct

    def make(decision: Decision) -> Engine:
        opened = files
        if decision.io == "direct":
            opened, (path, why) = open_direct(files)
            if not opened.direct:
                if io == "direct":
                    raise refused(path, why)
                decision = Decision("buffered", f"{decision.reason}, but no direct reads of {path}: {why}")
        return NativeEngine(
            threads, pool, dataset, opened, decision, depth, cache_bytes,
            want_ring=name != "pread", by_name=name != "auto", polling=polling,
        )  # fmt: skip

    engine = make(decision)
    if io == "mapped" and engine.info().io != "mapped":
        reason = engine.info().io_reason
        engine.close()
        raise EngineError(f"io='mapped' cannot be had: {reason}; use io='auto' or io='buffered'")
    if io == "auto" and engine.info().io == "direct" and engine.info().name != "io_uring":
        engine.close()
        engine = make(decide(io, files.size, memory_limit(), engine.info().name))
    return engine


def _python(threads: int, reason: str, dataset: Any) -> Engine:
    from ._python_engine import PythonEngine

    return PythonEngine(threads, reason, dataset)


def errno_text(code: int) -> str:
    """ "EPERM Operation not permitted" for 1."""
    return f"{errno.errorcode.get(code, str(code))} {os.strerror(code)}"


def short_read(reads: Reads, batch: int, row: int, field: int, expected: int, found: int) -> DataError:
    """The error for a file that ends inside an extent."""
    return reads.error(batch, row, field, f"{expected} bytes", f"{found} bytes, then the end of the file")


def wrong_hash(reads: Reads, batch: int, row: int, expected: int, found: int) -> DataError:
    """The error for bytes that are not those that were written."""
    return reads.error(batch, row, 0, f"record hash 0x{expected:08x}", f"0x{found:08x}")


def wrong_extent(reads: Reads, batch: int, row: int, field: int, most: int, found: int) -> DataError:
    """The error for an index that does not agree with the shape of a field."""
    expected = f"a field of at most {most} bytes that agrees with the record's length"
    return reads.error(batch, row, field, expected, f"{found} bytes")
