"""Extent codecs: raw bytes to stored bytes and back. Pure; the arithmetic is integer only, so it is exact.

Numbers of a trained tensor differ in their low mantissa bytes as noise does, while sign and exponent bytes repeat.
Codec PLANES therefore stores byte 0 of all elements, then byte 1 and so on, each plane zstd-compressed or raw.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

Bytes = npt.NDArray[np.uint8]

# The exponents of weights have skewed frequencies and no repeats: looking for matches of 7 bytes in a table of 64
# entries leaves the work to the entropy coder. Against level 1 a float32 exponent plane shrinks to 0.34, not 0.39, in a
# third of the time.
_PARAMETERS: Final = {
    "planes": zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, window_log=17, chain_log=6, hash_log=6, search_log=1, min_match=7,
        target_length=0, write_content_size=True,
    ),
    "bytes": zstandard.ZstdCompressionParameters.from_level(1, write_content_size=True),
}  # fmt: skip
SAMPLE_EVERY: Final = 16
_PLANE_PAYS: Final = 0.90  # a plane that shrinks less costs more time than it saves
_EXTENT_PAYS: Final = 0.95
_ZSTD_BIT: Final = 1 << 31


class CodecError(ValueError):
    """Stored bytes that do not decode; the reader turns it into CorruptError with the place."""


_local = threading.local()


def _compressor(width: int) -> zstandard.ZstdCompressor:
    """One per thread and kind of data: contexts are not thread-safe. Frames declare their size and have no checksum."""
    name = "bytes" if width == 1 else "planes"
    if not hasattr(_local, name):
        setattr(_local, name, zstandard.ZstdCompressor(compression_params=_PARAMETERS[name]))
    compressor: zstandard.ZstdCompressor = getattr(_local, name)
    return compressor


def _planes(raw: Bytes, width: int) -> Bytes:
    """(width, n) copy: row k is byte k of every element."""
    return np.ascontiguousarray(raw.reshape(-1, width).T)


def plane_mask(raw: Bytes, width: int) -> int:
    """Which planes of this extent are worth zstd: bit k for plane k; 0 when the whole does not pay."""
    planes = _planes(raw, width)
    sizes = [len(_compressor(width).compress(plane.data)) for plane in planes]
    pays = [size < _PLANE_PAYS * planes.shape[1] for size in sizes]
    saved = sum(planes.shape[1] - size for size, good in zip(sizes, pays, strict=True) if good)
    if saved < (1 - _EXTENT_PAYS) * raw.size:
        return 0
    return sum(1 << k for k, good in enumerate(pays) if good)


def encode_planes(raw: Bytes, width: int, mask: int) -> bytes | None:
    """Payload of codec PLANES, or None when it would not be smaller than `raw`.

    raw: (n * width,) uint8. Layout: `width` little-endian u32, each the stored length of a plane with bit 31 set when
    the plane is zstd; then the planes, least significant byte first.
    """
    if not mask:
        return None
    stored: list[bytes] = []
    lengths: list[int] = []
    for k, plane in enumerate(_planes(raw, width)):
        packed = _compressor(width).compress(plane.data) if mask >> k & 1 else None
        use = packed if packed is not None and len(packed) < plane.size else None
        stored.append(plane.tobytes() if use is None else use)
        lengths.append(len(stored[-1]) | (0 if use is None else _ZSTD_BIT))
    payload = struct.pack(f"<{width}I", *lengths) + b"".join(stored)
    return payload if len(payload) < raw.size else None


def decode_planes(stored: memoryview, out: Bytes, width: int) -> None:
    """Inverse of `encode_planes` into `out`, (n * width,) uint8; CodecError on bytes it cannot have written."""
    if len(stored) < 4 * width or out.size % width:
        raise CodecError("planes payload is too short")
    lengths = struct.unpack_from(f"<{width}I", stored)
    count = out.size // width
    target = out.reshape(count, width)
    at = 4 * width
    for k, word in enumerate(lengths):
        size = word & ~_ZSTD_BIT
        piece = stored[at : at + size]
        if len(piece) != size:
            raise CodecError(f"plane {k} runs past the extent")
        target[:, k] = np.frombuffer(_unzstd(piece, count) if word & _ZSTD_BIT else piece, np.uint8, -1)[
            :count
        ]
        if not word & _ZSTD_BIT and size != count:
            raise CodecError(f"plane {k} has {size} bytes, not {count}")
        at += size
    if at != len(stored):
        raise CodecError("bytes after the last plane")


def _unzstd(piece: memoryview, count: int) -> bytes:
    """Decompress to exactly `count` bytes; the declared size is checked before anything is allocated."""
    try:
        if zstandard.frame_content_size(piece) != count:
            raise CodecError("zstd frame declares another size")
        data = zstandard.ZstdDecompressor().decompress(piece, max_output_size=count, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(str(error)) from error
    if len(data) != count:
        raise CodecError("zstd frame holds another size")
    return data


@dataclass
class PlaneChooser:
    """Chooses the planes of one stream: measured on every 16th extent, used for the 15 that follow.

    mode: "auto" samples, "raw" never compresses, "zstd" tries zstd on every plane.
    """

    width: int
    mode: str
    _seen: int = field(default=0, init=False)
    _mask: int = field(default=0, init=False)

    def mask(self, raw: Bytes) -> int:
        """Mask for the next extent of the stream."""
        if self.mode == "raw":
            return 0
        if self.mode == "zstd":
            return (1 << self.width) - 1
        if self._seen % SAMPLE_EVERY == 0:
            self._mask = plane_mask(raw, self.width)
        self._seen += 1
        return self._mask
