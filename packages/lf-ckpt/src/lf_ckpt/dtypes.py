"""Names, sizes and byte-plane widths of element types; the names are those of safetensors where it has one."""

from __future__ import annotations

from typing import Final

import torch

from .errors import UnsupportedError

# name on disk -> (bytes per element, bytes per byte-plane group, attribute of torch)
# A complex number is two reals, so its planes are those of its parts.
_TABLE: Final[dict[str, tuple[int, int, str]]] = {
    "BOOL": (1, 1, "bool"),
    "U8": (1, 1, "uint8"),
    "I8": (1, 1, "int8"),
    "U16": (2, 2, "uint16"),
    "I16": (2, 2, "int16"),
    "U32": (4, 4, "uint32"),
    "I32": (4, 4, "int32"),
    "U64": (8, 8, "uint64"),
    "I64": (8, 8, "int64"),
    "F16": (2, 2, "float16"),
    "BF16": (2, 2, "bfloat16"),
    "F32": (4, 4, "float32"),
    "F64": (8, 8, "float64"),
    "C32": (4, 2, "complex32"),
    "C64": (8, 4, "complex64"),
    "C128": (16, 8, "complex128"),
    "F8_E4M3": (1, 1, "float8_e4m3fn"),
    "F8_E5M2": (1, 1, "float8_e5m2"),
    "F8_E4M3FNUZ": (1, 1, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (1, 1, "float8_e5m2fnuz"),
    "F8_E8M0": (1, 1, "float8_e8m0fnu"),
}

ITEM_SIZE: Final = {name: size for name, (size, _, _) in _TABLE.items()}
PLANE_WIDTH: Final = {name: width for name, (_, width, _) in _TABLE.items()}
_BY_DTYPE: Final = {
    getattr(torch, attr): name for name, (_, _, attr) in _TABLE.items() if hasattr(torch, attr)
}


def name_of(dtype: torch.dtype) -> str:
    """Name on disk of `dtype`; UnsupportedError for types without a fixed byte layout."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise UnsupportedError(
            f"dtype {dtype} cannot be stored; convert the tensor or leave it out"
        ) from None


def dtype_of(name: str) -> torch.dtype:
    """torch dtype of a name on disk; UnsupportedError when this torch is too old to have it."""
    dtype = getattr(torch, _TABLE[name][2], None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"dtype {name} needs a newer torch than {torch.__version__}")
    return dtype
