"""Cutting the payload of a block into records: where the index says, or where only one way is left."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format import _layout as lay
from lf_format._errors import FormatError
from lf_format._fields import Field
from lf_format._index import cumulative
from lf_format._salvage_scan import Rows
from lf_format._schema import Schema

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Cutter:
    """Payload arithmetic of one schema."""

    schema: Schema
    vocab_size: int

    def raw_len(self, rows: Rows) -> int:
        """Bytes of the payload of records with these rows."""
        end = 0
        for item, steps in self._steps(rows):
            end = lay.align(end, lay.BLOCK_ALIGN) + int(item.nbytes(steps).sum())
        return end

    def parts(self, payload: bytes, rows: Rows) -> list[tuple[bytes, ...]]:
        """Field bytes of each record; shorter where the payload ends early."""
        planes, end = [], 0
        for item, steps in self._steps(rows):
            ends = lay.align(end, lay.BLOCK_ALIGN) + cumulative(item.nbytes(steps))
            planes.append([payload[a:b] for a, b in itertools.pairwise(ends.tolist())])
            end = int(ends[-1])
        return list(zip(*planes, strict=True))

    def _steps(self, rows: Rows) -> list[tuple[Field, Array]]:
        return [(f, rows.counts.get(f.name, rows.lengths)) for f in self.schema.fields]

    def whole(self, parts: tuple[bytes, ...], rows: Rows, k: int) -> bool:
        """Whether record `k` has all of its bytes."""
        sizes = [int(f.nbytes(steps[k : k + 1])[0]) for f, steps in self._steps(rows)]
        return sizes == [len(p) for p in parts]

    def check(self, bucket: int, rows: Rows, parts: list[tuple[bytes, ...]]) -> int:
        """Largest id of these records. FormatError when ids or lengths are out of range."""
        low, high = self._bounds(bucket)
        largest = 0
        for k, item in enumerate(self.schema.fields):
            if item.kind == "tokens":  # unsigned, so that a negative id is a large one
                ids = np.frombuffer(b"".join(p[k] for p in parts), f"<u{item.numpy_dtype.itemsize}")
                largest = max(largest, int(ids.max(initial=0)))
        if largest >= self.vocab_size or rows.lengths.min() < low or rows.lengths.max() > high:
            raise FormatError("ids or lengths out of range")
        return largest

    def _bounds(self, bucket: int) -> tuple[int, int]:
        edges = (0, *self.schema.buckets)
        return edges[bucket] + 1, edges[bucket + 1]

    def only_rows(self, head: lay.BlockHeader) -> Rows | None:
        """Rows without hashes and flags when the size of the payload leaves one choice, else None."""
        if any(f.ragged for f in self.schema.fields) and len(self.schema.fields) > 1:
            return None  # a further plane starts at a multiple of 64, which hides the exact size
        for length in self._candidates(head):
            rows = self._uncounted(np.full(head.n_records, length, np.uint32))
            low, high = self._bounds(head.bucket)
            if low <= length <= high and self.raw_len(rows) == head.raw_len:
                return rows
        return None

    def _candidates(self, head: lay.BlockHeader) -> list[int]:
        tokens = self.schema.tokens
        if tokens is None or not tokens.ragged:
            return [1 if tokens is None else tokens.shape[0]]
        candidates = list(self._bounds(head.bucket))
        if head.n_records == 1:
            candidates.append(head.raw_len // self.schema.numpy_dtype.itemsize)
        return candidates

    def recut(self, head: lay.BlockHeader) -> Rows:
        """Near-equal records of token ids. FormatError when the payload does not allow it."""
        if self.schema.tokens is None or len(self.schema.fields) > 1:
            raise FormatError("intact, but the record boundaries were in the lost index")
        tokens, rest = divmod(head.raw_len, self.schema.numpy_dtype.itemsize)
        base, longer = divmod(tokens, head.n_records)
        lengths = np.full(head.n_records, base, np.uint32)
        lengths[:longer] += 1
        low, high = self._bounds(head.bucket)
        if rest or not low <= base <= int(lengths[0]) <= high:
            raise FormatError("payload size does not fit the bucket")
        return self._uncounted(lengths)

    @staticmethod
    def _uncounted(lengths: Array) -> Rows:
        return Rows(lengths, np.zeros(len(lengths), np.uint32), np.zeros(len(lengths), np.uint8))
