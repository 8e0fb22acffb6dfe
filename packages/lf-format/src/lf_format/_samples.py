"""Values of a .lfg sample on their way into a file: every one is stored as it is, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import InputError
from lf_format._fields import MAX_FIELD_BYTES, Field
from lf_format._records import check_tokens, pack_bits
from lf_format._schema import Schema

JPEG_START = b"\xff\xd8\xff"
Array = npt.NDArray[Any]


def encode_sample(
    sample: Mapping[str, object], schema: Schema, vocab_size: int, document: object
) -> tuple[list[bytes], list[int], int]:
    """Bytes of every field, first-axis steps of every field, and the record's length in tokens.

    Raises:
        InputError: naming document and field, for a missing or unknown field or a value that does not fit.
    """
    names = {f.name for f in schema.fields}
    if not isinstance(sample, Mapping) or sample.keys() != names:
        found = sorted(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise InputError(
            "a sample is a mapping of all fields", document=document, expected=sorted(names), found=found
        )
    parts, counts, length = [], [], 1
    for field in schema.fields:
        longest = schema.buckets[-1] if field is schema.tokens else field.max_count()
        raw, count = _encode(field, sample[field.name], vocab_size, longest, document)
        if len(raw) > MAX_FIELD_BYTES:
            raise _refuse(field, document, "bytes", f"<= {MAX_FIELD_BYTES}", len(raw))
        parts.append(raw)
        counts.append(count)
        if field is schema.tokens:
            length = count
    return parts, counts, length


def _encode(field: Field, value: object, vocab: int, longest: int, document: object) -> tuple[bytes, int]:
    if field.kind == "tokens":
        ids = check_tokens(value, vocab, longest, field.numpy_dtype, f"{document}, {field.name}")
        _check_shape(field, ids, document)
        return ids.tobytes(), len(ids)
    if isinstance(value, (bytes, bytearray, memoryview)) and field.kind in ("bytes", "image", "video"):
        value = np.frombuffer(value, np.uint8)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InputError(f"field {field.name!r} is not an array: {error}", document=document) from None
    if array.size == 0 and field.ragged:
        array = array.astype(field.numpy_dtype).reshape(0, *field.shape[1:])  # [] has no shape of its own
    _check_shape(field, array, document)
    if field.kind == "bits":
        bad = array.dtype.kind not in "biu" or bool(((array != 0) & (array != 1)).any())
        if bad:
            raise _refuse(field, document, "values", "booleans or 0/1", array.dtype)
        raw = pack_bits(array.astype(bool).reshape(-1))
    else:
        raw = _cast(field, array, document).tobytes()
    if field.kind == "image" and field.ragged and not raw.startswith(JPEG_START):
        raise _refuse(field, document, "content", "a JPEG file", raw[:8])
    return raw, array.shape[0] if field.ragged else 1


def _check_shape(field: Field, array: Array, document: object) -> None:
    rest = field.shape[1:] if field.ragged else field.shape
    found = array.shape[1:] if field.ragged else array.shape
    if found != rest or (field.ragged and array.ndim == 0):
        raise _refuse(field, document, "shape", field.shape, array.shape)
    if field.ragged and len(array) >= 1 << 32:
        raise _refuse(field, document, "first axis", "< 2**32", len(array))


def _cast(field: Field, array: Array, document: object) -> Array:
    """`array` in the stored dtype: integers exactly, floats rounded but never made infinite."""
    dtype = field.numpy_dtype
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and dtype.kind != "f"):
        raise _refuse(field, document, "dtype", dtype, array.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        out = array.astype(dtype)
    same = np.isinf(out) == np.isinf(array) if array.dtype.kind == "f" else out == array
    # uint64 against int64 compares as float64; both ways round is exact.
    if not same.all() or (array.dtype.kind in "iu" and not (out.astype(array.dtype) == array).all()):
        raise _refuse(field, document, "a value does not fit", dtype, array.reshape(-1)[same.argmin()])
    if dtype.kind in "iu" and array.dtype.kind in "iu" and array.size:
        low, high = int(array.min()), int(array.max())
        limits = np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            raise _refuse(field, document, "a value does not fit", dtype, low if low < limits.min else high)
    return out


def _refuse(field: Field, document: object, what: str, expected: object, found: object) -> InputError:
    return InputError(f"field {field.name!r}: {what}", document=document, expected=expected, found=found)
