"""Weights of a compiled model in one file (``weights.lfw``), the same bytes for every target.

Little-endian. Weights are packed for a machine's kernels when a model is opened, so nothing here depends on it.

    0   8 bytes  magic "LFHALW1\\0"
    8   u64      bytes of the index
    16  u64      offset of the payload, a multiple of 4096
    24  u64      bytes of the payload, a multiple of 64
    32  u64      s1: sum of the payload's 64-bit words, modulo 2**64
    40  u64      s2: sum of word i times i + 1, modulo 2**64
    48  u64, u64 s1 and s2 of bytes 0 to 31 and of 64 to the payload, taken as one
    64  index: JSON [{"name", "dtype", "shape", "offset", "nbytes", "sha256"}, ...], then zeros

Offsets of blobs count from the payload and are multiples of 64; a blob's hash covers it and the zeros up to the
next multiple of 64. s1 and s2 are what the C of a compiled program checks; they find accidents, and any one changed
byte. :func:`open_weights` checks the hashes as well and names the blob.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_hal.direct import ReadReport, check_strategy, read_file
from lf_hal.errors import ArtifactError, HalError
from lf_hal.lir.graph import TensorType

__all__ = ["NUMPY_DTYPES", "Blob", "WeightsFile", "head_digest", "open_weights", "write_weights"]

MAGIC = b"LFHALW1\0"
HEAD = struct.Struct("<8s7Q")
ALIGN, PAGE = 64, 4096
_CHUNK = 1 << 20  # 64-bit words summed at a time

NUMPY_DTYPES: dict[str, npt.DTypeLike] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,  # numpy has no bfloat16: its bits
    "i8": np.int8,
    "i32": np.int32,
    "i64": np.int64,
    "bool": np.bool_,
}


@dataclass(frozen=True)
class Blob:
    """One weight in the file; ``offset`` is in bytes from the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class WeightsFile:
    """An opened file: ``data`` is the payload, mapped or in memory of its own, ``io`` how it came there."""

    path: Path
    blobs: tuple[Blob, ...]
    payload_offset: int
    data: npt.NDArray[np.uint8]
    io: ReadReport


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _sums(data: npt.NDArray[np.uint8], start: int = 0, sums: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """s1 and s2 of bytes that begin at word ``start`` of what they belong to."""
    words = data.view("<u8")
    s1, s2 = sums
    for i in range(0, len(words), _CHUNK):
        part = words[i : i + _CHUNK]
        index = np.arange(start + i + 1, start + i + 1 + len(part), dtype=np.uint64)
        s1 += int(part.sum(dtype=np.uint64))
        s2 += int((part * index).sum(dtype=np.uint64))
    return s1 % (1 << 64), s2 % (1 << 64)


def write_weights(path: Path, weights: Mapping[str, tuple[str, npt.NDArray[Any]]]) -> None:
    """Write ``name -> (dtype, array)`` in this order; the file appears complete or not at all."""
    blobs, offset = [], 0
    digests = {}
    for name, (_, array) in weights.items():
        digest = hashlib.sha256()
        for piece in _padded(array):
            digest.update(piece)
        digests[name] = digest.hexdigest()
    for name, (dtype, array) in weights.items():
        blobs.append(Blob(name, dtype, tuple(array.shape), offset, array.nbytes, digests[name]))
        offset = _up(offset + array.nbytes, ALIGN)
    index = json.dumps([asdict(b) for b in blobs]).encode()
    start = _up(HEAD.size + len(index), PAGE)
    padded_index = index + bytes(start - HEAD.size - len(index))
    sums, words = (0, 0), 0
    for _, array in weights.values():
        for piece in _padded(array):
            sums = _sums(np.frombuffer(piece, np.uint8), words, sums)
            words += len(piece) // 8
    head = HEAD.pack(MAGIC, len(index), start, offset, *sums, 0, 0)
    about = np.frombuffer(head[:32] + padded_index, np.uint8)
    head = HEAD.pack(MAGIC, len(index), start, offset, *sums, *_sums(about))
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as f:
        f.write(head + padded_index)
        for _, array in weights.values():
            for piece in _padded(array):
                f.write(piece)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def _padded(array: npt.NDArray[Any]) -> Iterator[memoryview | bytes]:
    """The bytes of an array, then zeros up to the alignment, in pieces of whole words."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = len(raw) // ALIGN * ALIGN
    if whole:
        yield raw[:whole].data
    if len(raw) > whole:
        rest = raw[whole:].tobytes()
        yield rest + bytes(ALIGN - len(rest))


def head_digest(path: Path) -> str:
    """sha256 of all before the payload: with the hashes of the blobs in it, it names one set of weights.

    Raises :class:`ArtifactError` if there is no such file, or no whole header.
    """
    try:
        with path.open("rb") as f:
            head = f.read(HEAD.size)
            if len(head) < HEAD.size or not head.startswith(MAGIC):
                raise ArtifactError(path, "is no weights file", offset=0)
            return hashlib.sha256(head + f.read(HEAD.unpack(head)[2] - HEAD.size)).hexdigest()
    except FileNotFoundError:
        raise ArtifactError(path, "is not there") from None


def open_weights(path: Path, *, verify: bool = True, io_strategy: str = "mmap") -> WeightsFile:
    """Open a weights file and check it: its sums always, the hash of each blob with ``verify``.

    ``io_strategy`` is ``mmap``, or ``direct``: read past the page cache, through it where that is refused.

    Raises :class:`ArtifactError` with the path, and the offset of the part that is not what was written.
    """
    data, report = _mapped(path) if check_strategy(io_strategy) == "mmap" else read_file(path)
    size = len(data)
    if size < HEAD.size:
        raise ArtifactError(path, "is cut", expected=f"{HEAD.size} bytes", found=f"{size}")
    magic, index_bytes, start, payload, s1, s2, i1, i2 = HEAD.unpack(data[: HEAD.size].tobytes())
    if magic != MAGIC:
        raise ArtifactError(path, "is no weights file", offset=0, expected=repr(MAGIC), found=repr(magic))
    if start % PAGE or payload % ALIGN or start < HEAD.size + index_bytes or start + payload != size:
        raise ArtifactError(
            path,
            "its header and its size disagree",
            offset=8,
            expected=f"{start + payload} bytes",
            found=f"{size}",
        )
    if _sums(np.concatenate([data[:32], data[HEAD.size : start]])) != (i1, i2):
        raise ArtifactError(
            path, "its index was changed", offset=HEAD.size, expected=f"{i1:#x}", found="another sum"
        )
    blobs = _index_of(path, bytes(data[HEAD.size : HEAD.size + index_bytes]), payload)
    found = WeightsFile(path, blobs, start, data[start:], report)
    if verify:
        _check_blobs(found)
    elif _sums(found.data) != (s1, s2):
        raise ArtifactError(
            path, "its payload was changed", offset=start, expected=f"{s1:#x}", found="another sum"
        )
    if verify and _sums(found.data) != (s1, s2):  # every blob is right, so the header is not
        raise ArtifactError(
            path, "its header was changed", offset=32, expected=f"{s1:#x}", found="another sum"
        )
    return found


def _mapped(path: Path) -> tuple[npt.NDArray[np.uint8], ReadReport]:
    try:
        with path.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            if size == 0:
                raise ArtifactError(path, "is empty")
            mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ArtifactError(path, "is not there") from None
    return np.frombuffer(mapped, np.uint8), ReadReport("mmap", "mmap", nbytes=size)


def _index_of(path: Path, text: bytes, payload: int) -> tuple[Blob, ...]:
    """The blobs of an index, each of them a tensor that lies within the payload; the sums do not say that it is one."""
    try:
        blobs = tuple(Blob(**{**row, "shape": tuple(row["shape"])}) for row in json.loads(text))
        wrong = next((b.name for b in blobs if not _is_sound(b, payload)), None)
    except (ValueError, TypeError, KeyError, RecursionError, HalError) as error:
        raise ArtifactError(path, f"its index is none: {error}", offset=HEAD.size) from None
    if wrong is not None or len({b.name for b in blobs}) != len(blobs):
        raise ArtifactError(path, f"the index of {wrong!r} is wrong, or a name is twice", offset=HEAD.size)
    return blobs


def _is_sound(blob: Blob, payload: int) -> bool:
    numbers = (blob.offset, blob.nbytes, *blob.shape)
    return (
        all(isinstance(t, str) for t in (blob.name, blob.dtype, blob.sha256))
        and all(type(n) is int and n >= 0 for n in numbers)
        and blob.dtype in NUMPY_DTYPES
        and blob.nbytes == TensorType(blob.dtype, blob.shape).nbytes
        and blob.offset % ALIGN == 0
        and blob.offset + _up(blob.nbytes, ALIGN) <= payload
    )


def _check_blobs(file: WeightsFile) -> None:
    for blob in file.blobs:
        end = blob.offset + _up(blob.nbytes, ALIGN)
        digest = hashlib.sha256(file.data[blob.offset : end].data).hexdigest()
        if digest != blob.sha256:
            where = file.payload_offset + blob.offset
            raise ArtifactError(
                file.path,
                f"weight {blob.name!r} was changed",
                offset=where,
                expected=blob.sha256,
                found=digest,
            )
