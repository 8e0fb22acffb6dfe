"""Bytes that Reader.gather read, as one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import FormatError
from lf_format._fields import Field
from lf_format._index import cumulative

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


def flat(out: Array, item: Field, n: int, path: str) -> Bytes:
    """`out` as bytes, for `n` records of a field of fixed shape; FormatError when it does not fit them."""
    shape, found = (n, *item.shape), (out.shape, out.dtype)
    if found != (shape, item.numpy_dtype) or not out.flags.c_contiguous:
        expected = f"C-contiguous {item.numpy_dtype} {shape}"
        raise FormatError("out", path=path, expected=expected, found=f"{out.dtype} {out.shape}")
    return out.reshape(-1).view(np.uint8)


def shaped(
    item: Field, steps: Array, parts: list[Bytes], buffer: Bytes
) -> Array | tuple[Array, npt.NDArray[np.int64]] | None:
    """Records of one field, one after the other.

    Args:
        steps: first axis of each record, [n].
        parts: bytes of each record.
        buffer: the same joined.

    Returns:
        As Reader.gather; None when spare bits are set.
    """
    if item.kind == "bits":  # each record begins at a byte of its own
        values = [item.decode(part, int(count)) for part, count in zip(parts, steps, strict=True)]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        shape = (0, *item.shape[1:]) if item.ragged else (0, *item.shape)
        joined = np.concatenate if item.ragged else np.stack
        whole: Array = joined(known) if known else np.zeros(shape, bool)
    else:
        whole = buffer.view(item.numpy_dtype)
        whole = whole.reshape(-1, *item.shape[1:]) if item.ragged else whole.reshape(len(steps), *item.shape)
    return (whole, cumulative(steps)) if item.ragged else whole
