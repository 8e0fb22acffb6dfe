"""Codecs of an extent against the same extent of the base. Pure; integers only, so decoding gives the exact bytes.

A weight that moved a little keeps its sign, exponent and upper mantissa. Its bits, read as a whole number in the order
of the floats, differ from the parent's by a small number whose upper bytes are zero; where few elements changed at
all, their places and differences are far less than a byte per element.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from .codec import (
    ENTROPY,
    MATCHES,
    NUMBER,
    Bytes,
    CodecError,
    Layout,
    Numbers,
    numbers,
    pack_planes,
    pack_section,
    plain,
    section,
    unpack_planes,
)
from .format import CHANGED, DIRTY, PLANES, SUB, XOR

UNIT_BYTES: Final = 4096  # dirty unit of codec 6
_UNITS: Final = 256  # units of the largest extent
_BITMAP_BYTES: Final = _UNITS // 8
_LONG_GAP: Final = 255  # gap byte that skips 255 elements and ends at none
_SIGNED: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("<i1"),
    2: np.dtype("<i2"),
    4: np.dtype("<i4"),
    8: np.dtype("<i8"),
}


def difference(values: Numbers, parent: Numbers) -> Numbers:
    """Distance from `parent` in float order, mod 2^w, zig-zag coded (0, -1, 1, -2 ... become 0, 1, 2, 3)."""
    width = values.itemsize
    delta = _ordered(values) - _ordered(parent)
    sign = delta >> (8 * width - 1)
    delta <<= 1
    delta ^= sign
    distance: Numbers = delta.view(NUMBER[width])
    return distance


def undo_difference(distance: Numbers, parent: Numbers) -> Numbers:
    """The values at `distance` from `parent`."""
    width, one = distance.itemsize, distance.dtype.type(1)
    delta = ((distance >> one) ^ -(distance & one)).view(_SIGNED[width])
    delta += _ordered(parent)
    values: Numbers = _ordered(delta.view(NUMBER[width])).view(NUMBER[width])
    return values


def _ordered(values: Numbers) -> npt.NDArray[Any]:
    """Sign and magnitude to two's complement: whole numbers in the order of the floats. Its own inverse."""
    width = values.itemsize
    bits: npt.NDArray[Any] = values.view(_SIGNED[width])
    flip = (bits >> (8 * width - 1)) & bits.dtype.type((1 << (8 * width - 1)) - 1)
    ordered: npt.NDArray[Any] = bits ^ flip
    return ordered


def encode(codec: int, layout: Layout, raw: Bytes, width: int, parent: Bytes | None) -> bytes | None:
    """Payload of an extent; None where CHANGED or DIRTY find no difference. raw, parent: (n * width,) uint8; `parent`
    is needed by all codecs but PLANES."""
    values = numbers(raw, width)
    if codec == PLANES:
        return pack_planes(values, layout)
    assert parent is not None
    assert parent.size == raw.size
    before = numbers(parent, width)
    if codec == XOR:
        return pack_planes(values ^ before, layout)
    if codec == SUB:
        return pack_planes(difference(values, before), layout)
    if codec == CHANGED:
        return _encode_changed(values, before, layout)
    return encode_dirty(raw, width, dirty_units(raw, parent), layout)


def decode(codec: int, stored: memoryview, out: Bytes, width: int, parent: Bytes | None) -> None:
    """Inverse of `encode` into `out`, (n * width,) uint8 contiguous; CodecError on bytes it cannot have written."""
    if out.size % width:
        raise CodecError("length is no multiple of the width")
    values = numbers(out, width)
    if codec == PLANES:
        unpack_planes(stored, values)
        return
    if parent is None or parent.size != out.size:
        raise CodecError("a delta without its parent")
    before = numbers(parent, width)
    if codec == XOR:
        unpack_planes(stored, values)
        values ^= before
    elif codec == SUB:
        unpack_planes(stored, values)
        values[:] = undo_difference(values, before)
    elif codec == CHANGED:
        _decode_changed(stored, values, before)
    elif codec == DIRTY:
        _decode_dirty(stored, out, width, parent)
    else:
        raise CodecError(f"unknown codec {codec}")


def _encode_changed(values: Numbers, parent: Numbers, layout: Layout) -> bytes | None:
    """u32 number of changed elements; u32 word of the gaps; the gaps; the differences as planes."""
    at = np.flatnonzero(values != parent)
    if not at.size:
        return None
    gaps = gap_bytes(at)
    word, packed = pack_section(gaps, MATCHES if at.size * 2 < gaps.size else ENTROPY)
    rest = pack_planes(difference(values[at], parent[at]), layout)
    return struct.pack("<2I", at.size, word) + packed + rest


