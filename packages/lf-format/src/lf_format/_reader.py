"""Reader: checked random access to the records of one file."""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format import _layout as lay
from lf_format._codecs import RAW, decode
from lf_format._errors import FormatError, Place
from lf_format._index import PlaneMap, plane_maps
from lf_format._open import load, read_exact
from lf_format._records import Record, record_hash
from lf_format._schema import Field, TokenizerInfo

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
            raise FormatError("not a regular file", path=self.path, expected="a .loongbin file")
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
        self.fingerprint = f"{opened.trailer.root_hash:016x}"
        self.lengths: npt.NDArray[np.uint32] = opened.index.lengths
        self.flags: npt.NDArray[np.uint8] = opened.index.flags
        self.codecs_raw = bool((opened.index.block_codec == RAW).all())
        self._first = opened.index.first_records()
        self._first_of_block: list[int] = self._first.tolist()  # bisect is 5 us faster than numpy for one id
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
        block = bisect_right(self._first_of_block, i) - 1
        parts = self._field_bytes(i, block)
        found, expected = record_hash([part.data for part in parts]), int(self.opened.index.hashes[i])
        if found != expected:
            offset = self._payload_at(block) + self._in_payload(self._maps[0], i, block)
            raise FormatError(
                "record hash",
                path=self.path, offset=offset, record=i, expected=hex(expected), found=hex(found),
            )  # fmt: skip
        return self._assemble(i, parts)

    def _assemble(self, i: int, parts: list[npt.NDArray[np.uint8]]) -> Record:
        tokens = parts[0].view(self.token_dtype)
        self._check_ids(i, tokens, self.vocab_size)
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

    def _field_bytes(self, i: int, block: int) -> list[npt.NDArray[np.uint8]]:
        """Fresh bytes of each field of record `i`."""
        sizes = [int(m.within[i + 1] - m.within[i]) for m in self._maps]
        starts = [self._in_payload(m, i, block) for m in self._maps]
        if self.opened.index.block_codec[block] == RAW:
            base = self._payload_at(block)
            return [self._pread(size, base + start) for size, start in zip(sizes, starts, strict=True)]
        payload = np.frombuffer(self.block_payload(block), np.uint8)
        return [payload[start : start + size].copy() for size, start in zip(sizes, starts, strict=True)]

    def _pread(self, size: int, offset: int) -> npt.NDArray[np.uint8]:
        out = np.empty(size, np.uint8)
        done = os.preadv(self.fileno(), [out.data], offset)
        if done != size:  # the end of the file, or a signal: the slow path tells them apart
            rest = read_exact(self.fileno(), size - done, offset + done, self.path)
            out[done:] = np.frombuffer(rest, np.uint8)
        return out

    def block_payload(self, block: int) -> bytes:
        """Decoded payload of block `block`, hash checked. The last one is kept: its records come in runs."""
        cached, payload = self._decoded
        if cached == block:
            return payload
        index, at = self.opened.index, self._payload_at(block)
        stored = self.block_stored(block)
        payload = decode(stored, int(index.block_codec[block]), int(index.block_raw[block]), self.path, at)
        self._decoded = (block, payload)  # one assignment, so other threads see a matching pair
        return payload

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
        rows = self._checked_ids(ids)
        index, plane = self.opened.index, self._maps[names.index(field)]
        block = np.searchsorted(self._first, rows, "right") - 1
        packed = block[index.block_codec[block] != RAW]
        if len(packed):
            place = Place(self.path, self._payload_at(int(packed[0])))
            place.require(
                False, "extents need raw blocks", 0, "codec raw", f"codec {index.block_codec[packed[0]]}"
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
        """FormatError naming file, record and id of the first id >= `vocab_size`; reads only suspect blocks."""
        for block in np.flatnonzero(self.opened.index.block_max_id >= vocab_size).tolist():
            for i in range(int(self._first[block]), int(self._first[block + 1])):
                self._check_ids(i, self.record(i).tokens, vocab_size)
            place = Place(self.path, self.opened.trailer.index_offset)
            place.require(False, f"largest id of block {block}", 0, f">= {vocab_size} in a record", "none")

    def _check_ids(self, i: int, tokens: Array, vocab_size: int) -> None:
        if int(tokens.max()) >= vocab_size:
            at = int((tokens >= vocab_size).argmax())
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
