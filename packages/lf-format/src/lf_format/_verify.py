"""Whole-file check: every byte of a file is accounted for and every hash recomputed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lf_format import _layout as lay
from lf_format._codecs import RAW
from lf_format._errors import FormatError
from lf_format._index import cumulative
from lf_format._open import read_exact
from lf_format._reader import Reader
from lf_format._records import record_hash

_CHUNK = 1 << 20
Problem = tuple[int, str]


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify`.

    Attributes:
        path: file checked.
        ok: no problem found.
        deep: whether content was read, or only metadata.
        problems: (byte offset, what is wrong), in file order.
        records, tokens, blocks: totals; 0 when the file does not open.
        bytes_read: bytes of blocks and padding that were hashed or compared.
    """

    path: str
    ok: bool
    deep: bool
    problems: list[Problem]
    records: int = 0
    tokens: int = 0
    blocks: int = 0
    bytes_read: int = 0


def verify(path: str | os.PathLike[str], deep: bool = True) -> VerifyReport:
    """Checks one file; reports instead of raising for anything wrong with its content.

    Args:
        path: a .loongbin file.
        deep: also hash every block and record, check ids against the vocabulary and padding for zeros.

    Raises:
        OSError: when the file cannot be read.
    """
    name = os.fspath(path)
    try:
        reader = Reader(name)
    except FormatError as error:
        return VerifyReport(name, False, deep, [(error.offset or 0, str(error))])
    with reader:
        scan = _Scan(reader)
        problems = sorted(scan.run(deep))
        trailer = reader.opened.trailer
        counts = (trailer.n_records, trailer.n_tokens, trailer.n_blocks)
        return VerifyReport(name, not problems, deep, problems, *counts, scan.bytes_read)


