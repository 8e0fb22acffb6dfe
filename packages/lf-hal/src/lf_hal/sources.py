"""Where weights come from: a mapping of names to buffers, or a .safetensors or .lfckpt file as one."""

from __future__ import annotations

import importlib
import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_hal.errors import ArtifactError, HalError, WeightsError
from lf_hal.lir.graph import DTYPES, Value
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


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    """Views of the mapped file: 8 bytes of header length, a JSON header, then the data."""
    try:
        with path.open("rb") as f:
            mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError):
        raise ArtifactError(path, "is empty or not there") from None
    start = 8 + int.from_bytes(mapped[:8], "little")
    try:
        header = json.loads(mapped[8:start])
    except ValueError:
        raise ArtifactError(path, "its header is cut or changed", offset=8) from None
    found: dict[str, Any] = {}
    for name, row in header.items():
        if name == "__metadata__" or row["dtype"] not in _SAFETENSORS:
            continue
        begin, end = (start + n for n in row["data_offsets"])
        dtype = _SAFETENSORS[row["dtype"]]
        count = (end - begin) // DTYPES[dtype]
        if not start <= begin <= end <= len(mapped) or count != int(np.prod(row["shape"], dtype=np.int64)):
            raise ArtifactError(path, f"tensor {name!r} is cut", offset=begin)
        found[name] = np.frombuffer(mapped, NUMPY_DTYPES[dtype], count, begin).reshape(row["shape"])
    return found
