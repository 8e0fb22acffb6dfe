"""Blocks and index rows while a file is being written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format import _dictionary
from lf_format import _layout as lay
from lf_format._fields import Field
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
        counts: first axis of the ragged fields of a .lfg by field name, [records] each.
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
    counts: Mapping[str, Array] = field(default_factory=dict)

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
        self.counts: list[list[int]] = []
        self.nbytes = 0

    def add(self, parts: list[bytes], length: int, flags: int, counts: list[int] | None = None) -> None:
        """One record: its bytes per field, tokens, flags, and steps of every ragged field with own column."""
        if counts is not None:
            self.counts.append(counts)
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

    def step_columns(self, names: Sequence[str]) -> dict[str, Array]:
        """Steps of the ragged fields `names`, in the order in which `add` was given them."""
        return {name: np.array([steps[k] for steps in self.counts], "<u4") for k, name in enumerate(names)}

    def max_id(self, fields: tuple[Field, ...]) -> int:
        """Largest token id over all token fields; 0 without one."""
        return max(
            (
                int(np.frombuffer(b"".join(plane), item.numpy_dtype).max(initial=0))
                for plane, item in zip(self.planes, fields, strict=True)
                if item.kind == "tokens"
            ),
            default=0,
        )


class IndexRows:
    """Columns of the index while they grow: 9 bytes a record, not Python objects.

    Args:
        counted: names of the ragged fields that have a column.
    """

    def __init__(self, counted: Sequence[str] = ()) -> None:
        self._counts = {name: bytearray() for name in counted}
        self._lengths, self._hashes, self._flags = bytearray(), bytearray(), bytearray()
        self._blocks: list[tuple[int, ...]] = []
        self._of_block: list[int] = []
        self.dictionaries: list[_dictionary.Dictionary] = []
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
        for name, column in self._counts.items():
            column += block.counts[name].astype("<u4").tobytes()
        sizes = (head.raw_len, head.stored_len, head.payload_hash)
        self._blocks.append((offset, head.n_records, head.bucket, head.codec, *sizes, block.max_id))
        self._of_block.append(block.dictionary)
        self.records += head.n_records

    def index(self) -> Index:
        """The finished columns."""
        columns = zip(*self._blocks, strict=True) if self._blocks else [()] * 8
        counts = {name: np.frombuffer(column, "<u4") for name, column in self._counts.items()}
        index = Index(
            np.frombuffer(self._lengths, "<u4"),
            np.frombuffer(self._hashes, "<u4"),
            np.frombuffer(self._flags, "u1"),
            *(np.array(column, np.uint64) for column in columns),
            counts=counts,
        )
        return replace(index, extra=_dictionary.columns(self.dictionaries, self._of_block))
