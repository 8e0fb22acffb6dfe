"""Block codecs: how the decoded payload of a block is stored (SPEC.md section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from lf_format._errors import FormatError, Place

RAW, ZSTD, PACKED, REMAP_ZSTD = 0, 1, 2, 3
CODEC_NAMES = {RAW: "raw", ZSTD: "zstd", PACKED: "packed", REMAP_ZSTD: "ranks and zstd"}
KNOWN_CODECS = tuple(CODEC_NAMES)
_CHUNK = 1 << 16  # ids packed at once, a multiple of 8: bounds the memory of one bit per byte
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Coding:
    """What codecs 2 and 3 and dictionaries need beyond the bytes of a block.

    Attributes:
        bits: bits of a packed id, ceil(log2 vocabulary), at least 1.
        dtype: of the ids in the decoded payload.
        tokens: ids in the block; they come first in the payload.
        dictionary: for zstd, None = none.
        table: id of every rank, shape [vocabulary], for codec 3.
        ranks: rank of every id, for encoding with codec 3.
    """

    bits: int
    dtype: np.dtype[Any]
    tokens: int = 0
    dictionary: zstandard.ZstdCompressionDict | None = None
    table: Array | None = None
    ranks: Array | None = None


def bits_of(vocab_size: int) -> int:
    """Bits that hold every id below `vocab_size`."""
    return max((vocab_size - 1).bit_length(), 1)


def encode(payload: bytes, codec: int, level: int, coding: Coding | None = None) -> tuple[int, bytes]:
    """(codec used, stored bytes). A payload that the codec does not shrink stays raw."""
    if codec in (ZSTD, REMAP_ZSTD):
        source = payload if codec == ZSTD or coding is None else _replaced(payload, coding, coding.ranks)
        packed = _compressed(source, level, None if coding is None else coding.dictionary)
    elif codec == PACKED and coding is not None:
        plane = coding.tokens * coding.dtype.itemsize
        ids = np.frombuffer(payload, coding.dtype, coding.tokens)
        packed = pack_ids(ids, coding.bits) + payload[-(-plane // 64) * 64 :]
    else:
        return RAW, payload
    return (codec, packed) if len(packed) < len(payload) else (RAW, payload)


def _compressed(source: bytes, level: int, dictionary: zstandard.ZstdCompressionDict | None) -> bytes:
    if dictionary is None:
        return zstandard.ZstdCompressor(level=level, write_checksum=False).compress(source)
    # The parameters that zstd takes for a dictionary by itself made blocks of ids larger than without one. Those of
    # the block's size, with tables that hold an entry for every byte of the dictionary, made them 2 - 3 % smaller.
    base = zstandard.ZstdCompressionParameters.from_level(level, source_size=len(source))
    tables = min(len(dictionary).bit_length(), 22)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level,
        source_size=len(source),
        window_log=max(base.window_log, (len(source) + len(dictionary)).bit_length()),
        hash_log=max(base.hash_log, tables),
        chain_log=max(base.chain_log, tables),
        write_checksum=False,
        write_dict_id=False,
    )
    return zstandard.ZstdCompressor(dict_data=dictionary, compression_params=parameters).compress(source)


def decode(
    stored: bytes, codec: int, raw_len: int, path: str, offset: int, coding: Coding | None = None
) -> bytes:
    """Decoded payload of exactly `raw_len` bytes; FormatError otherwise. `offset` is for the message."""
    if codec == RAW:
        return stored
    place = Place(path, offset)
    if codec == ZSTD:
        return _decompressed(stored, raw_len, place, None if coding is None else coding.dictionary)
    if coding is None:
        raise FormatError("block needs the index to decode", path=path, offset=offset)
    if codec == PACKED:
        return _unpacked(stored, raw_len, place, coding)
    payload = _decompressed(stored, raw_len, place, coding.dictionary)
    ranks = np.frombuffer(payload, coding.dtype, coding.tokens)
    most = 0 if coding.table is None else len(coding.table)
    largest = int(ranks.max())
    place.require(largest < most, "rank in the block", 0, f"< {most}", largest)
    return _replaced(payload, coding, coding.table)


def _replaced(payload: bytes, coding: Coding, table: Array | None) -> bytes:
    """The payload with every id exchanged for its entry in `table`."""
    assert table is not None
    ids = np.frombuffer(payload, coding.dtype, coding.tokens)
    plane: bytes = table[ids].astype(coding.dtype).tobytes()
    return plane + payload[ids.nbytes :]


def _decompressed(
    stored: bytes, raw_len: int, place: Place, dictionary: zstandard.ZstdCompressionDict | None
) -> bytes:
    try:
        # The frame states its size; it is compared before a hostile one can make us allocate.
        size = zstandard.frame_content_size(stored)
        place.require(size == raw_len, "decoded size of the block", 0, raw_len, size)
        decoder = zstandard.ZstdDecompressor(dict_data=dictionary)
        payload: bytes = decoder.decompress(stored, max_output_size=raw_len, allow_extra_data=False)
        return payload
    except (zstandard.ZstdError, MemoryError) as error:
        raise FormatError(f"block does not decode: {error}", path=place.path, offset=place.offset) from None


def pack_ids(ids: Array, bits: int) -> bytes:
    """`ids` (unsigned, shape [n]) in `bits` bits each, lowest bit first; spare bits of the last byte are zero."""
    parts = []
    for at in range(0, len(ids), _CHUNK):
        chunk = np.ascontiguousarray(ids[at : at + _CHUNK])
        wide = np.unpackbits(chunk.view(np.uint8).reshape(len(chunk), -1), axis=1, bitorder="little")
        parts.append(np.packbits(wide[:, :bits], bitorder="little").tobytes())
    return b"".join(parts)


def unpack_ids(packed: bytes | memoryview, count: int, bits: int, dtype: np.dtype[Any]) -> Array:
    """The inverse of `pack_ids`: `count` ids of `dtype`. `packed` has exactly ceil(count * bits / 8) bytes."""
    out = np.empty(count, dtype)
    step = _CHUNK * bits // 8
    for k, at in enumerate(range(0, count, _CHUNK)):
        n = min(_CHUNK, count - at)
        raw = np.frombuffer(packed, np.uint8)[k * step : (k + 1) * step]
        wide = np.zeros((n, dtype.itemsize * 8), np.uint8)
        wide[:, :bits] = np.unpackbits(raw, count=n * bits, bitorder="little").reshape(n, bits)
        out[at : at + n] = np.packbits(wide, axis=1, bitorder="little").reshape(-1).view(dtype)
    return out


def _unpacked(stored: bytes, raw_len: int, place: Place, coding: Coding) -> bytes:
    packed = -(-coding.tokens * coding.bits // 8)
    plane = coding.tokens * coding.dtype.itemsize
    rest = -(-plane // 64) * 64 if raw_len > plane else plane
    expected = packed + raw_len - rest
    place.require(len(stored) == expected, "stored length of packed ids", 0, expected, len(stored))
    spare = coding.tokens * coding.bits % 8
    place.require(not spare or not stored[packed - 1] >> spare, "spare bits of packed ids", packed - 1, 0, 1)
    ids = unpack_ids(memoryview(stored)[:packed], coding.tokens, coding.bits, coding.dtype)
    return ids.tobytes() + bytes(rest - plane) + stored[packed:]
