"""The `.lfckpt` container: header, extents, index, trailer. Pure functions over bytes; SPEC.md is the same in words.

A parser here returns a value or raises `CorruptError`; it allocates no more than a constant times its input.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

from .errors import CorruptError

ALIGN: Final = 4096  # block size of the file systems and of O_DIRECT in practice
EXTENT_BYTES: Final = 1 << 20  # raw bytes of an extent at most
VERSION: Final = (1, 0)
HEADER_BYTES: Final = 4096
TRAILER_BYTES: Final = 128
RECORD_BYTES: Final = 64

RAW: Final = 0
PLANES: Final = 1
XOR: Final = 2
SUB: Final = 3
CHANGED: Final = 4
SAME: Final = 5
DIRTY: Final = 6
CODEC_NAMES: Final = {
    RAW: "raw", PLANES: "planes+zstd", XOR: "xor+planes+zstd", SUB: "difference+planes+zstd",
    CHANGED: "changed-elements", SAME: "same-as-parent", DIRTY: "dirty-units",
}  # fmt: skip
DELTAS: Final = frozenset({XOR, SUB, CHANGED, DIRTY})  # stored bytes that decode only with those of the base

# The first byte is not ASCII and the line ends would be damaged by a text-mode transfer, as in PNG.
_MAGIC: Final = b"\x89LFC\r\n\x1a\n"
END_MAGIC: Final = b"\x89LFCEND\n"
_HEADER: Final = struct.Struct("<8sHHIIIIIQII16s16s")
_TRAILER: Final = struct.Struct("<8sQQQQ16s32s32s")
_RECORD: Final = struct.Struct("<IBBHQIIQ16s16s")
_SUM: Final = struct.Struct("<Q")
_NO_PARENT: Final = bytes(32)


class Header(NamedTuple):
    """What a data file says about itself at its start."""

    step: int
    rank: int
    world: int
    store: bytes  # 16 bytes, id of the store
    writer: bytes  # 16 bytes, id of this save


class Extent(NamedTuple):
    """One index record. `place` is a file offset, or the number of the extent in the parent for codec SAME."""

    stream: int
    codec: int
    width: int
    start: int
    raw_bytes: int
    stored_bytes: int
    place: int
    raw_hash: bytes
    stored_hash: bytes


class Trailer(NamedTuple):
    """The last 128 bytes: where the index is, its hash, and the root hash of the parent's manifest if any."""

    index_offset: int
    index_bytes: int
    extents: int
    file_bytes: int
    index_hash: bytes
    parent_root: bytes | None


