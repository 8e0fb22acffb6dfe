"""MDS data sets (a folder with index.json and shards), read one shard at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from lf_format._errors import InputError

Array = npt.NDArray[Any]
MAX_SHARD_BYTES = 1 << 32  # offsets in a shard are 32 bits
_SHAPE = ("u1", "<u2", "<u4", "<u8")
_VALUES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
_NAMES = {
    "uint8": 8,
    "int8": 9,
    "uint16": 16,
    "int16": 17,
    "uint32": 32,
    "int32": 33,
    "uint64": 64,
    "int64": 65,
}


@dataclass(frozen=True)
class _Shard:
    path: Path
    zipped: bool
    nbytes: int
    samples: int
    encodings: list[str]
    sizes: list[int | None]
    column: int


def is_mds(folder: Path) -> bool:
    """Whether `folder` holds an MDS data set."""
    try:
        value = json.loads((folder / "index.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and isinstance(value.get("shards"), list)


def mds_values(folder: Path, key: str) -> Iterator[tuple[str, str | Array]]:
    """(name, value) of column `key` of every sample: text of a `str` column, ids of an integer `ndarray` column.

    Raises:
        InputError: for an index or shard that is not what it says, another encoding, no such column.
    """
    for shard in _shards(folder, key):
        raw = _shard_bytes(shard)
        for number, sample in enumerate(_samples(raw, shard)):
            name = f"{shard.path}:{number}"
            yield name, _value(_column(sample, shard, name), shard.encodings[shard.column], name)


def _shards(folder: Path, key: str) -> Iterator[_Shard]:
    path = folder / "index.json"
    try:
        shards = json.loads(path.read_bytes())["shards"]
        for entry in shards:
            names, encodings, sizes = (entry[f"column_{k}"] for k in ("names", "encodings", "sizes"))
            if key not in names:
                raise InputError("no such column", path=path, expected=key, found=names)
            zipped = entry.get("compression") is not None
            if entry["format"] != "mds" or (zipped and not entry["compression"].startswith("zstd")):
                found = entry["format"], entry.get("compression")
                raise InputError("shard format", path=path, expected="mds, plain or zstd", found=found)
            data = entry["zip_data" if zipped else "raw_data"]["basename"]
            if Path(data).name != data:
                raise InputError("shard name", path=path, expected="a plain file name", found=data)
            size, samples = entry["raw_data"]["bytes"], entry["samples"]
            whole = [size, samples, *(s for s in sizes if s is not None)]
            equal = len(names) == len(encodings) == len(sizes)
            if not equal or any(type(v) is not int or not 0 <= v < MAX_SHARD_BYTES for v in whole):
                raise InputError("shard description", path=path, found=str(entry)[:120])
            yield _Shard(folder / data, zipped, size, samples, encodings, sizes, names.index(key))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"not an MDS index: {error!r}", path=path) from None


def _shard_bytes(shard: _Shard) -> bytes:
    if shard.path.exists() and not shard.path.is_file():  # a FIFO would wait for a writer
        raise InputError("shard is no regular file", path=shard.path)
    try:
        raw = shard.path.read_bytes()
        if shard.zipped:
            stated = zstandard.frame_content_size(raw)  # -1: not stated, then max_output_size bounds it
            if stated > shard.nbytes:
                raise InputError("shard size", path=shard.path, expected=shard.nbytes, found=stated)
            raw = zstandard.ZstdDecompressor().decompress(raw, max_output_size=shard.nbytes)
    except (OSError, zstandard.ZstdError, MemoryError) as error:
        raise InputError(f"shard cannot be read: {error}", path=shard.path) from None
    if len(raw) != shard.nbytes:
        raise InputError("shard size", path=shard.path, expected=shard.nbytes, found=len(raw))
    return raw


def _samples(raw: bytes, shard: _Shard) -> Iterator[memoryview]:
    """Count u32, offsets u32[count + 1] from the start of the shard, description, samples."""
    n, head = shard.samples, 4 * (shard.samples + 2)
    if len(raw) < head or int.from_bytes(raw[:4], "little") != n:
        raise InputError("samples of the shard", path=shard.path, offset=0, expected=n, found=raw[:4].hex())
    offsets = np.frombuffer(raw, "<u4", n + 1, 4).astype(np.int64)
    if offsets[0] < head or offsets[-1] > len(raw) or (np.diff(offsets) < 0).any():
        raise InputError(
            "sample offsets",
            path=shard.path,
            offset=4,
            expected=f"rising in {head}..{len(raw)}",
            found=offsets[:4],
        )
    view = memoryview(raw)
    for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield view[a:b]


def _column(sample: memoryview, shard: _Shard, name: str) -> memoryview:
    """Sizes u32 of the columns without a fixed one come first, then the values in order."""
    loose = sum(size is None for size in shard.sizes)
    if len(sample) < 4 * loose:
        raise InputError("sample is cut", document=name, expected=4 * loose, found=len(sample))
    stated = iter(np.frombuffer(sample, "<u4", loose).tolist())
    sizes = [next(stated) if size is None else size for size in shard.sizes]
    if 4 * loose + sum(sizes) != len(sample):
        raise InputError("sample size", document=name, expected=4 * loose + sum(sizes), found=len(sample))
    at = 4 * loose + sum(sizes[: shard.column])
    return sample[at : at + sizes[shard.column]]


def _value(raw: memoryview, encoding: str, name: str) -> str | Array:
    kind, *rest = str(encoding).split(":")
    if kind == "str":
        try:
            return bytes(raw).decode("utf-8")
        except UnicodeDecodeError:
            raise InputError("not UTF-8 text", document=name) from None
    if kind != "ndarray" or len(rest) > 2 or "," in "".join(rest):
        raise InputError(
            "column encoding", document=name, expected="str, or ndarray of one axis", found=encoding
        )
    code = _NAMES.get(rest[0]) if rest else raw[0] if len(raw) else None
    if code not in _VALUES:
        raise InputError("dtype of the column", document=name, expected=sorted(_NAMES), found=rest or code)
    raw = raw if rest else raw[1:]
    if len(rest) < 2:  # the shape is stored: axes * 4 + width code, then each axis
        if not len(raw) or raw[0] >> 2 != 1:
            raise InputError(
                "shape of the column", document=name, expected="one axis", found=bytes(raw[:1]).hex()
            )
        width = np.dtype(_SHAPE[raw[0] & 3])
        count = int.from_bytes(raw[1 : 1 + width.itemsize], "little")
        raw = raw[1 + width.itemsize :]
    else:
        count = len(raw) // np.dtype(_VALUES[code]).itemsize
    dtype = np.dtype(_VALUES[code])
    if count * dtype.itemsize != len(raw):
        raise InputError(
            "bytes of the column", document=name, expected=count * dtype.itemsize, found=len(raw)
        )
    return np.frombuffer(raw, dtype)
