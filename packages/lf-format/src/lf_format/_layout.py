"""Fixed structures of the container, byte by byte, little-endian (SPEC.md sections 2, 4, 5 and 6)."""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from lf_format._errors import FormatError, Place

HEADER_MAGIC = b"\x89LFB\r\n\x1a\n"  # PNG's trick: high bit, CR LF, ^Z and LF catch text-mode transfers
TRAILER_MAGIC = b"\x89LFT\r\n\x1a\n"
BLOCK_MAGIC = b"LFBK"
INDEX_MAGIC = b"LFIX"
MAJOR, MINOR = 1, 0
PROFILE_LOONGBIN, PROFILE_LFG = 1, 2

SECTION_ALIGN = 4096  # O_DIRECT and registered buffers want page-aligned sections
BLOCK_ALIGN = 64  # one cache line; 4 KiB per block would cost 8 % on compressed 25 KiB blocks
HEADER_SIZE = 4096
BLOCK_HEADER_SIZE = 64
INDEX_HEADER_SIZE = 64
COLUMN_ENTRY_SIZE = 64
TRAILER_SIZE = 128
IDENTITY = slice(56, 480)  # the header bytes that are part of the data set fingerprint

MAX_SCHEMA_BYTES = 1 << 20
MAX_COLUMNS = 256
MAX_BLOCK_BYTES = 1 << 30
MAX_RECORD_TOKENS = 1 << 28
MAX_VOCAB = 1 << 32

INCOMPAT_ZSTD_DICT, INCOMPAT_PACKED, INCOMPAT_REMAP = 1, 2, 4
INCOMPAT_BLOBS = 8  # a reserved name, not in 1.0
KNOWN_INCOMPAT = INCOMPAT_ZSTD_DICT | INCOMPAT_PACKED | INCOMPAT_REMAP
KNOWN_RO_COMPAT = 0

_HEADER = struct.Struct("<8sHHIQQQ16sQQQQQII256s120s128s")
_HEADER_CHECK_AT = HEADER_SIZE - 8
_BLOCK = struct.Struct("<4sHBBIIQQQQQ")
_INDEX = struct.Struct("<4sIQQQ")
_COLUMN = struct.Struct("<24sIIQQQQ")
_TRAILER = struct.Struct("<8sQQQQQQQQQ")
_TRAILER_CHECK_AT = TRAILER_SIZE - 8
_U64 = struct.Struct("<Q")


