"""Dictionaries of a file: zstd dictionaries and rank tables in the index (SPEC.md section 5.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from lf_format import _layout as lay
from lf_format._codecs import PACKED, RAW, REMAP_ZSTD, Coding, bits_of
from lf_format._errors import Place
from lf_format._index import EXTRA_COLUMNS

KIND_ZSTD, KIND_RANKS = 1, 2
DICTIONARY_NAMES = {KIND_ZSTD: "dictionary", KIND_RANKS: "rank table"}
MAX_DICTIONARIES = 131_070  # two for every bucket
MAX_DICTIONARY_BYTES = 1 << 24  # of a zstd dictionary; a rank table has the size of the vocabulary
MAX_ALL_BYTES = 1 << 28  # of all contents together: a small index must not unfold into any amount of memory
_LEVEL = 19  # a dictionary is compressed once and is small
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Dictionary:
    """One entry. `base` is the number of the rank table whose ranks a zstd dictionary expects, 0 = plain ids."""

    kind: int
    base: int
    content: bytes

    @cached_property
    def zstd(self) -> zstandard.ZstdCompressionDict:
        """For (de)compression; digested once."""
        return zstandard.ZstdCompressionDict(self.content)

    @cached_property
    def table(self) -> Array:
        """Of a rank table: the id of every rank, uint32[vocabulary]."""
        return np.frombuffer(self.content, "<u4")

    @cached_property
    def ranks(self) -> Array:
        """Of a rank table: the rank of every id, uint32[vocabulary]."""
        return rank_of(self.table)

    @cached_property
    def stored(self) -> bytes:
        """The zstd frame that the index holds."""
        return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(self.content)


def columns(dictionaries: Sequence[Dictionary], of_block: Sequence[int]) -> dict[str, Array]:
    """Index columns of `dictionaries` and of the number (0 = none) that each block uses; {} without any."""
    if not dictionaries:
        return {}
    return {
        "blk.dict": np.array(of_block, "<u4"),
        "dict.kind": np.array([d.kind for d in dictionaries], "u1"),
        "dict.base": np.array([d.base for d in dictionaries], "<u4"),
        "dict.length": np.array([len(d.stored) for d in dictionaries], "<u4"),
        "dict.bytes": np.frombuffer(b"".join(d.stored for d in dictionaries), "u1"),
    }


def features(block_codec: Array, dictionaries: Sequence[Dictionary]) -> int:
    """Incompat bits of a file with these codecs and dictionaries."""
    bits = lay.INCOMPAT_ZSTD_DICT if dictionaries else 0
    bits |= lay.INCOMPAT_PACKED if (block_codec == PACKED).any() else 0
    return bits | (lay.INCOMPAT_REMAP if (block_codec == REMAP_ZSTD).any() else 0)


class Dictionaries:
    """The dictionaries of an open file, checked.

    Args:
        extra: the optional index columns that the file has.
        block_codec: codec of every block, [blocks].
        header: of the file.
        place: of the index, for errors.

    Raises:
        FormatError: when columns, codecs and feature bits do not fit together.
    """

    def __init__(
        self, extra: Mapping[str, Array], block_codec: Array, header: lay.Header, place: Place
    ) -> None:
        self._bits, self._vocab = bits_of(header.vocab_size), header.vocab_size
        self.entries: list[Dictionary] = []
        self.of_block: Array = np.zeros(len(block_codec), np.uint32)
        if header.incompat & lay.INCOMPAT_ZSTD_DICT:
            self._parse(extra, place)
        needed = features(block_codec, self.entries)
        place.require(header.incompat == needed, "feature bits", 0, hex(needed), hex(header.incompat))
        place.require(not needed or header.profile == lay.PROFILE_LOONGBIN, "feature bits", 0, 0, hex(needed))
        self._check_blocks(block_codec, place)

    def _parse(self, extra: Mapping[str, Array], place: Place) -> None:
        missing = sorted(set(EXTRA_COLUMNS) - set(extra))
        place.require(not missing, "index columns of dictionaries", 0, sorted(EXTRA_COLUMNS), sorted(extra))
        kinds, bases, lengths = (extra[f"dict.{name}"].tolist() for name in ("kind", "base", "length"))
        same = len(kinds) == len(bases) == len(lengths) and 1 <= len(kinds) <= MAX_DICTIONARIES
        place.require(same, "number of dictionaries", 0, f"1..{MAX_DICTIONARIES}, equal rows", len(kinds))
        place.require(
            sum(lengths) == len(extra["dict.bytes"]), "bytes of dictionaries", 0, sum(lengths),
            len(extra["dict.bytes"]),
        )  # fmt: skip
        raw, at, room = extra["dict.bytes"].tobytes(), 0, MAX_ALL_BYTES
        for kind, base, length in zip(kinds, bases, lengths, strict=True):
            most = 4 * self._vocab if kind == KIND_RANKS else MAX_DICTIONARY_BYTES
            content = _content(raw[at : at + length], min(most, room), place)
            self.entries.append(Dictionary(kind, base, content))
            at, room = at + length, room - len(content)
        self.of_block = extra["blk.dict"]
        for number, entry in enumerate(self.entries, 1):
            self._check_entry(number, entry, kinds, place)

    def _check_entry(self, number: int, entry: Dictionary, kinds: list[int], place: Place) -> None:
        what, size = f"dictionary {number}", len(entry.content)
        place.require(entry.kind in (KIND_ZSTD, KIND_RANKS), f"{what}: kind", 0, "1 or 2", entry.kind)
        if entry.kind == KIND_ZSTD:
            place.require(8 <= size <= MAX_DICTIONARY_BYTES, f"{what}: bytes", 0, "8 .. 2^24", size)
            known = entry.base == 0 or (entry.base <= len(kinds) and kinds[entry.base - 1] == KIND_RANKS)
            place.require(known, f"{what}: rank table", 0, "0 or a rank table", entry.base)
            try:
                assert entry.zstd is not None
            except zstandard.ZstdError as error:
                place.require(False, f"{what}: {error}", 0, "a zstd dictionary", f"{size} bytes")
            return
        place.require(entry.base == 0, f"{what}: rank table", 0, 0, entry.base)
        place.require(size == 4 * self._vocab, f"{what}: bytes", 0, 4 * self._vocab, size)
        table = entry.table
        seen = np.zeros(self._vocab, bool)
        seen[table[table < self._vocab]] = True
        place.require(seen.all(), f"{what}: ids", 0, "every id once", int(seen.sum()))

    def _check_blocks(self, block_codec: Array, place: Place) -> None:
        plain = np.array([0, *(d.kind == KIND_ZSTD and d.base == 0 for d in self.entries)], bool)
        ranked = np.array([0, *(d.kind == KIND_RANKS or d.base > 0 for d in self.entries)], bool)
        number = self.of_block
        high = number > len(self.entries)
        number = np.where(high, 0, number)
        bad = high | np.where(block_codec == REMAP_ZSTD, ~ranked[number], (number > 0) & ~plain[number])
        bad |= ((block_codec == RAW) | (block_codec == PACKED)) & (self.of_block > 0)
        at = int(bad.argmax()) if bad.any() else 0
        found = int(self.of_block[at]) if bad.any() else 0
        place.require(not bad.any(), f"dictionary of block {at}", 0, "one that its codec uses", found)

    def coding(self, block: int, tokens: int, dtype: np.dtype[Any]) -> Coding:
        """What block `block` with `tokens` ids needs to be decoded."""
        return self.coding_of(int(self.of_block[block]), tokens, dtype)

    def coding_of(self, number: int, tokens: int, dtype: np.dtype[Any]) -> Coding:
        """The same for dictionary `number`, 0 = none."""
        entry = self.entries[number - 1] if number else None
        if entry is None:
            return Coding(self._bits, dtype, tokens)
        ranks = entry if entry.kind == KIND_RANKS else self.entries[entry.base - 1] if entry.base else None
        table = None if ranks is None else ranks.table
        return Coding(self._bits, dtype, tokens, entry.zstd if entry.kind == KIND_ZSTD else None, table)


def _content(frame: bytes, most: int, place: Place) -> bytes:
    """What a frame of the index holds, `most` bytes or less."""
    try:
        size = zstandard.frame_content_size(frame)
        place.require(0 <= size <= most, "size of a dictionary", 0, f"<= {most}", size)
        decoder = zstandard.ZstdDecompressor()
        return decoder.decompress(frame, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        place.require(False, f"dictionary does not decode: {error}", 0, "a zstd frame", f"{len(frame)} bytes")
        raise


def rank_table(counts: Array) -> Array:
    """Ids by falling count, ties by id: uint32[vocabulary]."""
    return np.argsort(-counts.astype(np.int64), kind="stable").astype("<u4")


def rank_of(table: Array) -> Array:
    """Rank of every id, the inverse of `table`: uint32[vocabulary]."""
    ranks = np.empty(len(table), "<u4")
    ranks[table] = np.arange(len(table), dtype="<u4")
    return ranks
