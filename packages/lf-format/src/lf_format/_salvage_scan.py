"""What a damaged file still says about its blocks: indexes and trailers, found wherever they lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format import _layout as lay
from lf_format._codecs import ZSTD, Coding
from lf_format._dictionary import Dictionaries
from lf_format._errors import FormatError, Place
from lf_format._index import Index, parse_index
from lf_format._open import read_exact
from lf_format._schema import Schema

_CHUNK = 1 << 20
_INDEX = b"LFIX"
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """Index rows of the records of one block, [records] each; `counts` as in Index."""

    lengths: Array
    hashes: Array
    flags: Array
    counts: Mapping[str, Array] = field(default_factory=dict)

    def take(self, kept: list[int]) -> Rows:
        """The rows of some of the records."""
        counts = {name: column[kept] for name, column in self.counts.items()}
        return Rows(self.lengths[kept], self.hashes[kept], self.flags[kept], counts)


@dataclass
class Scan:
    """A damaged file and what its intact indexes say, by the offset of the block."""

    fd: int
    path: str
    size: int
    header: lay.Header
    schema: Schema
    rows: dict[int, Rows] = field(default_factory=dict)
    codings: dict[int, Coding] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def read(self, length: int, at: int) -> bytes:
        """Up to `length` bytes at `at`; fewer where the file ends."""
        return read_exact(self.fd, min(length, max(self.size - at, 0)), at, self.path)

    def find(self, magic: bytes, start: int, step: int) -> int:
        """Next multiple of `step` at or behind `start` where `magic` stands; the file size when there is none."""
        at = lay.align(start, step)
        while at < self.size:
            try:
                at = max(at, os.lseek(self.fd, at, os.SEEK_DATA) // step * step)  # skips holes
            except OSError:
                return self.size
            chunk = self.read(_CHUNK, at)
            hit = chunk.find(magic)
            while hit >= 0:
                if hit % step == 0:
                    return at + hit
                hit = chunk.find(magic, hit + 1)
            at += _CHUNK
        return self.size

    def read_indexes(self) -> None:
        """Fills rows and codings from every index that still parses."""
        trusted = self._trailers()
        at = self.header.data_offset
        while (at := self.find(_INDEX, at, lay.SECTION_ALIGN)) < self.size:
            index, sure = self._index(at, trusted)
            if index is not None:
                if not sure:
                    self.notes.append(f"index at byte {at} has no trailer that confirms its document flags")
                self._learn(index, Place(self.path, at))
            at += lay.SECTION_ALIGN

    def coding(self, at: int, head: lay.BlockHeader) -> Coding | None:
        """What the codec of the block at `at` needs. FormatError when that was in a lost index."""
        coding = self.codings.get(at)
        if coding is None and (head.dict_id or head.codec > ZSTD):
            raise FormatError("what decodes it was in the lost index")
        return coding

    def _learn(self, index: Index, place: Place) -> None:
        known: Dictionaries | None = None
        try:
            known = Dictionaries(index.extra, index.block_codec, self.header, place)
        except FormatError as error:
            self.notes.append(f"dictionaries of the index at byte {place.offset} are damaged: {error.what}")
        first = index.first_records().tolist()
        for block, offset in enumerate(index.block_offset.tolist()):
            part = slice(first[block], first[block + 1])
            counts = {name: column[part] for name, column in index.counts.items()}
            self.rows[offset] = Rows(index.lengths[part], index.hashes[part], index.flags[part], counts)
            if known is not None:
                tokens = int(index.lengths[part].sum(dtype=np.int64))
                self.codings[offset] = known.coding(block, tokens, self.schema.numpy_dtype)

    def _trailers(self) -> dict[int, lay.Trailer]:
        """Intact trailers by the offset of their index."""
        trailers: dict[int, lay.Trailer] = {}
        at = self.header.data_offset
        while (at := self.find(lay.TRAILER_MAGIC, at, lay.BLOCK_ALIGN)) < self.size:
            try:
                trailer = lay.parse_trailer(self.read(lay.TRAILER_SIZE, at), self.path, at)
                trailers[trailer.index_offset] = trailer
            except FormatError:
                pass
            at += lay.BLOCK_ALIGN
        return trailers

    def _index(self, at: int, trusted: dict[int, lay.Trailer]) -> tuple[Index | None, bool]:
        trailer = trusted.get(at)
        try:
            raw = self.read(self.size - at if trailer is None else trailer.index_len, at)
            index = parse_index(raw, self.path, at, [f.name for f in self.schema.counted])
        except (FormatError, MemoryError):
            self.notes.append(f"index at byte {at} is damaged")
            return None, False
        sure = trailer is not None and lay.xxh3(raw) == trailer.index_hash
        # Counts are bounded before they are multiplied: nothing has vouched for them yet.
        fits = all((index.counts[f.name] <= f.max_count()).all() for f in self.schema.counted)
        fits &= int(index.block_count.sum(dtype=np.int64)) == len(index.lengths)
        return (index if fits else None), sure
