"""Byte planes with zstd, the part that codecs 1 to 4 and 6 share. Pure; integers only, so it is exact.

Numbers of a trained tensor differ in their low mantissa bits as noise does, while sign and exponent repeat. Planes
therefore store byte 0 of all numbers, then byte 1 and so on, each plane zstd-compressed or raw.
"""

from __future__ import annotations

import struct
import threading
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

Bytes: TypeAlias = npt.NDArray[np.uint8]
Numbers: TypeAlias = npt.NDArray[Any]  # unsigned little-endian integers of 1, 2, 4 or 8 bytes

NUMBER: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}

# How a plane is stored. The exponents of weights have skewed frequencies and no repeats: looking for matches of 7 bytes
# in a table of 64 entries leaves the work to the entropy coder (ENTROPY). Against level 1 a float32 exponent plane
# shrinks to 0.32, not 0.35, in a third of the time. Blocks of 16 KiB (the window) follow the scales of rows. Level 1
# (MATCHES) wins on text, counters and rows that repeat.
STORED, ENTROPY, MATCHES = 0, 1, 2
_PARAMETERS: Final = {
    ENTROPY: zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, window_log=14, chain_log=6, hash_log=6, search_log=1, min_match=7,
        target_length=0, write_content_size=True,
    ),
    MATCHES: zstandard.ZstdCompressionParameters.from_level(1, write_content_size=True),
}  # fmt: skip
_PLANE_PAYS: Final = 0.98  # a plane that shrinks less costs more time than it saves
_TURN_SAMPLE: Final = 1 << 16  # numbers
_MATCHES_PAY: Final = 0.985  # of the size by entropy alone: searching is three times as dear
_ZSTD_BIT: Final = 1 << 31


class CodecError(ValueError):
    """Stored bytes that do not decode; the reader turns it into CorruptError with the place."""


class Layout(NamedTuple):
    """How numbers become planes: bits that each is rotated left by first, and how each plane is then stored."""

    turn: int
    ways: tuple[int, ...]


class Planned(NamedTuple):
    """A layout, and the payload's size on the sample that it was chosen on."""

    layout: Layout
    size: int


_local = threading.local()


def numbers(raw: Bytes, width: int) -> Numbers:
    """`raw`, (n * width,) contiguous, as (n,) little-endian unsigned integers; shares its memory."""
    view: Numbers = raw.view(NUMBER[width])
    return view


def rotated(values: Numbers, turn: int) -> Numbers:
    """Each number rotated left by `turn` bits, a copy unless that is 0.

    A rotation by one bit puts the exponent of a float32 or bfloat16 into one byte. In general planes shrink most when
    no byte is half noise and half not, and how many bits of a difference are noise is another matter in every tensor.
    """
    if turn == 0:
        return values
    bits = values.itemsize * 8
    turned: Numbers = (values << values.dtype.type(turn)) | (values >> values.dtype.type(bits - turn))
    return turned


def compress(data: memoryview, way: int) -> bytes:
    """A zstd frame that declares its size and has no checksum. One context per thread: they are not thread-safe."""
    contexts: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("contexts", {})
    if way not in contexts:
        contexts[way] = zstandard.ZstdCompressor(compression_params=_PARAMETERS[way])
    return contexts[way].compress(data)


def planes_of(values: Numbers) -> Bytes:
    """(width, n) copy: row k is byte k of every number, least significant first."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T)


def plan_planes(values: Numbers) -> Planned:
    """The best layout for a sample: the turn by the entropy of its planes, the ways by measuring."""
    turn = _best_turn(values)
    ways, total = [], 4 + 4 * values.itemsize
    for plane in planes_of(rotated(values, turn)):
        sizes = {way: len(compress(plane.data, way)) for way in (ENTROPY, MATCHES)}
        way = MATCHES if sizes[MATCHES] < _MATCHES_PAY * sizes[ENTROPY] else ENTROPY
        if sizes[way] >= _PLANE_PAYS * plane.size:
            way = STORED
        ways.append(way)
        total += sizes.get(way, plane.size)
    return Planned(Layout(turn, tuple(ways)), total)


def _best_turn(values: Numbers) -> int:
    """The rotation, by less than a byte, after which planes are smallest; single bytes stay as they are."""
    if values.itemsize == 1:
        return 0
    begin = max(0, (values.size - _TURN_SAMPLE) // 2)
    part = values[begin : begin + _TURN_SAMPLE]
    return min(range(8), key=lambda turn: _entropy_size(planes_of(rotated(part, turn))))


def _entropy_size(planes: Bytes) -> int:
    return sum(min(len(compress(plane.data, ENTROPY)), plane.size) for plane in planes)


def pack_planes(values: Numbers, layout: Layout) -> bytes:
    """Payload of `values`, (n,): a little-endian u32 turn; a u32 word per plane, its stored length with bit 31 set when
    it is a zstd frame; then the planes, least significant byte first."""
    stored: list[bytes] = []
    lengths: list[int] = []
    for plane, way in zip(planes_of(rotated(values, layout.turn)), layout.ways, strict=True):
        packed = compress(plane.data, way) if way else None
        use = packed if packed is not None and len(packed) < plane.size else None
        stored.append(plane.tobytes() if use is None else use)
        lengths.append(len(stored[-1]) | (0 if use is None else _ZSTD_BIT))
    return struct.pack(f"<{1 + values.itemsize}I", layout.turn, *lengths) + b"".join(stored)


def unpack_planes(stored: memoryview, out: Numbers) -> None:
    """Inverse of `pack_planes` into `out`, (n,); CodecError on bytes it cannot have written."""
    width, count = out.itemsize, out.size
    if len(stored) < 4 + 4 * width:
        raise CodecError("planes payload is too short")
    turn, *words = struct.unpack_from(f"<{1 + width}I", stored)
    if turn >= 8 * width:
        raise CodecError(f"numbers of {8 * width} bits rotated by {turn}")
    target = out.view(np.uint8).reshape(count, width)
    at = 4 + 4 * width
    for k, word in enumerate(words):
        piece, at = section(stored, at, word)
        plane = np.frombuffer(plain(piece, word, count), np.uint8)
        if plane.size != count:
            raise CodecError(f"plane {k} has {plane.size} bytes, not {count}")
        target[:, k] = plane
    if at != len(stored):
        raise CodecError("bytes after the last plane")
    if turn:
        out[:] = rotated(out, 8 * width - turn)


def pack_section(data: Bytes, way: int) -> tuple[int, bytes]:
    """(word, bytes): the stored form of plain bytes and the u32 that describes it as in `pack_planes`."""
    packed = compress(data.data, way)
    return (len(packed) | _ZSTD_BIT, packed) if len(packed) < data.size else (data.size, data.tobytes())


def section(stored: memoryview, at: int, word: int) -> tuple[memoryview, int]:
    """The part of a payload that begins at `at` and that `word` describes, and where it ends."""
    end = at + (word & ~_ZSTD_BIT)
    if end > len(stored):
        raise CodecError(f"a section runs to {end}, past the extent")
    return stored[at:end], end


def plain(piece: memoryview, word: int, limit: int) -> memoryview | bytes:
    """The decompressed section, at most `limit` bytes; the declared size is checked before anything is allocated."""
    if not word & _ZSTD_BIT:
        return piece
    try:
        size = zstandard.frame_content_size(piece)
        if not 0 <= size <= limit:
            raise CodecError(f"zstd frame declares another size, {size} where {limit} at most belong")
        data = zstandard.ZstdDecompressor().decompress(piece, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(str(error)) from error
    if len(data) != size:
        raise CodecError("zstd frame holds another size")
    return data
