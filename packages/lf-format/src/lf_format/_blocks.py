"""Blocks and index rows while a file is being written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format import _layout as lay
from lf_format._index import Index
from lf_format._records import record_hash

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class StoredBlock:
    """A block as its file holds it, and its rows of the index.

    Attributes:
        bucket, codec, dictionary: as in the block header.
        raw_len: decoded bytes.
        stored: the payload as stored.
        lengths, hashes, flags: one value a record, [records].
        max_id: largest token id.
    """

    bucket: int
    codec: int
    raw_len: int
    stored: bytes
    lengths: Array
    hashes: Array
    flags: Array
    max_id: int
    dictionary: int = 0

    def header(self, first_record: int) -> lay.BlockHeader:
        """Header of the block when its first record has the number `first_record`."""
        sizes = (self.raw_len, len(self.stored), lay.xxh3(self.stored))
        return lay.BlockHeader(
            self.bucket, self.codec, self.dictionary, len(self.lengths), first_record, *sizes
        )


class PendingBlock:
    """Records of one bucket that wait until their block is full.

    Args:
        fields: number of fields of every record.
    """

    def __init__(self, fields: int) -> None:
        self.planes: list[list[bytes]] = [[] for _ in range(fields)]
        self.lengths: list[int] = []
        self.flags: list[int] = []
        self.nbytes = 0

    def add(self, parts: list[bytes], length: int, flags: int) -> None:
        """One record: its bytes per field, tokens, and flags."""
        for plane, part in zip(self.planes, parts, strict=True):
            plane.append(part)
            self.nbytes += len(part)
        self.lengths.append(length)
        self.flags.append(flags)

    def payload(self) -> bytes:
        """Decoded payload: one plane per field, each at a multiple of 64."""
        out = bytearray()
        for plane in self.planes:
            out.extend(bytes(lay.align(len(out), lay.BLOCK_ALIGN) - len(out)))
            out.extend(b"".join(plane))
        return bytes(out)

    def rows(self) -> tuple[Array, Array, Array]:
        """Lengths, record hashes and flags, each [records]."""
        hashes = [record_hash(parts) for parts in zip(*self.planes, strict=True)]
        return np.array(self.lengths, "<u4"), np.array(hashes, "<u4"), np.array(self.flags, "u1")

    def max_id(self, dtype: np.dtype[Any]) -> int:
        """Largest token id."""
        return int(np.frombuffer(b"".join(self.planes[0]), dtype).max())


class IndexRows:
    """Columns of the index while they grow: 9 bytes a record, not Python objects."""

    def __init__(self) -> None:
        self._lengths, self._hashes, self._flags = bytearray(), bytearray(), bytearray()
        self._blocks: list[tuple[int, ...]] = []
        self.records = 0

    @property
    def blocks(self) -> int:
        """Blocks so far."""
        return len(self._blocks)

    def add(self, block: StoredBlock, head: lay.BlockHeader, offset: int) -> None:
        """A block that was written with `head` at file `offset`."""
        self._lengths += block.lengths.astype("<u4").tobytes()
        self._hashes += block.hashes.astype("<u4").tobytes()
        self._flags += block.flags.astype("u1").tobytes()
        sizes = (head.raw_len, head.stored_len, head.payload_hash)
        self._blocks.append((offset, head.n_records, head.bucket, head.codec, *sizes, block.max_id))
        self.records += head.n_records

    def index(self) -> Index:
        """The finished columns."""
        columns = zip(*self._blocks, strict=True) if self._blocks else [()] * 8
        return Index(
            np.frombuffer(self._lengths, "<u4"),
            np.frombuffer(self._hashes, "<u4"),
            np.frombuffer(self._flags, "u1"),
            *(np.array(column, np.uint64) for column in columns),
        )
