"""Engines in Python threads: plain preadv, and record by record through lf-format."""

import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from lf_format import FormatError

from ._errors import DataError, EngineError
from ._reads import Reads
from .engine import Counters, EngineInfo, Target, errno_text, short_read, wrong_hash

Bytes = npt.NDArray[np.uint8]


class _ThreadedEngine:
    """Tickets, threads and counters; subclasses fill one row."""

    def __init__(self, name: str, threads: int, reason: str) -> None:
        self._info = EngineInfo(name, reason, threads)
        self._threads = ThreadPoolExecutor(threads, f"lf-{name}")
        self._tickets = itertools.count()
        self._flying: dict[int, Future[None]] = {}
        self._lock = threading.Lock()
        self._reads = self._bytes = 0
        self._busy_s = self._hash_s = 0.0

    def submit(self, reads: Reads, batch: int, target: Target) -> int:
        """See Engine."""
        ticket = next(self._tickets)
        try:
            self._flying[ticket] = self._threads.submit(self._gather, reads, batch, target)
        except RuntimeError as error:
            raise EngineError("the engine is closed") from error
        return ticket

    def wait(self, ticket: int) -> None:
        """See Engine."""
        self._flying.pop(ticket).result()

    def info(self) -> EngineInfo:
        """See Engine."""
        return self._info

    def counters(self) -> Counters:
        """See Engine."""
        with self._lock:
            return Counters(
                pread_reads=self._reads, bytes=self._bytes, read_s=self._busy_s, hash_s=self._hash_s
            )

    def close(self) -> None:
        """See Engine."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._flying.clear()

    def abandon(self) -> None:
        """See Engine."""
        self._flying.clear()

    def _gather(self, reads: Reads, batch: int, target: Target) -> None:
        began = time.perf_counter()
        for row in range(reads.rows):
            if reads.ids[batch, row] < 0:
                _clear(target, row, 0)
            else:
                self._row(reads, batch, row, target)
        with self._lock:
            self._busy_s += time.perf_counter() - began

    def _row(self, reads: Reads, batch: int, row: int, target: Target) -> None:
        raise NotImplementedError

    def _count(self, extents: int, nbytes: int, hash_s: float) -> None:
        with self._lock:
            self._reads += extents
            self._bytes += nbytes
            self._hash_s += hash_s


class PythonEngine(_ThreadedEngine):
    """Blocking preadv calls in Python threads; works everywhere, also without the C module."""

    def __init__(self, threads: int, reason: str) -> None:
        super().__init__("python", threads, reason)

    def _row(self, reads: Reads, batch: int, row: int, target: Target) -> None:
        at = batch * reads.rows + row
        length = int(reads.items[at])
        tokens = target.tokens[row].view(np.uint8)
        parts = [tokens[: int(reads.nbytes[0, at])]]
        if reads.fields > 1:
            parts.append(np.empty(int(reads.nbytes[1, at]), np.uint8))
        for field, part in enumerate(parts):
            _check_extent(reads, batch, row, field, target, part.size)
            _read(reads, batch, row, field, part)
        hash_s = _verify(reads, batch, row, parts) if reads.verify else 0.0
        _clear(target, row, length)
        if target.mask is not None:
            target.mask[row, :length] = np.unpackbits(parts[1], count=length, bitorder="little")
        self._count(len(parts), sum(part.size for part in parts), hash_s)


class RecordEngine(_ThreadedEngine):
    """For coded blocks: lf-format decodes and checks one record at a time."""

    def __init__(self, threads: int, reason: str, dataset: Any) -> None:
        super().__init__("records", threads, reason)
        self._record: Callable[[int], Any] = dataset.record

    def _row(self, reads: Reads, batch: int, row: int, target: Target) -> None:
        number = int(reads.ids[batch, row])
        record = _checked_record(self._record, number)
        length = len(record.tokens)
        target.tokens[row, :length] = record.tokens
        if target.mask is not None:
            target.mask[row, :length] = record.loss_mask
        _clear(target, row, length)
        self._count(1, record.tokens.nbytes, 0.0)


def _checked_record(record: Callable[[int], Any], number: int) -> Any:
    """A record, with lf-format's errors turned into DataError; other errors pass."""
    try:
        return record(number)
    except FormatError as error:
        path, offset = str(getattr(error, "path", "?")), int(getattr(error, "offset", None) or 0)
        expected, found = str(getattr(error, "expected", "")), str(getattr(error, "found", error))
        raise DataError(path, number, offset, expected, found) from error


def _clear(target: Target, row: int, length: int) -> None:
    """Zero everything after the first `length` tokens of a row."""
    target.tokens[row, length:] = 0
    if target.mask is not None:
        target.mask[row, length:] = 0


def _check_extent(reads: Reads, batch: int, row: int, field: int, target: Target, nbytes: int) -> None:
    at = batch * reads.rows + row
    length = int(reads.items[at])
    want = length * target.tokens.itemsize if field == 0 else -(-length // 8)
    if int(reads.nbytes[field, at]) != want or nbytes != want or length > target.tokens.shape[1]:
        found = f"{int(reads.nbytes[field, at])} bytes"
        raise reads.error(batch, row, field, f"{want} bytes for {length} tokens", found)


def _read(reads: Reads, batch: int, row: int, field: int, part: Bytes) -> None:
    at = batch * reads.rows + row
    fd, offset, done = int(reads.fd[at]), int(reads.offset[field, at]), 0
    while done < part.size:
        try:
            got = os.preadv(fd, [part[done:]], offset + done)  # type: ignore[list-item]
        except OSError as error:
            text = errno_text(error.errno or 0)
            raise reads.error(batch, row, field, f"{part.size} bytes", text) from error
        if got == 0:
            raise short_read(reads, batch, row, field, part.size, done)
        done += got


def _verify(reads: Reads, batch: int, row: int, parts: list[Bytes]) -> float:
    """Check the hash chained over the fields; returns the seconds it took."""
    began, value = time.perf_counter(), 0
    for part in parts:
        value = xxhash.xxh3_64_intdigest(part.data, seed=value)
    expected = int(reads.hash[batch * reads.rows + row])
    if value & 0xFFFFFFFF != expected:
        raise wrong_hash(reads, batch, row, expected, value & 0xFFFFFFFF)
    return time.perf_counter() - began
