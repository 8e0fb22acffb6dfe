"""Megatron indexed data sets: NAME.idx (pointers) beside NAME.bin (token ids)."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import InputError

Array = npt.NDArray[Any]
_MAGIC = b"MMIDIDX\0\0"
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats: not token ids


@dataclass(frozen=True)
class MegatronIndex:
    """Where the sequences lie in the .bin, and where documents start.

    Attributes:
        dtype: of the ids.
        lengths: ids of each sequence, int64[n].
        offsets: byte offset of each sequence, int64[n].
        documents: first sequence of each document, then n: int64[documents + 1], not falling.
    """

    dtype: np.dtype[Any]
    lengths: Array
    offsets: Array
    documents: Array


def megatron_index(path: Path) -> MegatronIndex:
    """Index from `path` (.idx), every pointer checked against the size of the .bin; InputError otherwise."""
    raw = path.read_bytes()
    if len(raw) < _HEAD.size or raw[:9] != _MAGIC:
        raise InputError("not a Megatron index", path=path, offset=0, expected=_MAGIC, found=raw[:9])
    _, version, code, n, boundaries = _HEAD.unpack_from(raw)
    if version != 1 or code not in _DTYPES:
        raise InputError(
            "Megatron index version and dtype",
            path=path,
            offset=9,
            expected=(1, sorted(_DTYPES)),
            found=(version, code),
        )
    size = _HEAD.size + 12 * n + 8 * boundaries
    if size not in (len(raw), len(raw) - n):  # one mode byte a sequence may follow
        raise InputError("size of the index", path=path, expected=size, found=len(raw))
    lengths = np.frombuffer(raw, "<i4", n, _HEAD.size).astype(np.int64)
    offsets = np.frombuffer(raw, "<i8", n, _HEAD.size + 4 * n)
    documents = np.frombuffer(raw, "<i8", boundaries, _HEAD.size + 12 * n)
    index = MegatronIndex(np.dtype(_DTYPES[code]), lengths, offsets, documents)
    _check(index, path)
    return index


def _check(index: MegatronIndex, path: Path) -> None:
    lengths, offsets, documents = index.lengths, index.offsets, index.documents
    total = _bin(path).stat().st_size if _bin(path).is_file() else -1
    if total < 0:
        raise InputError("no .bin beside the .idx", path=path, expected=_bin(path))
    width = index.dtype.itemsize
    bad = (
        (lengths < 0)
        | (offsets < 0)
        | (offsets % width != 0)
        | (offsets > total)
        | (lengths > (total - offsets) // width)
    )
    if bad.any():
        at = int(bad.argmax())
        raise InputError(
            f"sequence {at} lies outside the .bin", path=path, expected=f"ids of {width} within {total} bytes",
            found=(int(offsets[at]), int(lengths[at])),
        )  # fmt: skip
    whole = len(documents) >= 1 and documents[0] == 0 and documents[-1] == len(lengths)
    if not whole or (np.diff(documents) < 0).any():
        raise InputError(
            "document boundaries",
            path=path,
            expected=f"from 0 up to {len(lengths)}",
            found=documents[:5].tolist(),
        )


def _bin(path: Path) -> Path:
    return path.with_suffix(".bin")


def megatron_documents(path: Path) -> Iterator[tuple[str, Array]]:
    """(name, ids) of every document, its sequences joined. Raises InputError as `megatron_index`."""
    index = megatron_index(path)
    with _bin(path).open("rb") as file:
        for number, (a, b) in enumerate(zip(index.documents[:-1], index.documents[1:], strict=True)):
            parts = [_sequence(file.fileno(), index, k, path) for k in range(a, b)]
            yield f"{path}:{number}", np.concatenate(parts) if parts else np.zeros(0, index.dtype)


def _sequence(fd: int, index: MegatronIndex, k: int, path: Path) -> Array:
    size = int(index.lengths[k]) * index.dtype.itemsize
    raw = os.pread(fd, size, int(index.offsets[k]))
    if len(raw) != size:
        raise InputError(f"sequence {k} is cut", path=_bin(path), expected=size, found=len(raw))
    return np.frombuffer(raw, index.dtype)


def megatron_largest_id(path: Path) -> int:
    """Largest id of the set, -1 when there is none; InputError for a negative one."""
    largest = -1
    for name, ids in megatron_documents(path):
        if len(ids):
            if int(ids.min()) < 0:
                raise InputError(
                    "token id outside the vocabulary", document=name, expected=">= 0", found=int(ids.min())
                )
            largest = max(largest, int(ids.max()))
    return largest
