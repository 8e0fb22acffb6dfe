"""Opening a file: the checks that come before the first record is read."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from lf_format import _layout as lay
from lf_format._dictionary import Dictionaries
from lf_format._errors import FormatError, Place
from lf_format._index import Index, check_index, parse_index
from lf_format._schema import Schema, parse_schema


@dataclass(frozen=True)
class Opened:
    """The checked metadata of a file."""

    header: lay.Header
    schema: Schema
    trailer: lay.Trailer
    index: Index
    dictionaries: Dictionaries


def read_exact(fd: int, size: int, offset: int, path: str) -> bytes:
    """`size` bytes at `offset`; FormatError when the file ends before. Callers bound `size` by the file."""
    parts = []
    at, end = offset, offset + size
    while at < end:
        part = os.pread(fd, end - at, at)
        if not part:
            raise FormatError(
                "file ends too early", path=path, offset=at, expected=f"{end - at} bytes", found=0
            )
        parts.append(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def load(fd: int, path: str) -> Opened:
    """Reads and checks header, schema, trailer and index. FormatError naming offset, expected and found."""
    size, place = os.fstat(fd).st_size, Place(path)
    raw = read_exact(fd, min(size, lay.HEADER_SIZE), 0, path)
    header = lay.parse_header(raw, path)
    at = size - lay.TRAILER_SIZE
    place.require(at >= header.data_offset, "file is truncated", size, f"> {header.data_offset} bytes", size)
    trailer = lay.parse_trailer(read_exact(fd, lay.TRAILER_SIZE, at, path), path, at)
    schema_raw = _hashed(fd, header.schema_offset, header.schema_len, header.schema_hash, "schema", path)
    schema = parse_schema(schema_raw, header.vocab_size, path, header.schema_offset, header.profile)
    start, data = trailer.index_offset, header.data_offset
    place.require(start >= data, "index offset", at + 8, f">= {data}", start)
    index_raw = _hashed(fd, start, trailer.index_len, trailer.index_hash, "index", path)
    index = parse_index(index_raw, path, start, [f.name for f in schema.counted])
    _check_totals(raw, trailer, index, path)
    check_index(index, schema, header.vocab_size, (data, start), path)
    dictionaries = Dictionaries(index.extra, index.block_codec, header, Place(path, start))
    return Opened(header, schema, trailer, index, dictionaries)


def _hashed(fd: int, offset: int, length: int, digest: int, what: str, path: str) -> bytes:
    """Bytes that lie inside the file (the caller checked the trailer's position against its length)."""
    try:
        raw = read_exact(fd, length, offset, path)
    except MemoryError:
        raise FormatError(
            f"{what} does not fit into memory", path=path, offset=offset, found=length
        ) from None
    found = lay.xxh3(raw)
    Place(path, offset).require(found == digest, f"{what} hash", 0, hex(digest), hex(found))
    return raw


def _check_totals(header_raw: bytes, trailer: lay.Trailer, index: Index, path: str) -> None:
    place = Place(path, trailer.trailer_offset)
    root = lay.root_hash(header_raw, index.block_hash.tobytes(), trailer.index_hash)
    for what, at, expected, found in (
        ("record count", 32, trailer.n_records, len(index.lengths)),
        ("token count", 40, trailer.n_tokens, int(index.lengths.sum(dtype=np.int64))),
        ("block count", 48, trailer.n_blocks, len(index.block_count)),
        ("root hash", 72, hex(trailer.root_hash), hex(root)),
    ):
        place.require(expected == found, what, at, expected, found)
