"""Where weights come from: a mapping of names to buffers, or a .safetensors or .lfckpt file as one."""

from __future__ import annotations

import importlib
import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_hal.errors import ArtifactError, HalError, WeightsError
from lf_hal.lir.graph import Value
from lf_hal.weights import NUMPY_DTYPES

__all__ = ["as_array", "read_weights"]

_SAFETENSORS = {
    "F32": "f32", "F16": "f16", "BF16": "bf16", "I8": "i8", "I32": "i32", "I64": "i64", "BOOL": "bool"
}  # fmt: skip


def as_array(value: Value, found: Any) -> npt.NDArray[Any]:
    """``found`` as a contiguous array of the element type and shape of ``value``; bf16 as uint16 bits.

    ``found`` is an array, a torch tensor on the CPU, or anything with the buffer protocol and the right length.

    Raises:
        WeightsError: it is something else; no element type is ever converted.
    """
    wanted = np.dtype(NUMPY_DTYPES[value.type.dtype])
    if isinstance(found, _Foreign):
        raise WeightsError(value.name, str(value.type), f"elements of type {found.dtype}")
    if type(found).__module__.partition(".")[0] == "torch":
        tensor = found.detach().contiguous()
        if str(tensor.dtype) == "torch.bfloat16":
            found = tensor.view(importlib.import_module("torch").int16).numpy().view(np.uint16)
        else:
            found = tensor.numpy()
    if not isinstance(found, np.ndarray):
        raw = np.frombuffer(found, np.uint8)
        if raw.nbytes != value.type.nbytes:
            raise WeightsError(value.name, f"{value.type.nbytes} bytes", f"{raw.nbytes} bytes")
        return raw.view(wanted).reshape(value.type.shape)
    if found.dtype.name == "bfloat16":  # of the package ml_dtypes
        found = found.view(np.uint16)
    if found.dtype != wanted or found.shape != value.type.shape:
        raise WeightsError(value.name, str(value.type), f"{found.dtype} of shape {list(found.shape)}")
    return np.ascontiguousarray(found).reshape(value.type.shape)


def read_weights(path: Path, prefix: str = "") -> Mapping[str, Any]:
    """Name -> buffer of a ``.safetensors`` or ``.lfckpt`` file; of the names with ``prefix``, without it.

    A ``.lfckpt`` file needs lf-ckpt, and all its hashes are checked.

    Raises:
        ArtifactError: another kind of file, or a damaged one.
    """
    if path.suffix == ".safetensors":
        found = _read_safetensors(path)
    elif path.suffix == ".lfckpt":
        found = _read_lfckpt(path)
    else:
        raise ArtifactError(path, "is no source of weights; give a .safetensors or .lfckpt file")
    return {n.removeprefix(prefix): b for n, b in found.items() if n.startswith(prefix)}


def _read_lfckpt(path: Path) -> Mapping[str, Any]:
    try:
        lf_ckpt = importlib.import_module("lf_ckpt")
    except ImportError as error:
        raise HalError(f"reading {path} needs lf-ckpt ({error}): pip install 'lf-hal[ckpt]'") from error
    tensors: Mapping[str, Any] = lf_ckpt.load_file(path).tensors
    return tensors


@dataclass(frozen=True)
class _Foreign:
    """A tensor of a file whose element type the intermediate form has not."""

    dtype: str


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    """Views of the mapped file: 8 bytes of header length, a JSON header, then the data."""
    try:
        with path.open("rb") as f:
            mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError):
        raise ArtifactError(path, "is empty or not there") from None
    start = 8 + int.from_bytes(mapped[:8], "little")
    if start > len(mapped):
        raise ArtifactError(path, "its header is cut or changed", offset=0)
    try:
        header = json.loads(mapped[8:start])
        rows = {name: _row(row) for name, row in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ArtifactError(path, "its header is cut or changed", offset=8) from None
    return {name: _tensor(path, mapped, start, name, *row) for name, row in rows.items()}


def _row(row: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, begin and end of a row of the header; ValueError and its like for anything else."""
    begin, end = row["data_offsets"]
    shape = tuple(row["shape"])
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (begin, end, *shape)):
        raise ValueError
    return str(row["dtype"]), shape, begin, end


def _tensor(
    path: Path,
    mapped: mmap.mmap,
    start: int,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    begin: int,
    end: int,
) -> Any:
    if dtype not in _SAFETENSORS:
        return _Foreign(dtype)
    kind = NUMPY_DTYPES[_SAFETENSORS[dtype]]
    if not begin <= end <= len(mapped) - start or end - begin != math.prod(shape) * np.dtype(kind).itemsize:
        raise ArtifactError(path, f"tensor {name!r} is cut", offset=start + begin)
    return np.frombuffer(mapped, kind, math.prod(shape), start + begin).reshape(shape)
