"""Block codecs: how the decoded payload of a block is stored."""

from __future__ import annotations

import zstandard

from lf_format._errors import FormatError

RAW, ZSTD, BITPACK, REMAP_ZSTD = 0, 1, 2, 3  # 2 and 3 are reserved, not in 1.0
CODEC_NAMES = {RAW: "raw", ZSTD: "zstd"}
CODEC_IDS = {name: code for code, name in CODEC_NAMES.items()}


def encode(payload: bytes, codec: int, level: int) -> tuple[int, bytes]:
    """(codec used, stored bytes). A payload that zstd does not shrink stays raw."""
    if codec == ZSTD:
        packed = zstandard.ZstdCompressor(level=level, write_checksum=False).compress(payload)
        if len(packed) < len(payload):
            return ZSTD, packed
    return RAW, payload


def decode(stored: bytes, codec: int, raw_len: int, path: str, offset: int) -> bytes:
    """Decoded payload of exactly `raw_len` bytes; FormatError otherwise. `offset` is for the message."""
    if codec == RAW:
        return stored
    try:
        # The frame states its size; it is compared before a hostile one can make us allocate.
        size = zstandard.frame_content_size(stored)
        if size != raw_len:
            raise FormatError(
                "decoded size of the block", path=path, offset=offset, expected=raw_len, found=size
            )
        decoder = zstandard.ZstdDecompressor()
        return decoder.decompress(stored, max_output_size=raw_len, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise FormatError(f"block does not decode: {error}", path=path, offset=offset) from None