def hash128(data: bytes | memoryview) -> bytes:
    """xxh3-128 in its canonical (big-endian) form, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def align(count: int) -> int:
    """`count` rounded up to a multiple of 4096."""
    return -(-count // ALIGN) * ALIGN


def pack_header(header: Header) -> bytes:
    """4096 bytes."""
    fixed = _HEADER.pack(
        _MAGIC, *VERSION, HEADER_BYTES, 0, 0, ALIGN, EXTENT_BYTES, header.step, header.rank, header.world,
        header.store, header.writer,
    )  # fmt: skip
    return _summed(fixed.ljust(HEADER_BYTES - _SUM.size, b"\0"))


def parse_header(data: bytes, path: str) -> Header:
    """Check magic, checksum, version and feature bits of the first 4096 bytes of `path`."""
    if len(data) != HEADER_BYTES or data[:8] != _MAGIC:
        raise CorruptError(path, "not an .lfckpt file", offset=0, expected=_MAGIC.hex(), found=data[:8].hex())
    _check_sum(data, path, 0, "header")
    fields = _HEADER.unpack_from(data)
    _, major, _, size, incompat, _, alignment, extent, step, rank, world, store, writer = fields
    if major != VERSION[0] or incompat:
        wanted, found = f"{VERSION[0]}, features 0", f"{major}, features {incompat:#x}"
        raise CorruptError(path, "written by a newer lf-ckpt", offset=8, expected=wanted, found=found)
    if (size, alignment, extent) != (HEADER_BYTES, ALIGN, EXTENT_BYTES) or rank >= world:
        raise CorruptError(path, "header fields contradict the version", offset=12)
    return Header(step, rank, world, store, writer)


def pack_trailer(trailer: Trailer) -> bytes:
    """128 bytes."""
    fixed = _TRAILER.pack(END_MAGIC, *trailer[:5], trailer.parent_root or _NO_PARENT, b"")
    return _summed(fixed.ljust(TRAILER_BYTES - _SUM.size, b"\0"))


def parse_trailer(data: bytes, file_bytes: int, path: str) -> Trailer:
    """Check the last 128 bytes of `path` against its length."""
    at = file_bytes - TRAILER_BYTES
    if len(data) != TRAILER_BYTES or data[:8] != END_MAGIC:
        raise CorruptError(path, "no trailer; the file is cut or unfinished", offset=max(at, 0))
    _check_sum(data, path, at, "trailer")
    _, index_offset, index_bytes, extents, size, index_hash, parent, _ = _TRAILER.unpack_from(data)
    if size != file_bytes:
        raise CorruptError(path, "file length differs", expected=size, found=file_bytes)
    ends = index_offset + index_bytes
    if (
        index_bytes != extents * RECORD_BYTES
        or ends != at
        or index_offset < HEADER_BYTES
        or index_offset % ALIGN
    ):
        raise CorruptError(path, "trailer fields contradict the file length", offset=at)
    return Trailer(
        index_offset, index_bytes, extents, size, index_hash, None if parent == _NO_PARENT else parent
    )


def pack_index(extents: Sequence[Extent]) -> bytes:
    """64 bytes per extent."""
    return b"".join(_RECORD.pack(*extent[:3], 0, *extent[3:]) for extent in extents)


def parse_index(data: bytes, trailer: Trailer, path: str) -> list[Extent]:
    """Check the index against its hash and every record against its neighbours and the file."""
    if hash128(data) != trailer.index_hash:
        found = hash128(data).hex()
        raise CorruptError(
            path,
            "index hash differs",
            offset=trailer.index_offset,
            expected=trailer.index_hash.hex(),
            found=found,
        )
    extents = []
    stream, start, place = 0, 0, HEADER_BYTES
    for number, (head, codec, width, reserved, *rest) in enumerate(_RECORD.iter_unpack(data)):
        extent = Extent(head, codec, width, *rest)
        if extent.stream > stream:
            stream, start = extent.stream, 0
        problem = _record_problem(extent, reserved, stream, start, place, trailer)
        if problem:
            at = trailer.index_offset + number * RECORD_BYTES
            raise CorruptError(path, problem, extent=number, offset=at)
        start += extent.raw_bytes
        if extent.codec != SAME:
            place = align(extent.place + extent.stored_bytes)
        extents.append(extent)
    if place != trailer.index_offset:
        raise CorruptError(path, "extents do not end where the index begins", offset=place)
    return extents


def _record_problem(
    e: Extent, reserved: int, stream: int, start: int, place: int, trailer: Trailer
) -> str | None:
    """What is wrong with a record that must be `start` bytes into `stream` and at `place` in the file."""
    if e.codec not in CODEC_NAMES or reserved:
        return f"unknown codec {e.codec}"
    if e.stream != stream or e.start != start:
        return "extents of a stream are not consecutive"
    if not 0 < e.raw_bytes <= EXTENT_BYTES or e.width not in (1, 2, 4, 8) or e.raw_bytes % e.width:
        return "extent length is out of range"
    if e.codec == SAME:
        return None if trailer.parent_root and e.stored_bytes == 0 else "a reference without a parent"
    if e.codec in DELTAS and not trailer.parent_root:
        return "a delta without a parent"
    if (
        e.place != place
        or not 0 < e.stored_bytes <= e.raw_bytes
        or place + e.stored_bytes > trailer.index_offset
    ):
        return "extent lies outside its place in the file"
    if e.codec == RAW and (e.stored_bytes != e.raw_bytes or e.stored_hash != e.raw_hash):
        return "raw extent with two lengths or hashes"
    return None


def _summed(body: bytes) -> bytes:
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def _check_sum(data: bytes, path: str, offset: int, what: str) -> None:
    expected = _SUM.unpack_from(data, len(data) - _SUM.size)[0]
    found = xxhash.xxh3_64_intdigest(data[: -_SUM.size])
    if expected != found:
        raise CorruptError(
            path,
            f"{what} checksum differs",
            offset=offset,
            expected=f"{expected:016x}",
            found=f"{found:016x}",
        )