def gap_bytes(at: npt.NDArray[np.intp]) -> Bytes:
    """Places, ascending, as bytes: g < 255 skips g elements and marks the one after them, 255 only skips 255.

    At a share p of changed elements their entropy coded size is within a few per cent of the limit from p = 0.5 down,
    where a bitmap cannot go below one bit in eight elements.
    """
    gaps = np.diff(at, prepend=-1) - 1
    ends = np.cumsum(gaps // _LONG_GAP + 1)
    out = np.full(int(ends[-1]) if ends.size else 0, _LONG_GAP, np.uint8)
    out[ends - 1] = gaps % _LONG_GAP
    return out


def places(gaps: Bytes, count: int, limit: int) -> npt.NDArray[np.intp]:
    """Inverse of `gap_bytes`: exactly `count` places, all below `limit`."""
    marks = gaps != _LONG_GAP
    ends = np.cumsum(gaps.astype(np.intp) + marks)
    if not gaps.size or not marks[-1] or ends[-1] > limit or np.count_nonzero(marks) != count:
        raise CodecError("places of changed elements do not fit the extent")
    at: npt.NDArray[np.intp] = ends[marks] - 1
    return at


def _decode_changed(stored: memoryview, out: Numbers, parent: Numbers) -> None:
    if len(stored) < 8:
        raise CodecError("changed-elements payload is too short")
    count, word = struct.unpack_from("<2I", stored)
    if not 0 < count <= out.size:
        raise CodecError(f"{count} of {out.size} elements changed")
    piece, end = section(stored, 8, word)
    gaps = np.frombuffer(plain(piece, word, count + out.size // _LONG_GAP), np.uint8)
    at = places(gaps, count, out.size)
    distance = np.empty(count, out.dtype)
    unpack_planes(stored[end:], distance)
    out[:] = parent
    out[at] = undo_difference(distance, parent[at])


def unit_hashes(raw: Bytes) -> npt.NDArray[np.uint64]:
    """xxh3-64 of each 4 KiB unit, the last one may be shorter."""
    data = raw.data
    sums = [xxhash.xxh3_64_intdigest(data[at : at + UNIT_BYTES]) for at in range(0, raw.size, UNIT_BYTES)]
    return np.array(sums, np.uint64)


def dirty_units(raw: Bytes, parent: Bytes) -> npt.NDArray[np.bool_]:
    """Which 4 KiB units differ."""
    whole = raw.size // UNIT_BYTES * UNIT_BYTES
    view, before = raw[:whole].reshape(-1, UNIT_BYTES), parent[:whole].reshape(-1, UNIT_BYTES)
    dirty: npt.NDArray[np.bool_] = (view != before).any(1)
    if whole < raw.size:
        dirty = np.append(dirty, (raw[whole:] != parent[whole:]).any())
    return dirty


def encode_dirty(raw: Bytes, width: int, dirty: npt.NDArray[np.bool_], layout: Layout) -> bytes | None:
    """256 bits, bit i % 8 of byte i // 8 for unit i; then the dirty units as planes. None if there is none."""
    if not dirty.any():
        return None
    bitmap = np.packbits(dirty, bitorder="little").tobytes().ljust(_BITMAP_BYTES, b"\0")
    units = raw[np.repeat(dirty, UNIT_BYTES)[: raw.size]]
    return bitmap + pack_planes(numbers(units, width), layout)


def _decode_dirty(stored: memoryview, out: Bytes, width: int, parent: Bytes) -> None:
    if len(stored) < _BITMAP_BYTES:
        raise CodecError("dirty-units payload is too short")
    dirty = np.unpackbits(np.frombuffer(stored, np.uint8, _BITMAP_BYTES), bitorder="little").view(np.bool_)
    count = -(-out.size // UNIT_BYTES)
    if dirty[count:].any() or not dirty.any():
        raise CodecError("dirty units do not fit the extent")
    inside = np.repeat(dirty[:count], UNIT_BYTES)[: out.size]
    units = np.empty(int(np.count_nonzero(inside)) // width, NUMBER[width])
    unpack_planes(stored[_BITMAP_BYTES:], units)
    out[:] = parent
    out[inside] = units.view(np.uint8)
