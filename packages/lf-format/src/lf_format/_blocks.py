"""Blocks and index rows while a file is being written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from lf_format import _dictionary
from lf_format import _layout as lay
from lf_format._fields import Field
from lf_format._index import Index
from lf_format._records import record_hash

Array = npt.NDArray[Any]
Part = bytes | memoryview  # of one byte an item
_LARGE = 4096  # bytes; below, one copy costs less than hashing and writing the values one by one


@dataclass(frozen=True)
class StoredBlock:
    """A block as its file holds it, and its rows of the index.

    Attributes:
        bucket, codec, dictionary: as in the block header.
        raw_len: decoded bytes.
        stored: the payload as stored, whole or in pieces.
        lengths, hashes, flags: one value a record, [records].
        max_id: largest token id.
        counts: first axis of the ragged fields of a .lfg by field name, [records] each.
    """

    bucket: int
    codec: int
    raw_len: int
    stored: bytes | Sequence[Part]
    lengths: Array
    hashes: Array
    flags: Array
    max_id: int
    dictionary: int = 0
    counts: Mapping[str, Array] = field(default_factory=dict)

    @property
    def pieces(self) -> Sequence[Part]:
        """The payload in pieces."""
        return (self.stored,) if isinstance(self.stored, bytes) else self.stored

    def header(self, first_record: int) -> lay.BlockHeader:
        """Header of the block when its first record has the number `first_record`."""
        digest = xxhash.xxh3_64()
        for piece in self.pieces:
            digest.update(piece)
        sizes = (self.raw_len, sum(map(len, self.pieces)), digest.intdigest())
        return lay.BlockHeader(
            self.bucket, self.codec, self.dictionary, len(self.lengths), first_record, *sizes
        )


class PendingBlock:
    """Records of one bucket that wait until their block is full.

    Args:
        fields: number of fields of every record.
    """

    def __init__(self, fields: int) -> None:
        self.planes: list[list[Part]] = [[] for _ in range(fields)]
        self.lengths: list[int] = []
        self.hashes: list[int] = []
        self.flags: list[int] = []
        self.counts: list[Sequence[int]] = []
        self.nbytes = 0

    def add(self, parts: Sequence[Part], length: int, flags: int, counts: Sequence[int] = ()) -> None:
        """One record: its bytes per field, tokens, flags, and steps of every ragged field with own column."""
        for plane, part in zip(self.planes, parts, strict=True):
            plane.append(part)
        self.nbytes += sum(map(len, parts))
        self.lengths.append(length)
        self.hashes.append(record_hash(parts))
        self.flags.append(flags)
        self.counts.append(counts)

    def pieces(self) -> list[Part]:
        """Decoded payload: one plane per field, each at a multiple of 64. Large values are not copied."""
        out: list[Part] = []
        end = 0
        for plane in self.planes:
            start = lay.align(end, lay.BLOCK_ALIGN)
            size = sum(map(len, plane))
            values = plane if size > _LARGE * len(plane) else [b"".join(plane)]
            out += [bytes(start - end), *values]
            end = start + size
        return out

    def rows(self) -> tuple[Array, Array, Array]:
        """Lengths, record hashes and flags, each [records]."""
        return np.array(self.lengths, "<u4"), np.array(self.hashes, "<u4"), np.array(self.flags, "u1")

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