class _Scan:
    """Walks a file that opens; yields problems."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.index, self.fd = reader, reader.opened.index, reader.fileno()
        self.first = self.index.first_records()
        self.bytes_read = 0

    def run(self, deep: bool) -> Iterator[Problem]:
        for block in range(len(self.index.block_count)):
            yield from self._block_header(block)
            if deep:
                yield from self._block(block)
        covered, problems = self._covered()
        yield from problems
        if deep:
            yield from self._gaps(covered)

    def _block_header(self, block: int) -> Iterator[Problem]:
        index, at = self.index, int(self.index.block_offset[block])
        expected = lay.BlockHeader(
            bucket=int(index.block_bucket[block]),
            codec=int(index.block_codec[block]),
            dict_id=int(self.reader.opened.dictionaries.of_block[block]),
            n_records=int(index.block_count[block]),
            first_record=int(self.first[block]),
            raw_len=int(index.block_raw[block]),
            stored_len=int(index.block_stored[block]),
            payload_hash=int(index.block_hash[block]),
        )
        try:
            raw = read_exact(self.fd, lay.BLOCK_HEADER_SIZE, at, self.reader.path)
            found = lay.parse_block_header(raw, self.reader.path, at)
        except FormatError as error:
            yield at, f"block {block}: {error}"
            return
        if found != expected:
            yield at, f"block {block}: header disagrees with the index (expected {expected}, found {found})"

    def _block(self, block: int) -> Iterator[Problem]:
        at = int(self.index.block_offset[block]) + lay.BLOCK_HEADER_SIZE
        rows = range(int(self.first[block]), int(self.first[block + 1]))
        self.bytes_read += int(self.index.block_stored[block])
        try:
            payload = self.reader.block_payload(block)
        except FormatError as error:
            yield error.offset or at, f"block {block}: {error}"
            if self.index.block_codec[block] == RAW:
                yield from self._damaged_records(rows, at)
            return
        for start, what in self._content(block, rows, payload):
            yield at + start, f"{self.reader.path}: block {block}: {what}"

    def _damaged_records(self, rows: range, at: int) -> Iterator[Problem]:
        """A raw block with a wrong hash: which of its records are hit."""
        for i in rows:
            try:
                self.reader.record(i)
            except FormatError as error:
                yield error.offset or at, str(error)

    def _content(self, block: int, rows: range, payload: bytes) -> Iterator[Problem]:
        """Problems of a decoded payload whose hash is right; offsets count from its start."""
        schema = self.reader.opened.schema
        counts = [c[rows.start : rows.stop] for c in self.index.counts_of(schema)]
        planes, view, end, largest = [], memoryview(payload), 0, 0
        for field, steps in zip(schema.fields, counts, strict=True):
            start = lay.align(end, lay.BLOCK_ALIGN)
            if any(payload[end:start]):
                yield end, f"padding before plane {field.name} is not zero"
            ends = start + cumulative(field.nbytes(steps))
            planes.append([view[a:b] for a, b in itertools.pairwise(ends.tolist())])
            end = int(ends[-1])
        for i, *parts in zip(rows, *planes, strict=True):
            if record_hash(parts) != self.index.hashes[i]:
                yield 0, f"record {i}: record hash"
        for field, steps, plane in zip(schema.fields, counts, planes, strict=True):
            if field.kind == "bits" and not all(map(field.spare_bits_zero, plane, steps.tolist())):
                yield 0, f"spare bits of a {field.name.replace('_', ' ')} are not zero"
            if field.kind == "tokens":  # unsigned, so that a negative id is a large one
                ids = np.frombuffer(b"".join(plane), np.dtype(f"<u{field.numpy_dtype.itemsize}"))
                largest = max(largest, int(ids.max(initial=0)))
        if largest != int(self.index.block_max_id[block]):
            yield 0, f"largest id (expected {self.index.block_max_id[block]}, found {largest})"

    def _covered(self) -> tuple[list[tuple[int, int]], list[Problem]]:
        """Ranges that hashes account for: header, schema, blocks, every index and trailer of the append chain."""
        header, trailer, path = self.reader.opened.header, self.reader.opened.trailer, self.reader.path
        ranges = [(0, lay.HEADER_SIZE), (header.schema_offset, header.schema_offset + header.schema_len)]
        starts = self.index.block_offset.astype(np.int64)
        ends = starts + lay.BLOCK_HEADER_SIZE + self.index.block_stored.astype(np.int64)
        ranges += list(zip(starts.tolist(), ends.tolist(), strict=True))
        problems: list[Problem] = []
        while True:
            at = trailer.trailer_offset
            end = trailer.index_offset + trailer.index_len
            ranges += [(trailer.index_offset, end), (at, at + lay.TRAILER_SIZE)]
            if trailer.prev_trailer == 0:
                return ranges, problems
            try:  # each step goes strictly back (parse_trailer checks it), so the chain ends
                at = trailer.prev_trailer
                trailer = lay.parse_trailer(read_exact(self.fd, lay.TRAILER_SIZE, at, path), path, at)
                found = lay.xxh3(read_exact(self.fd, trailer.index_len, trailer.index_offset, path))
            except FormatError as error:
                return ranges, [*problems, (at, f"earlier trailer: {error}")]
            if found != trailer.index_hash:
                problems.append((trailer.index_offset, f"{path}: earlier index hash"))

    def _gaps(self, covered: list[tuple[int, int]]) -> Iterator[Problem]:
        """Bytes that nothing accounts for must be zero."""
        at = 0
        for start, end in sorted(covered):
            if start < at:
                yield start, f"{self.reader.path}: sections overlap at byte {start}"
            yield from self._zeros(at, start)
            at = max(at, end)

    def _zeros(self, start: int, end: int) -> Iterator[Problem]:
        at = start
        while at < end:
            try:
                at = os.lseek(self.fd, at, os.SEEK_DATA)  # holes of a sparse file are zero without reading
            except OSError:
                return
            if at >= end:
                return
            chunk = read_exact(self.fd, min(_CHUNK, end - at), at, self.reader.path)
            self.bytes_read += len(chunk)
            if chunk.count(0) != len(chunk):
                bad = at + len(chunk) - len(chunk.lstrip(b"\0"))
                yield bad, f"{self.reader.path}: padding at byte {bad} is not zero"
                return
            at += len(chunk)
