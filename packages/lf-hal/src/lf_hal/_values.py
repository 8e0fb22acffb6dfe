"""Arrays and torch tensors as bits and as float64, all NaNs being one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_hal.errors import ConsistencyError

__all__ = ["EPS", "Values", "distance", "values_of"]

# spacing of floats just above 1
EPS = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
_NAMES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
}
_QUIET_NAN = {"f64": 0x7FF8 << 48, "f32": 0x7FC0 << 16, "f16": 0x7E00, "bf16": 0x7FC0}
Bits = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Values:
    """One output: type ("f32", "bf16", ...), shape, bits as unsigned integers and numbers as float64."""

    dtype: str
    shape: tuple[int, ...]
    bits: Bits
    numbers: npt.NDArray[np.float64]


def values_of(name: str, value: Any) -> Values:
    """The values of an array, a scalar, or a torch tensor on any device. ConsistencyError for types without order."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:
            return _canonical(
                "bf16", tensor.view(torch.int16).numpy().view(np.uint16), tensor.double().numpy()
            )
        value = tensor.numpy()
    array = np.ascontiguousarray(value).reshape(np.shape(value))
    dtype = _NAMES.get(array.dtype.name)
    if dtype is None:
        raise ConsistencyError(f"{name} is of type {array.dtype}, which is not compared")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        numbers = array.astype(np.float64)
    return _canonical(dtype, array.view(f"u{array.dtype.itemsize}"), numbers)


def _canonical(dtype: str, bits: Bits, numbers: npt.NDArray[np.float64]) -> Values:
    if dtype in _QUIET_NAN:
        bits = np.where(np.isnan(numbers), bits.dtype.type(_QUIET_NAN[dtype]), bits)
    return Values(dtype, numbers.shape, bits, numbers)


def distance(dtype: str, a: Bits, b: Bits) -> npt.NDArray[np.uint64]:
    """How many values of this type lie between each pair, counting one end: the distance in ULP. Of integers, the
    difference."""
    if dtype in EPS:
        width = a.dtype.itemsize * 8
        sign, rest = np.uint64(1 << width - 1), np.uint64((1 << width - 1) - 1)
        x, y = a.astype(np.uint64), b.astype(np.uint64)
        size_x, size_y = x & rest, y & rest
        apart = np.maximum(size_x, size_y) - np.minimum(size_x, size_y)
        return np.where((x ^ y) & sign != 0, size_x + size_y, apart)
    x, y = (_integers(dtype, bits) for bits in (a, b))
    return np.maximum(x, y) - np.minimum(x, y)


def _integers(dtype: str, bits: Bits) -> npt.NDArray[np.uint64]:
    """Integers moved up so that their order is that of unsigned ones."""
    if dtype.startswith("i"):
        bits = bits ^ bits.dtype.type(1 << bits.dtype.itemsize * 8 - 1)
    return bits.astype(np.uint64)
