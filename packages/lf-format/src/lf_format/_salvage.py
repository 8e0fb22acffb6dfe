"""salvage: what is left of a damaged or truncated file, in a new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lf_format import _layout as lay
from lf_format._atomic import refuse_same
from lf_format._blocks import StoredBlock
from lf_format._codecs import RAW, ZSTD, decode
from lf_format._container import Container, Identity, WriteReport
from lf_format._errors import FormatError
from lf_format._open import read_exact
from lf_format._records import record_hash
from lf_format._salvage_cut import Cutter
from lf_format._salvage_scan import Rows, Scan
from lf_format._schema import Schema, TokenizerInfo, parse_schema

PathLike = str | os.PathLike[str]


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
    """Writes every record of `source`, a .loongbin or .lfg, that can still be proven intact by a hash to `output`.

    Blocks are found by their headers, wherever they lie. Record boundaries are in the index; where it is lost, a
    block is kept only when its size leaves one possibility: records whose fields all have a fixed shape, or a single
    field of token ids with one record, or all at the shortest or longest length of the bucket.

    Args:
        like: a whole file of the same data set, when header or schema of `source` are damaged.
        recut: also keep intact blocks without boundaries, cut into the right number of near-equal records with
            neither document flag set. Only for files whose one field is token ids.

    Raises:
        FormatError: header or schema are damaged and `like` is None; nothing intact was found; `output` is `source`
            or `like`. OSError.
    """
    refuse_same([source] if like is None else [source, like], output)
    if not os.path.isfile(source) and os.path.exists(source):  # opening a FIFO would wait for a writer
        raise FormatError("not a regular file", path=source, expected="a .loongbin or .lfg file")
    size = os.stat(source).st_size
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header, schema = _metadata(os.fspath(source) if like is None else os.fspath(like))
        tokenizer = TokenizerInfo(header.tokenizer_name, header.tokenizer_hash)
        with Container(Path(output), Identity(schema, header.vocab_size, tokenizer)) as out:
            scan = Scan(fd, os.fspath(source), size, header, schema)
            rescue = _Rescue(scan, Cutter(schema, header.vocab_size), recut)
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
        raw = read_exact(fd, header.schema_len, header.schema_offset, path)
        if lay.xxh3(raw) != header.schema_hash:
            raise FormatError("schema hash", path=path, offset=header.schema_offset)
        return header, parse_schema(raw, header.vocab_size, path, header.schema_offset, header.profile)
    finally:
        os.close(fd)


@dataclass
class _Rescue:
    """One pass for indexes, one for blocks."""

    scan: Scan
    cutter: Cutter
    recut: bool
    found: int = 0
    whole: int = 0
    records: int = 0
    recut_records: int = 0
    lost: list[tuple[int, str]] = field(default_factory=list)

    def report(self, output: WriteReport) -> SalvageReport:
        counts = self.found, self.whole, self.records, self.recut_records
        return SalvageReport(output, *counts, tuple(self.lost), tuple(self.scan.notes))

    def blocks(self) -> Iterator[StoredBlock]:
        """What can be kept, in file order."""
        scan = self.scan
        scan.read_indexes()
        missing = set(scan.rows)
        at = scan.header.data_offset
        while (at := scan.find(lay.BLOCK_MAGIC, at, lay.BLOCK_ALIGN)) < scan.size:
            try:
                head = lay.parse_block_header(scan.read(lay.BLOCK_HEADER_SIZE, at), scan.path, at)
            except FormatError:
                at += lay.BLOCK_ALIGN  # four bytes of data that look like a header, or a damaged one
                continue
            self.found += 1
            missing.discard(at)
            end = at + lay.BLOCK_HEADER_SIZE + head.stored_len
            block = self._block(at, head) if self._sound(head) else None
            if block is not None:
                self.records += len(block.lengths)
                yield block
            # Behind a payload that is not whole the next header may come anywhere.
            at = end if block is not None and end <= scan.size else at + lay.BLOCK_ALIGN
        for offset in missing:
            self.lost.append((offset, f"{len(scan.rows[offset].lengths)} records: block header"))
        self.lost.sort()

    def _sound(self, head: lay.BlockHeader) -> bool:
        return (
            head.bucket < len(self.scan.schema.buckets)
            and head.n_records >= 1
            and head.stored_len <= head.raw_len <= lay.MAX_BLOCK_BYTES
        )

    def _block(self, at: int, head: lay.BlockHeader) -> StoredBlock | None:
        start = at + lay.BLOCK_HEADER_SIZE
        stored = self.scan.read(head.stored_len, start)
        whole = len(stored) == head.stored_len and lay.xxh3(stored) == head.payload_hash
        rows = self.scan.rows.get(at)
        if rows is not None and len(rows.lengths) != head.n_records:
            rows = None
        try:
            if not whole and (head.codec != RAW or rows is None):
                raise FormatError("payload is damaged")
            payload = stored
            if whole and head.codec != RAW:
                coding = self.scan.coding(at, head)
                payload = decode(stored, head.codec, head.raw_len, self.scan.path, start, coding)
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
        parts = self.cutter.parts(payload, rows)
        good = [k for k, p in enumerate(parts) if self._holds(p, rows, k)]
        for k in sorted(set(range(len(parts))) - set(good)):
            self.lost.append((at, f"record {head.first_record + k}: record hash"))
        if not good:
            return None
        if whole and len(good) == len(parts):
            self.whole += 1
            return self._stored(head, stored, payload, rows)
        return self._raw(head, [parts[k] for k in good], rows.take(good))

    def _holds(self, parts: tuple[bytes, ...], rows: Rows, k: int) -> bool:
        return (
            bool(rows.flags[k] <= 3)
            and self.cutter.whole(parts, rows, k)
            and record_hash(parts) == rows.hashes[k]
        )

    def _without_rows(self, at: int, head: lay.BlockHeader, stored: bytes, payload: bytes) -> StoredBlock:
        rows = self.cutter.only_rows(head)
        if rows is None:
            if not self.recut:
                raise FormatError("intact, but the record boundaries were in the lost index")
            rows = self.cutter.recut(head)
            self.recut_records += head.n_records
        hashes = [record_hash(p) for p in self.cutter.parts(payload, rows)]
        self.whole += 1
        self.scan.notes.append(f"block at byte {at}: document flags are lost")
        return self._stored(head, stored, payload, replace(rows, hashes=np.array(hashes, np.uint32)))

    def _stored(self, head: lay.BlockHeader, stored: bytes, payload: bytes, rows: Rows) -> StoredBlock:
        codec = head.codec
        if head.dict_id or codec > ZSTD:  # the new file has no dictionaries
            codec, stored = RAW, payload
        if self.cutter.raw_len(rows) != len(payload):
            raise FormatError("payload size does not fit the lengths")
        largest = self.cutter.check(head.bucket, rows, self.cutter.parts(payload, rows))
        columns = (rows.lengths, rows.hashes, rows.flags, largest)
        return StoredBlock(head.bucket, codec, len(payload), stored, *columns, counts=rows.counts)

    def _raw(self, head: lay.BlockHeader, parts: list[tuple[bytes, ...]], rows: Rows) -> StoredBlock:
        payload = bytearray()
        for plane in zip(*parts, strict=True):
            payload.extend(bytes(lay.align(len(payload), lay.BLOCK_ALIGN) - len(payload)))
            payload.extend(b"".join(plane))
        fresh = head._replace(codec=RAW, dict_id=0)
        return self._stored(fresh, bytes(payload), bytes(payload), rows)