def align(value: int, to: int) -> int:
    """Smallest multiple of `to` that is >= value."""
    return -(-value // to) * to


def xxh3(data: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """xxh3_64 of `data` as an unsigned integer."""
    return xxhash.xxh3_64_intdigest(data, seed)


class Header(NamedTuple):
    """The first 4 KiB; never rewritten once the file has its final name."""

    uuid: bytes
    vocab_size: int
    schema_offset: int
    schema_len: int
    schema_hash: int
    data_offset: int
    tokenizer_name: str
    tokenizer_hash: str
    creator: str
    profile: int = PROFILE_LOONGBIN
    compat: int = 0
    ro_compat: int = 0
    incompat: int = 0
    major: int = MAJOR
    minor: int = MINOR

    def pack(self) -> bytes:
        """The 4096 bytes, checksum included. FormatError when a name does not fit."""
        names = [
            _fixed(text, size, label)
            for text, size, label in (
                (self.tokenizer_name, 256, "tokenizer name"),
                (self.tokenizer_hash, 120, "tokenizer hash"),
                (self.creator, 128, "creator"),
            )
        ]
        body = _HEADER.pack(
            HEADER_MAGIC,
            self.major,
            self.minor,
            HEADER_SIZE,
            self.compat,
            self.ro_compat,
            self.incompat,
            self.uuid,
            self.vocab_size,
            self.schema_offset,
            self.schema_len,
            self.schema_hash,
            self.data_offset,
            self.profile,
            0,
            *names,
        ).ljust(_HEADER_CHECK_AT, b"\0")
        return body + _U64.pack(xxh3(body))


def _fixed(text: str, size: int, label: str) -> bytes:
    raw = text.encode("utf-8")
    if len(raw) > size or b"\0" in raw:
        raise FormatError(
            f"{label} must be NUL-free and fit the header", expected=f"<= {size} bytes", found=len(raw)
        )
    return raw.ljust(size, b"\0")


def _text(raw: bytes, at: int, path: str) -> str:
    try:
        return raw.rstrip(b"\0").decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError("header text is not UTF-8", path=path, offset=at + error.start) from None


def _check_sum(raw: bytes, at: int, what: str, place: Place) -> None:
    expected, found = _U64.unpack_from(raw, at)[0], xxh3(raw[:at])
    place.require(expected == found, f"{what} checksum", at, hex(expected), hex(found))


def parse_header(raw: bytes, path: str) -> Header:
    """Header from the first 4 KiB of a file; FormatError naming what is wrong."""
    place = Place(path)
    place.require(len(raw) >= HEADER_SIZE, "file is too short for a header", 0, HEADER_SIZE, len(raw))
    place.require(raw[:8] == HEADER_MAGIC, "not a .loongbin or .lfg file", 0, HEADER_MAGIC, raw[:8])
    _check_sum(raw, _HEADER_CHECK_AT, "header", place)
    (
        _,
        major,
        minor,
        size,
        compat,
        ro_compat,
        incompat,
        uuid,
        *numbers,
        profile,
        _,
        name,
        digest,
        creator,
    ) = _HEADER.unpack_from(raw)
    texts = _text(name, 104, path), _text(digest, 360, path), _text(creator, 480, path)
    header = Header(*(uuid, *numbers, *texts, profile, compat, ro_compat, incompat, major, minor))
    place.require(size == HEADER_SIZE, "header length", 12, HEADER_SIZE, size)
    _check_header(header, place)
    return header


def _check_header(header: Header, place: Place) -> None:
    require, vocab, length = place.require, header.vocab_size, header.schema_len
    unknown = header.incompat & ~KNOWN_INCOMPAT
    require(header.major == MAJOR, "unsupported format version", 8, MAJOR, header.major)
    require(not unknown, "file needs features this version does not have", 32, 0, hex(unknown))
    require(1 <= vocab <= MAX_VOCAB, "vocabulary size", 56, f"1..{MAX_VOCAB}", vocab)
    require(header.schema_offset == HEADER_SIZE, "schema offset", 64, HEADER_SIZE, header.schema_offset)
    require(2 <= length <= MAX_SCHEMA_BYTES, "schema length", 72, f"2..{MAX_SCHEMA_BYTES}", length)
    data = align(HEADER_SIZE + length, SECTION_ALIGN)
    require(header.data_offset == data, "data offset", 88, data, header.data_offset)
    known = (PROFILE_LOONGBIN, PROFILE_LFG)
    require(header.profile in known, "unsupported profile", 96, "1 or 2", header.profile)


class BlockHeader(NamedTuple):
    """64 bytes in front of every block payload."""

    bucket: int
    codec: int
    dict_id: int
    n_records: int
    first_record: int
    raw_len: int
    stored_len: int
    payload_hash: int

    def pack(self) -> bytes:
        """The 64 bytes, checksum included."""
        body = _BLOCK.pack(
            BLOCK_MAGIC, self.bucket, self.codec, 0, self.dict_id, self.n_records,
            self.first_record, self.raw_len, self.stored_len, self.payload_hash, 0,
        )  # fmt: skip
        return body + _U64.pack(xxh3(body))


def parse_block_header(raw: bytes, path: str, offset: int) -> BlockHeader:
    """Block header at file `offset`; FormatError when magic or checksum do not hold."""
    place = Place(path, offset)
    whole = len(raw) == BLOCK_HEADER_SIZE and raw[:4] == BLOCK_MAGIC
    place.require(whole, "block header", 0, BLOCK_MAGIC, raw[:4])
    _check_sum(raw, _BLOCK.size, "block header", place)
    _, bucket, codec, _, *numbers, _ = _BLOCK.unpack_from(raw)
    return BlockHeader(bucket, codec, *numbers)


class IndexHeader(NamedTuple):
    """First 64 bytes of an index."""

    n_columns: int
    n_records: int
    n_blocks: int
    n_tokens: int

    def pack(self) -> bytes:
        """The 64 bytes."""
        return _INDEX.pack(INDEX_MAGIC, *self).ljust(INDEX_HEADER_SIZE, b"\0")


class ColumnEntry(NamedTuple):
    """Directory entry of one index column; `offset` counts from the start of the index."""

    name: str
    dtype_code: int
    codec: int
    rows: int
    offset: int
    stored_len: int

    def pack(self) -> bytes:
        """The 64 bytes."""
        return _COLUMN.pack(_fixed(self.name, 24, "column name"), *self[1:], 0)


def parse_index_header(raw: bytes, path: str, offset: int) -> tuple[IndexHeader, list[ColumnEntry]]:
    """Index header and column directory; FormatError when they do not fit into `raw`."""
    place = Place(path, offset)
    whole = len(raw) >= INDEX_HEADER_SIZE and raw[:4] == INDEX_MAGIC
    place.require(whole, "index header", 0, INDEX_MAGIC, raw[:4])
    header = IndexHeader(*_INDEX.unpack_from(raw)[1:])
    most = min(MAX_COLUMNS, (len(raw) - INDEX_HEADER_SIZE) // COLUMN_ENTRY_SIZE)
    place.require(header.n_columns <= most, "index column count", 4, f"<= {most}", header.n_columns)
    return header, [_parse_column(raw, i, path, offset) for i in range(header.n_columns)]


def _parse_column(raw: bytes, i: int, path: str, index_offset: int) -> ColumnEntry:
    at = INDEX_HEADER_SIZE + i * COLUMN_ENTRY_SIZE
    name, *rest, _ = _COLUMN.unpack_from(raw, at)
    return ColumnEntry(_text(name, index_offset + at, path), *rest)


class Trailer(NamedTuple):
    """Last 128 bytes of the file: where the index is, and the totals."""

    index_offset: int
    index_len: int
    index_hash: int
    n_records: int
    n_tokens: int
    n_blocks: int
    trailer_offset: int
    prev_trailer: int
    root_hash: int

    def pack(self) -> bytes:
        """The 128 bytes, checksum included."""
        body = _TRAILER.pack(TRAILER_MAGIC, *self).ljust(_TRAILER_CHECK_AT, b"\0")
        return body + _U64.pack(xxh3(body))


def parse_trailer(raw: bytes, path: str, offset: int) -> Trailer:
    """Trailer whose first byte lies at file `offset`; FormatError when it is not one, or not in its place."""
    place = Place(path, offset)
    whole = len(raw) == TRAILER_SIZE and raw[:8] == TRAILER_MAGIC
    place.require(whole, "no trailer: the file is truncated or unfinished", 0, TRAILER_MAGIC, raw[:8])
    _check_sum(raw, _TRAILER_CHECK_AT, "trailer", place)
    trailer = Trailer(*_TRAILER.unpack_from(raw)[1:])
    start, end = trailer.index_offset, trailer.index_offset + trailer.index_len
    place.require(start % SECTION_ALIGN == 0, "index alignment", 8, f"a multiple of {SECTION_ALIGN}", start)
    place.require(align(end, BLOCK_ALIGN) == offset, "end of the index", 16, f"at the trailer, {offset}", end)
    own, previous = trailer.trailer_offset, trailer.prev_trailer
    place.require(own == offset, "trailer offset", 56, offset, own)
    before = previous == 0 or previous + TRAILER_SIZE <= start
    place.require(before, "previous trailer offset", 64, f"0 or <= {start - TRAILER_SIZE}", previous)
    return trailer


def root_hash(header_raw: bytes, block_hashes: bytes, index_hash: int) -> int:
    """Data set fingerprint: identity part of the header, every block hash (u64 each), the index hash."""
    return xxh3(header_raw[IDENTITY] + block_hashes + _U64.pack(index_hash))
