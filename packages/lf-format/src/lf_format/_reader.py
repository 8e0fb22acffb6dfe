"""Reader: checked random access to the records of one file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format import _layout as lay
from lf_format._codecs import RAW, decode
from lf_format._errors import FormatError
from lf_format._index import Index, PlaneMap, check_index, parse_index, plane_maps
from lf_format._records import Record, record_hash
from lf_format._schema import Field, Schema, TokenizerInfo, parse_schema

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Extents:
    """Where field bytes of records lie in the file.

    Attributes:
        offset: byte offset, uint64[n].
        nbytes: bytes of the field, uint32[n].
        hash: record hash (over all fields of the record, see SPEC.md section 5.4), uint32[n].
    """

    offset: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint32]
    hash: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Opened:
    """The checked metadata of a file."""

    header: lay.Header
    schema: Schema
    trailer: lay.Trailer
    index: Index


def read_exact(fd: int, size: int, offset: int, path: str) -> bytes:
    """`size` bytes at `offset`; FormatError when the file ends before. Callers bound `size` by the file length."""
    parts = []
    at, end = offset, offset + size
    while at < end:
        part = os.pread(fd, end - at, at)
        if not part:
            raise FormatError(
                "file ends too early", path=path, offset=at, expected=f"{end - at} more bytes", found=0
            )
        parts.append(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def load(fd: int, path: str) -> Opened:
    """Reads and checks header, schema, trailer and index. FormatError naming path, offset, expected and found."""
    size = os.fstat(fd).st_size
    least = lay.HEADER_SIZE + lay.SECTION_ALIGN + lay.TRAILER_SIZE
    raw = read_exact(fd, min(size, lay.HEADER_SIZE), 0, path)
    header = lay.parse_header(raw, path)
    if size < least:
        raise FormatError(
            "file is truncated", path=path, offset=size, expected=f">= {least} bytes", found=size
        )
    at = size - lay.TRAILER_SIZE
    trailer = lay.parse_trailer(read_exact(fd, lay.TRAILER_SIZE, at, path), path, at)
    schema_raw = _hashed(
        fd, header.schema_offset, header.schema_len, header.schema_hash, "schema", size, path
    )
    schema = parse_schema(schema_raw, header.vocab_size, path, header.schema_offset)
    index_raw = _hashed(fd, trailer.index_offset, trailer.index_len, trailer.index_hash, "index", size, path)
    index = parse_index(index_raw, path, trailer.index_offset)
    _check_totals(raw, header, trailer, index, path)
    check_index(index, schema, header.vocab_size, (header.data_offset, trailer.index_offset), path)
    return Opened(header, schema, trailer, index)


def _hashed(fd: int, offset: int, length: int, digest: int, what: str, size: int, path: str) -> bytes:
    if offset + length > size:
        raise FormatError(
            f"{what} ends beyond the file",
            path=path,
            offset=offset,
            expected=f"<= {size}",
            found=offset + length,
        )
    try:
        raw = read_exact(fd, length, offset, path)
    except MemoryError:
        raise FormatError(
            f"{what} does not fit into memory", path=path, offset=offset, found=length
        ) from None
    found = lay.xxh3(raw)
    if found != digest:
        raise FormatError(f"{what} hash", path=path, offset=offset, expected=hex(digest), found=hex(found))
    return raw


def _check_totals(raw: bytes, header: lay.Header, trailer: lay.Trailer, index: Index, path: str) -> None:
    tokens = int(index.lengths.sum(dtype=np.int64))
    root = lay.root_hash(raw, index.block_hash.tobytes(), trailer.index_hash)
    if trailer.index_offset < header.data_offset:
        raise FormatError(
            "index offset", path=path, expected=f">= {header.data_offset}", found=trailer.index_offset
        )
    for what, at, expected, found in (
        ("record count", 32, trailer.n_records, len(index.lengths)),
        ("token count", 40, trailer.n_tokens, tokens),
        ("block count", 48, trailer.n_blocks, len(index.block_count)),
        ("root hash", 72, hex(trailer.root_hash), hex(root)),
    ):
        if expected != found:
            raise FormatError(
                what, path=path, offset=trailer.trailer_offset + at, expected=expected, found=found
            )


class Reader:
    """Random access to one file. Safe for several threads (reads by offset only) and after fork; pickles by path.

    Opening checks header, schema, trailer and index; `record` checks the bytes it returns; `verify` checks all.

    Attributes:
        path: as given.
        vocab_size: ids are below it.
        tokenizer: TokenizerInfo.
        buckets: bucket edges in tokens, increasing.
        fields: Fields in payload order.
        token_dtype: numpy dtype of the ids.
        fingerprint: 16 hex digits over schema, vocabulary, tokenizer and all content.
        lengths: tokens per record, uint32[n], read-only.
        flags: bit 0 starts, bit 1 ends a document, uint8[n], read-only.

    Raises:
        FormatError: when the file is not a complete, consistent .loongbin.
        OSError: when it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            opened = load(self._fd, self.path)
        except BaseException:
            self.close()
            raise
        self.opened = opened
        self.vocab_size = opened.header.vocab_size
        self.tokenizer = TokenizerInfo(opened.header.tokenizer_name, opened.header.tokenizer_hash)
        self.buckets = opened.schema.buckets
        self.fields: tuple[Field, ...] = opened.schema.fields
        self.token_dtype = opened.schema.numpy_dtype
        self.fingerprint = f"{opened.trailer.root_hash:016x}"
        self.lengths: npt.NDArray[np.uint32] = opened.index.lengths
        self.flags: npt.NDArray[np.uint8] = opened.index.flags
        self.codecs_raw = bool((opened.index.block_codec == RAW).all())
        self._first = opened.index.first_records()
        self._maps, _ = plane_maps(self.fields, self.lengths, self._first)
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
        block = int(np.searchsorted(self._first, i, "right")) - 1
        parts = [np.frombuffer(part, np.uint8) for part in self._field_bytes(i, block)]
        found, expected = record_hash([part.data for part in parts]), int(self.opened.index.hashes[i])
        if found != expected:
            offset = self._payload_at(block) + self._in_payload(self._maps[0], i, block)
            raise FormatError(
                "record hash",
                path=self.path,
                offset=offset,
                record=i,
                expected=hex(expected),
                found=hex(found),
            )
        return self._assemble(i, parts)

    def _assemble(self, i: int, parts: list[npt.NDArray[np.uint8]]) -> Record:
        tokens = parts[0].view(self.token_dtype)
        if int(tokens.max()) >= self.vocab_size:
            at = int((tokens >= self.vocab_size).argmax())
            raise FormatError(
                "token id",
                path=self.path,
                record=i,
                position=at,
                expected=f"< {self.vocab_size}",
                found=int(tokens[at]),
            )
        mask = None
        if len(parts) > 1:
            bits = np.unpackbits(parts[1], bitorder="little")
            if bits[len(tokens) :].any():
                raise FormatError(
                    "spare bits of the loss mask", path=self.path, record=i, expected=0, found=1
                )
            mask = bits[: len(tokens)].astype(bool)
        return Record(tokens, mask, int(self.flags[i]))

    def _payload_at(self, block: int) -> int:
        return int(self.opened.index.block_offset[block]) + lay.BLOCK_HEADER_SIZE

    def _in_payload(self, plane: PlaneMap, i: int, block: int) -> int:
        return int(plane.plane[block] + plane.within[i] - plane.within[self._first[block]])

    def _field_bytes(self, i: int, block: int) -> list[bytearray]:
        """Fresh bytes of each field of record `i`."""
        sizes = [int(m.within[i + 1] - m.within[i]) for m in self._maps]
        starts = [self._in_payload(m, i, block) for m in self._maps]
        if self.opened.index.block_codec[block] == RAW:
            base = self._payload_at(block)
            return [self._pread(size, base + start) for size, start in zip(sizes, starts, strict=True)]
        payload = memoryview(self.block_payload(block))
        return [bytearray(payload[start : start + size]) for size, start in zip(sizes, starts, strict=True)]

    def _pread(self, size: int, offset: int) -> bytearray:
        out = bytearray(size)
        done = os.preadv(self.fileno(), [out], offset)
        if (
            done != size
        ):  # a short read of a regular file is its end, or a signal: the slow path tells them apart
            out[done:] = read_exact(self.fileno(), size - done, offset + done, self.path)
        return out

    def block_payload(self, block: int) -> bytes:
        """Decoded payload of block `block`, hash checked; the last one is kept, since neighbours are often read next."""
        cached, payload = self._decoded
        if cached == block:
            return payload
        index, at = self.opened.index, self._payload_at(block)
        stored = read_exact(self.fileno(), int(index.block_stored[block]), at, self.path)
        found, expected = lay.xxh3(stored), int(index.block_hash[block])
        if found != expected:
            raise FormatError(
                f"hash of block {block}", path=self.path, offset=at, expected=hex(expected), found=hex(found)
            )
        payload = decode(stored, int(index.block_codec[block]), int(index.block_raw[block]), self.path, at)
        self._decoded = (block, payload)  # one assignment, so other threads see a matching pair
        return payload

    def extents(self, ids: object, field: str = "tokens") -> Extents:
        """File positions of one field of the records `ids` (integers, shape [n]), for readers that do their own I/O.

        Raises:
            FormatError: for a block that is not raw, an unknown field, ids that are not integers.
            IndexError: for ids outside 0..len-1.
        """
        names = [f.name for f in self.fields]
        if field not in names:
            raise FormatError("field", path=self.path, expected=names, found=field)
        rows = self._checked_ids(ids)
        index, plane = self.opened.index, self._maps[names.index(field)]
        block = np.searchsorted(self._first, rows, "right") - 1
        packed = index.block_codec[block] != RAW
        if packed.any():
            at = int(block[int(packed.argmax())])
            raise FormatError(
                "extents need raw blocks",
                path=self.path,
                offset=self._payload_at(at),
                expected="codec 0",
                found=f"codec {index.block_codec[at]}",
            )
        inside = plane.plane[block] + plane.within[rows] - plane.within[self._first[block]]
        offset = index.block_offset[block] + (inside + lay.BLOCK_HEADER_SIZE).astype(np.uint64)
        nbytes = (plane.within[rows + 1] - plane.within[rows]).astype(np.uint32)
        return Extents(offset, nbytes, index.hashes[rows])

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
        """FormatError naming file, record and id of the first id >= `vocab_size`; only suspect blocks are read."""
        for block in np.flatnonzero(self.opened.index.block_max_id >= vocab_size).tolist():
            for i in range(int(self._first[block]), int(self._first[block + 1])):
                tokens = self.record(i).tokens
                if int(tokens.max()) >= vocab_size:
                    at = int((tokens >= vocab_size).argmax())
                    raise FormatError(
                        "token id outside the vocabulary",
                        path=self.path, record=i, position=at, expected=f"< {vocab_size}", found=int(tokens[at]),
                    )  # fmt: skip
            raise FormatError(
                f"largest id of block {block} in the index",
                path=self.path,
                expected="an id of the block",
                found="none",
            )

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
