"""Reader: checked random access to the records of one file."""

from __future__ import annotations

import itertools
import os
import stat
from bisect import bisect_right
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format import _layout as lay
from lf_format._codecs import RAW, Coding, decode
from lf_format._errors import FormatError, Place
from lf_format._fields import Field
from lf_format._gathered import flat, shaped
from lf_format._index import PlaneMap, cumulative, plane_maps
from lf_format._locations import Blocks, Extents, Locations, find
from lf_format._open import load, read_exact
from lf_format._records import Record, record_hash
from lf_format._schema import TokenizerInfo

Array = npt.NDArray[Any]


class Reader:
    """Random access to one file. Safe for several threads and after fork (it reads by offset); pickles by path.

    Opening checks header, schema, trailer and index; `record` checks what it returns; `verify` checks all.

    Attributes:
        path: as given.
        vocab_size: ids are below it.
        tokenizer: TokenizerInfo.
        buckets: bucket edges in tokens, increasing.
        fields: Fields in payload order.
        token_dtype: numpy dtype of the ids.
        meta: the JSON object of a .lfg; empty in a .loongbin.
        fingerprint: 16 hex digits over schema, vocabulary, tokenizer and all content.
        lengths: tokens per record, uint32[n], read-only.
        flags: bit 0 starts, bit 1 ends a document, uint8[n], read-only.
        codecs_raw: True when every block is raw, so that `extents` covers every record.
        opened: header, schema, trailer and index as parsed, for tools.

    Raises:
        FormatError: when the file is not a complete, consistent .loongbin.
        OSError: when it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if not stat.S_ISREG(os.stat(self.path).st_mode):  # opening a FIFO would wait for a writer
            raise FormatError("not a regular file", path=self.path, expected="a .loongbin or .lfg file")
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            opened = load(self._fd, self.path)
        except MemoryError:
            self.close()
            raise FormatError("the index does not fit into memory", path=self.path) from None
        except BaseException:
            self.close()
            raise
        self.opened = opened
        self.vocab_size = opened.header.vocab_size
        self.tokenizer = TokenizerInfo(opened.header.tokenizer_name, opened.header.tokenizer_hash)
        self.buckets = opened.schema.buckets
        self.fields: tuple[Field, ...] = opened.schema.fields
        self.token_dtype = opened.schema.numpy_dtype
        self.meta = opened.schema.meta
        self.fingerprint = f"{opened.trailer.root_hash:016x}"
        self.lengths: npt.NDArray[np.uint32] = opened.index.lengths
        self.flags: npt.NDArray[np.uint8] = opened.index.flags
        self.codecs_raw = bool((opened.index.block_codec == RAW).all())
        self._first = opened.index.first_records()
        self._first_of_block: list[int] = self._first.tolist()  # bisect is 5 us faster than numpy for one id
        self._counts = opened.index.counts_of(opened.schema)
        self._maps, _ = plane_maps(self.fields, self._counts, self._first)
        self._decoded: tuple[int, bytes] = (-1, b"")

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def bucket_of(self) -> Array:
        """Index into `buckets` of every record: uint8[n], or uint16[n] beyond 256 buckets; read-only."""
        dtype = np.uint8 if len(self.buckets) <= 256 else np.uint16
        out = np.repeat(self.opened.index.block_bucket.astype(dtype), self.opened.index.block_count)
        out.flags.writeable = False
        return out

    def fileno(self) -> int:
        """The open descriptor; FormatError when closed."""
        if self._fd < 0:
            raise FormatError("the reader is closed", path=self.path)
        return self._fd

    def close(self) -> None:
        """Closes the descriptor; harmless when repeated. Arrays stay valid."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def record(self, i: int) -> Record:
        """Record `i`, read and checked against its hash.

        Raises:
            IndexError: unless 0 <= i < len(self).
            FormatError: naming record and offset when the bytes are not those that were written.
        """
        if not 0 <= i < len(self.lengths):
            raise IndexError(f"record {i} of {len(self.lengths)} in {self.path}")
        block = bisect_right(self._first_of_block, i) - 1
        return self._assemble(i, self._checked_bytes(i, block))

    def _checked_bytes(
        self, i: int, block: int, targets: dict[int, npt.NDArray[np.uint8]] | None = None
    ) -> list[npt.NDArray[np.uint8]]:
        """Bytes of each field, of the record hash; field k is read into `targets[k]` where there is one."""
        parts = self._field_bytes(i, block, targets or {})
        found, expected = record_hash([part.data for part in parts]), int(self.opened.index.hashes[i])
        if found != expected:
            offset = self._payload_at(block) + self._in_payload(self._maps[0], i, block)
            raise FormatError(
                "record hash",
                path=self.path, offset=offset, record=i, expected=hex(expected), found=hex(found),
            )  # fmt: skip
        return parts

    def _assemble(self, i: int, parts: list[npt.NDArray[np.uint8]]) -> Record:
        values: dict[str, Array] = {}
        for field, part, counts in zip(self.fields, parts, self._counts, strict=True):
            value = field.decode(part, int(counts[i]))
            if value is None:
                what = f"spare bits of the {field.name.replace('_', ' ')}"
                raise FormatError(what, path=self.path, record=i, expected=0, found=1)
            if field.kind == "tokens":
                self._check_ids(i, value, self.vocab_size)
            values[field.name] = value
        schema = self.opened.schema
        tokens = values[schema.tokens.name] if schema.tokens else np.zeros(0, self.token_dtype)
        mask = next((values[f.name] for f in self.fields if f.role == "loss_mask"), None)
        return Record(tokens, mask, int(self.flags[i]), values)

    def _payload_at(self, block: int) -> int:
        return int(self.opened.index.block_offset[block]) + lay.BLOCK_HEADER_SIZE

    def _in_payload(self, plane: PlaneMap, i: int, block: int) -> int:
        return int(plane.plane[block] + plane.within[i] - plane.within[self._first[block]])

    def _field_bytes(
        self, i: int, block: int, targets: dict[int, npt.NDArray[np.uint8]]
    ) -> list[npt.NDArray[np.uint8]]:
        """Bytes of each field of record `i`, in `targets` or fresh."""
        sizes = [int(m.within[i + 1] - m.within[i]) for m in self._maps]
        starts = [self._in_payload(m, i, block) for m in self._maps]
        parts = [targets[k] if k in targets else np.empty(size, np.uint8) for k, size in enumerate(sizes)]
        if self.opened.index.block_codec[block] == RAW:
            self._scatter(parts, starts, self._payload_at(block))
            return parts
        payload = np.frombuffer(self.block_payload(block), np.uint8)
        for part, start, size in zip(parts, starts, sizes, strict=True):
            part[:] = payload[start : start + size]
        return parts

    def _scatter(self, parts: list[npt.NDArray[np.uint8]], starts: list[int], base: int) -> None:
        """Reads `parts` from payload offsets `starts`; in one call where the gaps between them are small."""
        gaps = [b - a - len(p) for a, b, p in zip(starts, starts[1:], parts, strict=False)]
        if not gaps or max(gaps) >= lay.BLOCK_ALIGN:
            for part, start in zip(parts, starts, strict=True):
                self._pread([part], base + start)
            return
        spare = np.empty(lay.BLOCK_ALIGN, np.uint8)
        views = [v for part, gap in zip(parts, [*gaps, 0], strict=True) for v in (part, spare[:gap])]
        self._pread([v for v in views if len(v)], base + starts[0])

    def _pread(self, views: list[npt.NDArray[np.uint8]], offset: int) -> None:
        want = sum(map(len, views))
        done = os.preadv(self.fileno(), [v.data for v in views], offset)
        if done == want:
            return
        for view in views:  # the end of the file, or a signal: the slow path tells them apart
            view[:] = np.frombuffer(read_exact(self.fileno(), len(view), offset, self.path), np.uint8)
            offset += len(view)

    def gather(
        self, ids: object, field: str, out: Array | None = None, check: bool = True
    ) -> Array | tuple[Array, npt.NDArray[np.int64]]:
        """One field of the records `ids` (integers, shape [n], any order), as one array.

        Args:
            out: C-contiguous array of the result's shape and dtype to fill (page-locked memory, for example);
                for fields of a fixed shape other than bits.
            check: compare every record's hash, which reads the other fields too; without it, raw blocks give
                whatever bytes the disk holds.

        Returns:
            [n, *shape] in the field's dtype (bool for bits); for a ragged field (values of all records one
            after the other, int64[n + 1] where each begins).

        Raises:
            FormatError: unknown field, an `out` that does not fit, or damage. IndexError: ids out of range.
        """
        names = [f.name for f in self.fields]
        if field not in names:
            raise FormatError("field", path=self.path, expected=names, found=field)
        k = names.index(field)
        item, rows = self.fields[k], self._checked_ids(ids)
        sizes = self._maps[k].within[rows + 1] - self._maps[k].within[rows]
        if out is not None and (item.ragged or item.kind == "bits"):
            raise FormatError(
                "out is for fields of a fixed shape other than bits", path=self.path, found=field
            )
        buffer = (
            np.empty(int(sizes.sum()), np.uint8) if out is None else flat(out, item, len(rows), self.path)
        )
        ends = cumulative(sizes).tolist()
        parts = [buffer[a:b] for a, b in itertools.pairwise(ends)]
        blocks = (np.searchsorted(self._first, rows, "right") - 1).tolist()
        for i, block, target in zip(rows.tolist(), blocks, parts, strict=True):
            if check:
                self._checked_bytes(i, block, {k: target})
            elif self.opened.index.block_codec[block] == RAW:
                start = self._in_payload(self._maps[k], i, block)
                self._pread([target], self._payload_at(block) + start)
            else:
                self._field_bytes(i, block, {k: target})
            if item.kind == "tokens":
                self._check_ids(i, target.view(item.numpy_dtype), self.vocab_size)
        if out is not None:
            return out
        whole = shaped(item, self._counts[k][rows], parts, buffer)
        if whole is None:
            raise FormatError(f"spare bits of {item.name}", path=self.path, expected=0, found=1)
        return whole

    def block_payload(self, block: int) -> bytes:
        """Decoded payload of block `block`, hash checked. The last one is kept: its records come in runs."""
        cached, payload = self._decoded
        if cached == block:
            return payload
        index, at = self.opened.index, self._payload_at(block)
        stored = self.block_stored(block)
        codec, raw_len = int(index.block_codec[block]), int(index.block_raw[block])
        coding = self.coding(block) if codec != RAW else None
        payload = decode(stored, codec, raw_len, self.path, at, coding)
        self._decoded = (block, payload)  # one assignment, so other threads see a matching pair
        return payload

    def coding(self, block: int) -> Coding:
        """What the codec of block `block` needs beyond its bytes."""
        rows = slice(int(self._first[block]), int(self._first[block + 1]))
        tokens = int(self.lengths[rows].sum(dtype=np.int64))
        return self.opened.dictionaries.coding(block, tokens, self.token_dtype)

    def block_stored(self, block: int) -> bytes:
        """Payload of block `block` as stored; FormatError unless it has its hash."""
        index, at = self.opened.index, self._payload_at(block)
        stored = read_exact(self.fileno(), int(index.block_stored[block]), at, self.path)
        found, expected = lay.xxh3(stored), int(index.block_hash[block])
        if found != expected:
            raise FormatError(
                f"hash of block {block}", path=self.path, offset=at, expected=hex(expected), found=hex(found)
            )
        return stored

    def extents(self, ids: object, field: str = "tokens") -> Extents:
        """File positions of one field of the records `ids` (integers, shape [n]), for engines with own I/O.

        Raises:
            FormatError: for a block that is not raw, an unknown field, ids that are not integers.
            IndexError: for ids outside 0..len-1.
        """
        names = [f.name for f in self.fields]
        if field not in names:
            raise FormatError("field", path=self.path, expected=names, found=field)
        found, k = self.locations(ids), names.index(field)
        codecs = self.opened.index.block_codec[found.block]
        if (codecs != RAW).any():
            at = int((codecs != RAW).argmax())
            place = Place(self.path, int(found.payload[at]))
            place.require(False, "extents need raw blocks", 0, "codec raw", f"codec {codecs[at]}")
        return Extents(found.payload + found.start[k], found.nbytes[k], found.hash)

    def locations(self, ids: object) -> Locations:
        """Block and position in it of every field of the records `ids` (integers, shape [n]), whatever the codecs.

        Raises:
            FormatError: ids that are not integers. IndexError: ids outside 0..len-1.
        """
        rows = self._checked_ids(ids)
        return find(rows, self.opened.index, self._first, self._maps, self._counts)

    def blocks(self, numbers: npt.NDArray[np.int64]) -> Blocks:
        """What an engine needs to read and decode blocks; `numbers` int64[b] as in `locations`."""
        index, plane, first = self.opened.index, self._maps[0].within, self._first
        ids = (plane[first[numbers + 1]] - plane[first[numbers]]) // self.fields[0].numpy_dtype.itemsize
        return Blocks(
            index.block_offset[numbers] + np.uint64(lay.BLOCK_HEADER_SIZE),
            index.block_stored[numbers], index.block_raw[numbers], index.block_hash[numbers],
            index.block_codec[numbers], self.opened.dictionaries.of_block[numbers].astype(np.uint32),
            ids.astype(np.uint32),
        )  # fmt: skip

    def codings(self) -> list[Coding]:
        """What blocks without dictionary need, then those with dictionary 1, 2 and so on."""
        dictionaries = self.opened.dictionaries
        return [dictionaries.coding_of(n, 0, self.token_dtype) for n in range(len(dictionaries.entries) + 1)]

    def longest(self, field: str) -> int:
        """Most steps of the first axis that a record has of `field`; 1 for a field of a fixed shape."""
        for item, counts in zip(self.fields, self._counts, strict=True):
            if item.name == field:
                return int(counts.max(initial=0)) if item.ragged else 1
        raise FormatError("field", path=self.path, expected=[f.name for f in self.fields], found=field)

    def _checked_ids(self, ids: object) -> npt.NDArray[np.int64]:
        rows = np.atleast_1d(np.asarray(ids))
        if rows.size == 0:
            return np.zeros(0, np.int64)
        if rows.dtype.kind not in "iu" or rows.ndim != 1:
            raise FormatError(
                "record ids",
                path=self.path,
                expected="integers of shape [n]",
                found=f"{rows.dtype} {rows.shape}",
            )
        if int(rows.min()) < 0 or int(rows.max()) >= len(self):
            raise IndexError(f"record ids must be in 0..{len(self) - 1} in {self.path}")
        return rows.astype(np.int64)

    def max_id(self) -> int:
        """Largest token id in the file; -1 when it is empty. From the index, O(blocks)."""
        maxima = self.opened.index.block_max_id
        return int(maxima.max()) if len(maxima) else -1

    def check_vocab(self, vocab_size: int) -> None:
        """FormatError naming file, record and id of the first id >= `vocab_size`; reads only suspect blocks."""
        for block in np.flatnonzero(self.opened.index.block_max_id >= vocab_size).tolist():
            for i in range(int(self._first[block]), int(self._first[block + 1])):
                record = self.record(i)
                for field in self.fields:
                    if field.kind == "tokens":
                        self._check_ids(i, record[field.name], vocab_size)
            place = Place(self.path, self.opened.trailer.index_offset)
            place.require(False, f"largest id of block {block}", 0, f">= {vocab_size} in a record", "none")

    def _check_ids(self, i: int, tokens: Array, vocab_size: int) -> None:
        ids = (
            tokens.view(f"u{tokens.itemsize}") if tokens.dtype.kind == "i" else tokens
        )  # negative = too large
        if int(ids.max(initial=0)) >= vocab_size:
            at = int((ids >= vocab_size).argmax())
            raise FormatError(
                "token id outside the vocabulary",
                path=self.path, record=i, position=at, expected=f"< {vocab_size}", found=int(tokens[at]),
            )  # fmt: skip

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.fingerprint)


def _reopen(path: str, fingerprint: str) -> Reader:
    """Unpickling: the same content or an error."""
    reader = Reader(path)
    if reader.fingerprint != fingerprint:
        reader.close()
        raise FormatError(
            "file changed since it was pickled", path=path, expected=fingerprint, found=reader.fingerprint
        )
    return reader
