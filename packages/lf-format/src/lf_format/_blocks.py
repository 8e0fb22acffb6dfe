"""Blocks and index rows while a file is being written."""

from __future__ import annotations

from typing import Any

import numpy as np

from lf_format import _layout as lay
from lf_format._index import Index
from lf_format._records import record_hash


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

    def hashes(self) -> list[int]:
        """Record hashes."""
        return [record_hash(parts) for parts in zip(*self.planes, strict=True)]

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

    def add(self, pending: PendingBlock, head: lay.BlockHeader, offset: int, max_id: int) -> None:
        """A block that was written with `head` at file `offset`."""
        self._lengths += np.array(pending.lengths, "<u4").tobytes()
        self._hashes += np.array(pending.hashes(), "<u4").tobytes()
        self._flags += bytes(pending.flags)
        sizes = (head.raw_len, head.stored_len, head.payload_hash)
        self._blocks.append((offset, head.n_records, head.bucket, head.codec, *sizes, max_id))
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
