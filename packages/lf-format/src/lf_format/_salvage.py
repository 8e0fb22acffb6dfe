"""salvage: what is left of a damaged or truncated file, in a new one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format import _layout as lay
from lf_format._blocks import StoredBlock
from lf_format._codecs import RAW, ZSTD, Coding, decode
from lf_format._container import Container, Identity, WriteReport
from lf_format._dictionary import Dictionaries
from lf_format._errors import FormatError, Place
from lf_format._index import Index, cumulative, parse_index
from lf_format._open import read_exact
from lf_format._records import record_hash
from lf_format._schema import Schema, TokenizerInfo, parse_schema

_CHUNK = 1 << 20
_BLOCK, _INDEX = b"LFBK", b"LFIX"
PathLike = str | os.PathLike[str]
Array = npt.NDArray[Any]
Rows = tuple[Array, Array, Array]


@dataclass(frozen=True)
class SalvageReport:
    """What was found, kept and lost.

    Attributes:
        output: report of the new file.
        blocks: block headers found; whole_blocks of them had their payload hash and were kept as they are.
        records: records kept; recut_records of them in blocks whose record boundaries are lost.
        lost: (byte offset, what is lost there and why), in file order.
        notes: what could not be confirmed.
    """

    output: WriteReport
    blocks: int
    whole_blocks: int
    records: int
    recut_records: int
    lost: tuple[tuple[int, str], ...]
    notes: tuple[str, ...]


def salvage(
    source: PathLike, output: PathLike, *, like: PathLike | None = None, recut: bool = False
) -> SalvageReport:
    """Writes every record of `source` that can still be proven intact by a hash to `output`.

    Blocks are found by their headers, wherever they lie. Record boundaries are in the index; where it is lost, a
    block is kept only when its size leaves one possibility: in a file without loss mask, one record, or all at the
    shortest or longest length of the bucket.

    Args:
        like: a whole file of the same data set, when header or schema of `source` are damaged.
        recut: also keep intact blocks without boundaries, cut into the right number of near-equal records with
            neither document flag set. Only for files without a loss mask.

    Raises:
        FormatError: header or schema are damaged and `like` is None; nothing intact was found. OSError.
    """
    size = os.stat(source).st_size
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header, schema = _metadata(os.fspath(source) if like is None else os.fspath(like))
        tokenizer = TokenizerInfo(header.tokenizer_name, header.tokenizer_hash)
        with Container(Path(output), Identity(schema, header.vocab_size, tokenizer)) as out:
            rescue = _Rescue(fd, os.fspath(source), size, header, schema, recut)
            for block in rescue.blocks():
                out.append_block(block)
            if rescue.records == 0:
                raise FormatError("nothing intact was found", path=source, expected=">= 1 record", found=0)
            out.finish()
            return rescue.report(out.publish())
    finally:
        os.close(fd)


def _metadata(path: str) -> tuple[lay.Header, Schema]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        header = lay.parse_header(read_exact(fd, min(size, lay.HEADER_SIZE), 0, path), path)
        if header.profile != lay.PROFILE_LOONGBIN:
            raise FormatError(
                "salvage reads .loongbin files only", path=path, found=f"profile {header.profile}"
            )
        raw = read_exact(fd, header.schema_len, header.schema_offset, path)
        if lay.xxh3(raw) != header.schema_hash:
            raise FormatError("schema hash", path=path, offset=header.schema_offset)
        return header, parse_schema(raw, header.vocab_size, path, header.schema_offset)
    finally:
        os.close(fd)


@dataclass
class _Rescue:
    """One pass for indexes, one for blocks."""

    fd: int
    path: str
    size: int
    header: lay.Header
    schema: Schema
    recut: bool
    codings: dict[int, Coding] = field(default_factory=dict)
    found: int = 0
    whole: int = 0
    records: int = 0
    recut_records: int = 0
    lost: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def report(self, output: WriteReport) -> SalvageReport:
        counts = self.found, self.whole, self.records, self.recut_records
        return SalvageReport(output, *counts, tuple(self.lost), tuple(self.notes))

    def blocks(self) -> Iterator[StoredBlock]:
        """What can be kept, in file order."""
        rows = self._known_rows()
        missing = set(rows)
        at = self.header.data_offset
        while (at := self._find(_BLOCK, at, lay.BLOCK_ALIGN)) < self.size:
            try:
                raw = read_exact(self.fd, min(lay.BLOCK_HEADER_SIZE, self.size - at), at, self.path)
                head = lay.parse_block_header(raw, self.path, at)
            except FormatError:
                at += lay.BLOCK_ALIGN  # four bytes of data that look like a header, or a damaged one
                continue
            self.found += 1
            missing.discard(at)
            end = at + lay.BLOCK_HEADER_SIZE + head.stored_len
            block = self._block(at, head, rows.get(at)) if self._sound(head) else None
            if block is not None:
                self.records += len(block.lengths)
                yield block
            # Behind a payload that is not whole the next header may come anywhere.
            at = end if block is not None and end <= self.size else at + lay.BLOCK_ALIGN
        for offset in missing:
            self.lost.append((offset, f"{len(rows[offset][0])} records: block header"))
        self.lost.sort()

    def _sound(self, head: lay.BlockHeader) -> bool:
        return (
            head.bucket < len(self.schema.buckets)
            and head.n_records >= 1
            and head.stored_len <= head.raw_len <= lay.MAX_BLOCK_BYTES
        )

    def _find(self, magic: bytes, start: int, step: int) -> int:
        """Next multiple of `step` at or behind `start` where `magic` stands; the file size when there is none."""
        at = lay.align(start, step)
        while at < self.size:
            try:
                at = max(at, os.lseek(self.fd, at, os.SEEK_DATA) // step * step)  # skips holes
            except OSError:
                return self.size
            chunk = read_exact(self.fd, min(_CHUNK, self.size - at), at, self.path)
            hit = chunk.find(magic)
            while hit >= 0:
                if hit % step == 0:
                    return at + hit
                hit = chunk.find(magic, hit + 1)
            at += _CHUNK
        return self.size

    def _known_rows(self) -> dict[int, Rows]:
        """Lengths, hashes and flags of the blocks at each offset, from every index that still parses."""
        trusted = self._trailers()
        rows: dict[int, Rows] = {}
        at = self.header.data_offset
        while (at := self._find(_INDEX, at, lay.SECTION_ALIGN)) < self.size:
            index, sure = self._index(at, trusted)
            if index is not None:
                if not sure:
                    self.notes.append(f"index at byte {at} has no trailer that confirms its document flags")
                rows |= _rows(index)
                self._learn(index, Place(self.path, at))
            at += lay.SECTION_ALIGN
        return rows

    def _learn(self, index: Index, place: Place) -> None:
        """Remembers how the blocks of an index decode."""
        try:
            known = Dictionaries(index.extra, index.block_codec, self.header, place)
        except FormatError as error:
            self.notes.append(f"dictionaries of the index at byte {place.offset} are damaged: {error.what}")
            return
        first = index.first_records()
        for block, offset in enumerate(index.block_offset.tolist()):
            tokens = int(index.lengths[first[block] : first[block + 1]].sum(dtype=np.int64))
            self.codings[offset] = known.coding(block, tokens, self.schema.numpy_dtype)

    def _coding(self, at: int, head: lay.BlockHeader) -> Coding | None:
        coding = self.codings.get(at)
        if coding is None and (head.dict_id or head.codec > ZSTD):
            raise FormatError("what decodes it was in the lost index")
        return coding

    def _trailers(self) -> dict[int, lay.Trailer]:
        """Intact trailers by the offset of their index."""
        trailers: dict[int, lay.Trailer] = {}
        at = self.header.data_offset
        while (at := self._find(lay.TRAILER_MAGIC, at, lay.BLOCK_ALIGN)) < self.size:
            try:
                raw = read_exact(self.fd, min(lay.TRAILER_SIZE, self.size - at), at, self.path)
                trailer = lay.parse_trailer(raw, self.path, at)
                trailers[trailer.index_offset] = trailer
            except FormatError:
                pass
            at += lay.BLOCK_ALIGN
        return trailers

    def _index(self, at: int, trusted: dict[int, lay.Trailer]) -> tuple[Index | None, bool]:
        trailer = trusted.get(at)
        length = self.size - at if trailer is None else trailer.index_len
        try:
            raw = read_exact(self.fd, length, at, self.path)
            index = parse_index(raw, self.path, at)
        except (FormatError, MemoryError):
            self.notes.append(f"index at byte {at} is damaged")
            return None, False
        sure = trailer is not None and lay.xxh3(raw) == trailer.index_hash
        return (index if int(index.block_count.sum()) == len(index.lengths) else None), sure

    def _block(self, at: int, head: lay.BlockHeader, rows: Rows | None) -> StoredBlock | None:
        start = at + lay.BLOCK_HEADER_SIZE
        stored = read_exact(self.fd, min(head.stored_len, max(self.size - start, 0)), start, self.path)
        whole = len(stored) == head.stored_len and lay.xxh3(stored) == head.payload_hash
        if rows is not None and len(rows[0]) != head.n_records:
            rows = None
        try:
            if not whole and (head.codec != RAW or rows is None):
                raise FormatError("payload is damaged")
            payload = stored
            if whole and head.codec != RAW:
                coding = self._coding(at, head)
                payload = decode(stored, head.codec, head.raw_len, self.path, start, coding)
            if rows is not None:
                return self._with_rows(at, head, stored, payload, rows, whole)
            return self._without_rows(at, head, stored, payload)
        except FormatError as error:
            self.lost.append((at, f"{head.n_records} records: {error.what}"))
            return None

    def _with_rows(
        self, at: int, head: lay.BlockHeader, stored: bytes, payload: bytes, rows: Rows, whole: bool
    ) -> StoredBlock | None:
        """All records of a whole block; of a damaged one those whose hash still holds."""
        parts = self._parts(payload, rows[0])
        good = [k for k, p in enumerate(parts) if record_hash(p) == rows[1][k] and len(p[0])]
        good = [k for k in good if rows[2][k] <= 3]
        for k in sorted(set(range(len(parts))) - set(good)):
            self.lost.append((at, f"record {head.first_record + k}: record hash"))
        if not good:
            return None
        if whole and len(good) == len(parts):
            self.whole += 1
            return self._stored(head, stored, payload, rows)
        kept = (rows[0][good], rows[1][good], rows[2][good])
        return self._raw(head, [parts[k] for k in good], kept)

    def _without_rows(self, at: int, head: lay.BlockHeader, stored: bytes, payload: bytes) -> StoredBlock:
        lengths = self._only_lengths(head)
        flags = np.full(head.n_records, 0, np.uint8)
        if lengths is None:
            lengths = self._recut_lengths(head)
            self.recut_records += head.n_records
        parts = self._parts(payload, lengths)
        hashes = np.array([record_hash(p) for p in parts], np.uint32)
        self.whole += 1
        self.notes.append(f"block at byte {at}: document flags are lost")
        return self._stored(head, stored, payload, (lengths, hashes, flags))

    def _only_lengths(self, head: lay.BlockHeader) -> Array | None:
        """Lengths when the size of the payload leaves one choice."""
        if (
            len(self.schema.fields) > 1
        ):  # a second plane starts at a multiple of 64, which hides the exact size
            return None
        edges = (0, *self.schema.buckets)
        low, high = edges[head.bucket] + 1, edges[head.bucket + 1]
        candidates = [low, high]
        if head.n_records == 1:
            candidates.append(head.raw_len // self.schema.numpy_dtype.itemsize)
        for length in candidates:
            lengths = np.full(head.n_records, length, np.uint32)
            if low <= length <= high and self._raw_len(lengths) == head.raw_len:
                return lengths
        return None

    def _recut_lengths(self, head: lay.BlockHeader) -> Array:
        if not self.recut or len(self.schema.fields) > 1:
            raise FormatError("intact, but the record boundaries were in the lost index")
        tokens, rest = divmod(head.raw_len, self.schema.numpy_dtype.itemsize)
        base, longer = divmod(tokens, head.n_records)
        lengths = np.full(head.n_records, base, np.uint32)
        lengths[:longer] += 1
        edges = (0, *self.schema.buckets)
        if rest or not edges[head.bucket] < base <= int(lengths[0]) <= edges[head.bucket + 1]:
            raise FormatError("payload size does not fit the bucket")
        return lengths

    def _raw_len(self, lengths: Array) -> int:
        end = 0
        for f in self.schema.fields:
            end = lay.align(end, lay.BLOCK_ALIGN) + int(f.nbytes(lengths).sum())
        return end

    def _parts(self, payload: bytes, lengths: Array) -> list[tuple[bytes, ...]]:
        """Field bytes of each record; shorter where the payload ends early."""
        planes, end = [], 0
        for f in self.schema.fields:
            ends = lay.align(end, lay.BLOCK_ALIGN) + cumulative(f.nbytes(lengths))
            planes.append([payload[a:b] for a, b in itertools.pairwise(ends.tolist())])
            end = int(ends[-1])
        return list(zip(*planes, strict=True))

    def _stored(self, head: lay.BlockHeader, stored: bytes, payload: bytes, rows: Rows) -> StoredBlock:
        if head.dict_id or head.codec > ZSTD:  # the new file has no dictionaries
            size = len(payload)
            head, stored = head._replace(codec=RAW, raw_len=size, stored_len=size, dict_id=0), payload
        if self._raw_len(rows[0]) != head.raw_len:
            raise FormatError("payload size does not fit the lengths")
        ids = np.frombuffer(payload, self.schema.numpy_dtype, int(rows[0].sum()))
        return self._checked(
            StoredBlock(head.bucket, head.codec, head.raw_len, stored, *rows, int(ids.max()))
        )

    def _raw(self, head: lay.BlockHeader, parts: list[tuple[bytes, ...]], rows: Rows) -> StoredBlock:
        payload = bytearray()
        for plane in zip(*parts, strict=True):
            payload.extend(bytes(lay.align(len(payload), lay.BLOCK_ALIGN) - len(payload)))
            payload.extend(b"".join(plane))
        size = len(payload)
        fresh = head._replace(codec=RAW, raw_len=size, stored_len=size, dict_id=0)
        return self._stored(fresh, bytes(payload), bytes(payload), rows)

    def _checked(self, block: StoredBlock) -> StoredBlock:
        edges = (0, *self.schema.buckets)
        low, high = edges[block.bucket] + 1, edges[block.bucket + 1]
        if block.max_id >= self.header.vocab_size or block.lengths.min() < low or block.lengths.max() > high:
            raise FormatError("ids or lengths out of range")
        return block


def _rows(index: Index) -> dict[int, Rows]:
    first = index.first_records()
    return {
        int(offset): (index.lengths[a:b], index.hashes[a:b], index.flags[a:b])
        for offset, a, b in zip(index.block_offset.tolist(), first[:-1], first[1:], strict=True)
    }
