"""The safetensors header: 8 bytes of length, JSON, then the data. Pure; the rules are those of safetensors' parser.

A parser here returns a value or raises `CorruptError`: no overlap, no hole, no trailing byte, at most 100 MB of header.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..dtypes import ITEM_SIZE
from ..errors import CorruptError, UnsupportedError

HEADER_LIMIT: Final = 100_000_000
_LENGTH: Final = struct.Struct("<Q")
# safetensors 0.8 has no names for these.
_NOT_THEIRS: Final = frozenset({"C32", "C128"})


class SafeTensor(NamedTuple):
    """A tensor of a file: bytes `begin .. end` after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafeHeader(NamedTuple):
    """Tensors in the order of their bytes, and the free text of `__metadata__`."""

    tensors: tuple[SafeTensor, ...]
    metadata: dict[str, str]


def header_bytes(first: bytes, file_bytes: int, path: str) -> int:
    """Length of the JSON, from the first 8 bytes of a file."""
    if len(first) != _LENGTH.size:
        raise CorruptError(path, "too short for a safetensors file", found=file_bytes)
    (length,) = _LENGTH.unpack(first)
    if length > min(HEADER_LIMIT, file_bytes - _LENGTH.size):
        limit = min(HEADER_LIMIT, file_bytes - _LENGTH.size)
        raise CorruptError(
            path, "safetensors header is too long", offset=0, expected=f"<= {limit}", found=length
        )
    return int(length)


def parse_header(text: bytes, data_bytes: int, path: str) -> SafeHeader:
    """Check the JSON of a file that has `data_bytes` bytes after it. UnsupportedError for element types we lack."""
    try:
        if not text.startswith(b"{"):
            raise ValueError("it does not begin with {")
        document = json.loads(text.decode("utf-8"), object_pairs_hook=_no_twins, parse_constant=_no_constant)
        metadata = document.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError("__metadata__ is not text by name")
        tensors = sorted((_tensor(n, v, path) for n, v in document.items()), key=lambda t: (t.begin, t.end))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(path, f"safetensors header: {type(error).__name__} {error}") from error
    at = 0
    for tensor in tensors:
        if tensor.begin != at:
            raise CorruptError(
                path, "tensors overlap or leave a hole", tensor=tensor.name, expected=at, found=tensor.begin
            )
        at = tensor.end
    if at != data_bytes:
        raise CorruptError(path, "file length differs", expected=at, found=data_bytes)
    return SafeHeader(tuple(tensors), metadata)


def pack_header(tensors: Sequence[SafeTensor], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON, padded with spaces so that the data begins at a multiple of 8."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for t in tensors:
        document[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.begin, t.end]}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise UnsupportedError(
            f"the names take {len(text)} bytes, a safetensors header {HEADER_LIMIT} at most"
        )
    return _LENGTH.pack(len(text)) + text


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[SafeTensor]:
    """Places for (name, dtype, shape): wide elements first, so that all are aligned. UnsupportedError by name."""
    placed, at = [], 0
    for name, dtype, shape in sorted(tensors, key=lambda t: (-ITEM_SIZE[t[1]], t[0])):
        if dtype in _NOT_THEIRS:
            raise UnsupportedError(f"{name}: safetensors has no {dtype}; leave it out (only=) or convert it")
        if name == "__metadata__":
            raise UnsupportedError("a tensor cannot be called __metadata__ in safetensors")
        if not _is_text(name):
            raise UnsupportedError(f"{name!r}: no Unicode text, which names in safetensors are")
        size = math.prod(shape) * ITEM_SIZE[dtype]
        placed.append(SafeTensor(name, dtype, shape, at, at + size))
        at += size
    return placed


def _tensor(name: str, value: Any, path: str) -> SafeTensor:
    if set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name[:40]!r}: keys {sorted(value)[:4]}")
    dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    counts = [*shape, begin, end]
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63 for n in counts):
        raise ValueError(f"{name[:40]!r}: a count is not a whole number in range")
    if not isinstance(dtype, str) or dtype in _NOT_THEIRS:
        raise ValueError(f"{name[:40]!r}: dtype {dtype!r}")
    if dtype not in ITEM_SIZE:
        raise UnsupportedError(f"{path}: {name}: element type {dtype[:20]!r} is not known to lf-ckpt")
    if math.prod(shape) * ITEM_SIZE[dtype] != end - begin:
        raise ValueError(f"{name[:40]!r}: {end - begin} bytes for {dtype}{shape}")
    if math.prod(max(n, 1) for n in shape) >= 1 << 63:
        raise ValueError(f"{name[:40]!r}: no tensor can have the shape {shape}")
    return SafeTensor(name, dtype, tuple(shape), begin, end)


def _is_text(name: str) -> bool:
    """Whether UTF-8 can write it: lone surrogates have no bytes."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key is there twice")
    return document


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
