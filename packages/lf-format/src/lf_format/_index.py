"""The columnar index: one row per record, one row per block (SPEC.md section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format import _layout as lay
from lf_format._codecs import KNOWN_CODECS, RAW
from lf_format._errors import FormatError
from lf_format._fields import Field
from lf_format._schema import Schema

_DTYPES = {1: np.dtype("u1"), 2: np.dtype("<u2"), 3: np.dtype("<u4"), 4: np.dtype("<u8")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# column name in the file -> attribute, dtype
_COLUMNS = {
    "rec.length": ("lengths", "<u4"),
    "rec.hash": ("hashes", "<u4"),
    "rec.flags": ("flags", "u1"),
    "blk.offset": ("block_offset", "<u8"),
    "blk.count": ("block_count", "<u4"),
    "blk.bucket": ("block_bucket", "<u2"),
    "blk.codec": ("block_codec", "u1"),
    "blk.raw_len": ("block_raw", "<u8"),
    "blk.stored_len": ("block_stored", "<u8"),
    "blk.hash": ("block_hash", "<u8"),
    "blk.max_id": ("block_max_id", "<u4"),
}
# of dictionaries (section 5.5); the number of rows of "dict." columns is their own
EXTRA_COLUMNS = {
    "blk.dict": "<u4",
    "dict.kind": "u1",
    "dict.base": "<u4",
    "dict.length": "<u4",
    "dict.bytes": "u1",
}
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Index:
    """Columns as read-only arrays: lengths, hashes, flags and each of `counts` are [records], others [blocks].

    `counts` has the first axis of every ragged field of a .lfg by field name (columns `len.NAME`); `extra` the
    columns of dictionaries that the file has, by column name.
    """

    lengths: Array
    hashes: Array
    flags: Array
    block_offset: Array
    block_count: Array
    block_bucket: Array
    block_codec: Array
    block_raw: Array
    block_stored: Array
    block_hash: Array
    block_max_id: Array
    counts: Mapping[str, Array] = field(default_factory=dict, kw_only=True)
    extra: Mapping[str, Array] = field(default_factory=dict, kw_only=True)

    def pack(self) -> bytes:
        """Bytes of the index, unaligned at its end."""
        columns = {
            name: np.ascontiguousarray(getattr(self, attr), dtype) for name, (attr, dtype) in _COLUMNS.items()
        }
        for name, counts in self.counts.items():
            columns[f"len.{name}"] = np.ascontiguousarray(counts, "<u4")
        columns |= self.extra
        head = lay.IndexHeader(
            len(columns), len(self.lengths), len(self.block_count), int(self.lengths.sum(dtype=np.int64))
        )
        at = lay.INDEX_HEADER_SIZE + lay.COLUMN_ENTRY_SIZE * len(columns)
        directory, parts = [head.pack()], []
        for name, column in columns.items():
            directory.append(
                lay.ColumnEntry(name, _CODES[column.dtype], 0, len(column), at, column.nbytes).pack()
            )
            padded = lay.align(column.nbytes, lay.BLOCK_ALIGN)
            parts.append(column.tobytes().ljust(padded, b"\0"))
            at += padded
        return b"".join(directory + parts)

    def counts_of(self, schema: Schema) -> list[Array]:
        """Steps of the first axis of every field, in schema order; the token count where it has no own column."""
        return [self.counts.get(f.name, self.lengths) for f in schema.fields]

    def first_records(self) -> npt.NDArray[np.int64]:
        """Record id at which each block starts, int64[blocks + 1]."""
        return cumulative(self.block_count)


def cumulative(values: Array) -> npt.NDArray[np.int64]:
    """[0, v0, v0 + v1, ...] in int64 whatever the dtype of `values`."""
    out = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, dtype=np.int64, out=out[1:])
    return out


def parse_index(raw: bytes, path: str, offset: int, ragged: Sequence[str] = ()) -> Index:
    """Index from its bytes (hash already checked); FormatError when a column is missing or does not fit.

    Args:
        ragged: names of the fields that have a column `len.NAME`.
    """
    header, directory = lay.parse_index_header(raw, path, offset)
    sizes = {"rec": header.n_records, "blk": header.n_blocks}
    found = {entry.name: entry for entry in directory}

    def column(name: str, dtype: str, rows: int) -> Array:
        entry = found.get(name)
        if entry is None:
            raise FormatError(
                "index column is missing", path=path, offset=offset, expected=name, found=sorted(found)
            )
        return _column(raw, entry, np.dtype(dtype), rows, path, offset)

    columns = {attr: column(name, dtype, sizes[name[:3]]) for name, (attr, dtype) in _COLUMNS.items()}
    counts = {name: column(f"len.{name}", "<u4", header.n_records) for name in ragged}
    extra = {
        name: column(name, dtype, header.n_blocks if name == "blk.dict" else found[name].rows)
        for name, dtype in EXTRA_COLUMNS.items()
        if name in found
    }
    index = Index(**columns, counts=counts, extra=extra)
    total = int(index.lengths.sum(dtype=np.int64))
    if total != header.n_tokens:
        raise FormatError(
            "token count of the index", path=path, offset=offset + 24, expected=header.n_tokens, found=total
        )
    return index


def _column(
    raw: bytes, entry: lay.ColumnEntry, dtype: np.dtype[Any], count: int, path: str, offset: int
) -> Array:
    expected = (_CODES[dtype], 0, count, count * dtype.itemsize)
    found = (entry.dtype_code, entry.codec, entry.rows, entry.stored_len)
    if expected != found or entry.offset + entry.stored_len > len(raw):
        raise FormatError(
            f"index column {entry.name}: dtype code, codec, rows, bytes",
            path=path, offset=offset + min(entry.offset, len(raw)), expected=expected, found=found,
        )  # fmt: skip
    column = np.frombuffer(raw, dtype, count, entry.offset)
    column.flags.writeable = False
    return column


@dataclass(frozen=True)
class PlaneMap:
    """Where one field lies.

    Attributes:
        within: bytes of this field before record i, over the whole file, int64[records + 1].
        plane: start of this field's plane in the payload of block b, int64[blocks].
    """

    within: npt.NDArray[np.int64]
    plane: npt.NDArray[np.int64]


def plane_maps(
    schema_fields: tuple[Field, ...], counts: Sequence[Array], first: Array
) -> tuple[list[PlaneMap], Array]:
    """Planes of every field, and the decoded bytes of each block.

    Args:
        schema_fields: in payload order.
        counts: steps of the first axis of every field, [records] each (Index.counts_of).
        first: record id at which each block starts, int64[blocks + 1].

    Returns:
        One PlaneMap per field, and int64[blocks] decoded payload lengths.
    """
    end = np.zeros(len(first) - 1, np.int64)
    maps = []
    for item, steps in zip(schema_fields, counts, strict=True):
        within = cumulative(item.nbytes(steps))
        plane = -(-end // lay.BLOCK_ALIGN) * lay.BLOCK_ALIGN
        end = plane + within[first[1:]] - within[first[:-1]]
        maps.append(PlaneMap(within, plane))
    return maps, end


def check_index(index: Index, schema: Schema, vocab_size: int, space: tuple[int, int], path: str) -> None:
    """Every statement of SPEC.md section 5.3 about the columns; FormatError for the first that does not hold.

    Args:
        space: file range [start, end) in which blocks may lie.
    """
    first = index.first_records()
    if first[-1] != len(index.lengths):
        raise FormatError(
            "records of all blocks",
            path=path,
            offset=space[1],
            expected=len(index.lengths),
            found=int(first[-1]),
        )
    _check_blocks(index, schema, vocab_size, space, path)
    _check_records(index, schema, first, path, space[1])


def _refuse(bad: Array, what: str, expected: object, found: Array, path: str, offset: int, unit: str) -> None:
    if bad.any():
        at = int(bad.argmax())
        record = at if unit == "record" else None
        where = f"{what} of block {at}" if unit == "block" else what
        value = int(found[at])
        expected = int(expected[at]) if isinstance(expected, np.ndarray) else expected
        raise FormatError(where, path=path, offset=offset, expected=expected, found=value, record=record)


def _check_blocks(index: Index, schema: Schema, vocab_size: int, space: tuple[int, int], path: str) -> None:
    start, end = space
    limit = np.uint64(end)
    offset, stored, raw = index.block_offset, index.block_stored, index.block_raw
    room = np.append(offset[1:], limit)[: len(offset)]
    known = np.isin(index.block_codec, KNOWN_CODECS)
    is_raw = index.block_codec == RAW
    # Sizes are bounded first so that the sums below cannot wrap.
    for bad, what, expected, found in (
        (raw > lay.MAX_BLOCK_BYTES, "decoded length", f"<= {lay.MAX_BLOCK_BYTES}", raw),
        (stored > raw, "stored length", raw, stored),
        (
            (offset < start) | (offset > limit) | (offset % lay.BLOCK_ALIGN != 0),
            "offset",
            f"64-aligned in {space}",
            offset,
        ),
        (offset + stored + np.uint64(lay.BLOCK_HEADER_SIZE) > room, "end", room, offset + stored),
        (index.block_count == 0, "record count", ">= 1", index.block_count),
        (index.block_bucket >= len(schema.buckets), "bucket", f"< {len(schema.buckets)}", index.block_bucket),
        (~known, "codec", KNOWN_CODECS, index.block_codec),
        (is_raw & (stored != raw), "stored length", raw, stored),
        (index.block_max_id >= vocab_size, "largest id", f"< {vocab_size}", index.block_max_id),
    ):
        _refuse(bad, what, expected, found, path, end, "block")


def _check_records(index: Index, schema: Schema, first: Array, path: str, offset: int) -> None:
    edges = np.array((0, *schema.buckets), np.int64)
    bucket = np.repeat(index.block_bucket.astype(np.int64), index.block_count)
    low, high = edges[bucket] + 1, edges[bucket + 1]
    _refuse(
        index.lengths < low, "record is too short for its bucket", low, index.lengths, path, offset, "record"
    )
    _refuse(
        index.lengths > high, "record is too long for its bucket", high, index.lengths, path, offset, "record"
    )
    _refuse(index.flags > 3, "record flags", "<= 3", index.flags, path, offset, "record")
    for item in schema.counted:  # bounded before they are summed: a hostile count must not wrap the sums
        steps, most = index.counts[item.name], item.max_count()
        _refuse(steps > most, f"size of {item.name}", f"<= {most}", steps, path, offset, "record")
    fixed = schema.tokens
    if fixed is None or not fixed.ragged:
        want = 1 if fixed is None else fixed.shape[0]
        _refuse(index.lengths != want, "record length", want, index.lengths, path, offset, "record")
    _, raw = plane_maps(schema.fields, index.counts_of(schema), first)
    _refuse(
        index.block_raw != raw.astype(np.uint64),
        "decoded length",
        raw,
        index.block_raw,
        path,
        offset,
        "block",
    )
