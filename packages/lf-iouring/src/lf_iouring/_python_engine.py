"""The engine in Python threads: preadv for raw blocks, lf-format for coded ones."""

import contextlib
import functools
import itertools
import os
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from lf_format import FormatError

from ._cell import Cell
from ._errors import DataError, LoaderError
from ._layout import BITS, JOIN, NOWHERE, Slot
from ._reads import Reads
from ._threads import Threads
from .engine import Counters, EngineInfo, errno_text, short_read, wrong_extent, wrong_hash

Bytes = npt.NDArray[np.uint8]


class PythonEngine:
    """See Engine; works everywhere, also without the C module."""

    def __init__(self, threads: int, reason: str, dataset: Any) -> None:
        self._info = EngineInfo("python", reason, threads)
        self._dataset = dataset
        self._names = [field.name for field in dataset.fields]
        self._threads = Threads(threads, "lf-python")
        self._tickets = itertools.count()
        self._flying: dict[int, Cell[None]] = {}
        self._lock = threading.Lock()
        self._reads = self._bytes = 0
        self._busy_s = self._hash_s = 0.0

    def submit(self, reads: Reads, batch: int, slot: Slot) -> int:
        """See Engine."""
        ticket, cell = next(self._tickets), Cell[None]()
        self._threads.submit(functools.partial(cell.compute, self._gather, reads, batch, slot))
        self._flying[ticket] = cell
        return ticket

    def wait(self, ticket: int) -> None:
        """See Engine."""
        cell = self._flying[ticket]
        try:
            cell.wait()
        finally:
            if cell.done:  # else a signal ended the wait, and the slot is still being written
                self._flying.pop(ticket, None)

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
        with self._lock:
            return Counters(
                pread_reads=self._reads, bytes=self._bytes, read_s=self._busy_s, hash_s=self._hash_s
            )

    def close(self) -> None:
        """See Engine."""
        self._threads.close()
        self._flying.clear()

    def abandon(self) -> None:
        """See Engine."""
        self._flying.clear()

    def _gather(self, reads: Reads, batch: int, slot: Slot) -> None:
        began = time.perf_counter()
        memory = slot.view((int(reads.places.used[batch]),), np.uint8)
        for row in range(reads.rows):
            at = batch * reads.rows + row
            if reads.fd[at] < 0:
                _clear(reads, batch, row, memory)
            elif reads.block[at] < 0:
                self._raw_row(reads, batch, row, memory)
            else:
                self._coded_row(reads, batch, row, memory)
        with self._lock:
            self._busy_s += time.perf_counter() - began

    def _raw_row(self, reads: Reads, batch: int, row: int, memory: Bytes) -> None:
        at = batch * reads.rows + row
        parts = [_read(reads, batch, row, field) for field in range(reads.fields)]
        hash_s = _verify(reads, batch, row, parts) if reads.verify else 0.0
        for field, part in enumerate(parts):
            items = int(reads.items[field, at])
            if reads.kinds[field] & BITS:
                if part.size != -(-items // 8):
                    raise wrong_extent(reads, batch, row, field, -(-items // 8), part.size)
                part = np.unpackbits(part, count=items, bitorder="little")
            _put(reads, batch, row, field, part, memory)
        self._count(len(parts), sum(part.size for part in parts), hash_s)

    def _coded_row(self, reads: Reads, batch: int, row: int, memory: Bytes) -> None:
        """lf-format decodes and checks the record."""
        record = _checked_record(self._dataset, int(reads.records[batch, row]))
        for field, name in enumerate(self._names):
            value = np.ascontiguousarray(record[name]).reshape(-1).view(np.uint8)
            _put(reads, batch, row, field, value, memory)
        self._count(1, sum(record[name].nbytes for name in self._names), 0.0)

    def _count(self, extents: int, nbytes: int, hash_s: float) -> None:
        with self._lock:
            self._reads += extents
            self._bytes += nbytes
            self._hash_s += hash_s


def _checked_record(dataset: Any, number: int) -> Any:
    """A record, with lf-format's errors turned into DataError; other errors pass."""
    try:
        return dataset.record(number)
    except FormatError as error:
        path, offset = str(getattr(error, "path", "?")), int(getattr(error, "offset", None) or 0)
        expected = f"{getattr(error, 'what', '')}: {getattr(error, 'expected', '')}"
        raise DataError(path, number, offset, expected, str(getattr(error, "found", error))) from error


def _clear(reads: Reads, batch: int, row: int, memory: Bytes) -> None:
    """Zeros for every value of an empty row."""
    for field in range(reads.fields):
        _put(reads, batch, row, field, np.zeros(0, np.uint8), memory)


def _put(reads: Reads, batch: int, row: int, field: int, value: Bytes, memory: Bytes) -> None:
    """A delivered value to its place, with zeros up to its room."""
    place = reads.places.place[field, batch * reads.rows + row]
    if place == NOWHERE:
        return
    room = value.size if reads.kinds[field] & JOIN else int(reads.places.room[field, batch])
    target = memory[int(place) : int(place) + room]
    if value.size > room or target.size < room:
        raise wrong_extent(reads, batch, row, field, room, value.size)
    target[: value.size] = value
    target[value.size :] = 0


def _read(reads: Reads, batch: int, row: int, field: int) -> Bytes:
    """Stored bytes of one field."""
    at = batch * reads.rows + row
    size, room = int(reads.nbytes[field, at]), int(reads.places.room[field, batch])
    if size > room and reads.places.place[field, at] != NOWHERE and not reads.kinds[field] & JOIN:
        raise wrong_extent(reads, batch, row, field, room, size)
    part = np.empty(size, np.uint8)
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
    return part


def _verify(reads: Reads, batch: int, row: int, parts: list[Bytes]) -> float:
    """Check the hash chained over the fields; returns the seconds it took."""
    began, value = time.perf_counter(), 0
    for part in parts:
        value = xxhash.xxh3_64_intdigest(part.data, seed=value)
    expected = int(reads.hash[batch * reads.rows + row])
    if value & 0xFFFFFFFF != expected:
        raise wrong_hash(reads, batch, row, expected, value & 0xFFFFFFFF)
    return time.perf_counter() - began
