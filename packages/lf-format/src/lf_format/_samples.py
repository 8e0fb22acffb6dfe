"""Values of a .lfg sample on their way into a file: every one is stored as it is, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import InputError
from lf_format._fields import MAX_FIELD_BYTES, Field
from lf_format._records import check_tokens
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
    if not isinstance(sample, Mapping) or sample.keys() != schema.names:
        found = sorted(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise InputError(
            "a sample is a mapping of all fields",
            document=document, expected=sorted(schema.names), found=found,
        )  # fmt: skip
    parts, counts, length = [], [], 1
    for field in schema.fields:
        raw, count = encode_value(field, sample[field.name], schema, vocab_size, document)
        parts.append(raw)
        counts.append(count)
        if field is schema.tokens:
            length = count
    return parts, counts, length


def encode_value(
    field: Field, value: object, schema: Schema, vocab_size: int, document: object
) -> tuple[bytes, int]:
    """Bytes and first-axis steps of one value; InputError naming document and field when it does not fit."""
    if field.kind == "tokens":
        longest = schema.buckets[-1] if field is schema.tokens else field.max_count()
        where = f"{document}, {field.name}"
        array: Array = check_tokens(value, vocab_size, longest, field.numpy_dtype, where)
    else:
        array = _as_array(field, value, document)
    if array.size == 0 and field.ragged:
        array = array.astype(field.numpy_dtype).reshape(0, *field.shape[1:])  # [] has no shape of its own
    _check_shape(field, array, document)
    raw = _bytes(packed(field, array, document))
    if field.kind == "image" and field.ragged and not raw.startswith(JPEG_START):
        raise _refuse(field, document, "content", "a JPEG file", raw[:8])
    if len(raw) > MAX_FIELD_BYTES:
        raise _refuse(field, document, "bytes", f"<= {MAX_FIELD_BYTES}", len(raw))
    # the number of ids is the length of a record, also where every record has the same
    return raw, array.shape[0] if field.ragged or field.kind == "tokens" else 1


def packed(field: Field, array: Array, document: object, axis: int | None = None) -> Array:
    """`array` as it is stored; bits eight to a byte, along `axis`. InputError for values that do not fit."""
    if field.kind != "bits":
        return _cast(field, array, document)
    if array.dtype.kind not in "biu" or bool(((array != 0) & (array != 1)).any()):
        raise _refuse(field, document, "values", "booleans or 0/1", array.dtype)
    return np.packbits(array.astype(bool), axis, bitorder="little")


def _bytes(array: Array) -> bytes:
    """Content of `array`; not copied when it is the whole of a bytes object, which nobody can change."""
    base: object = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, bytes) and len(base) == array.nbytes and array.flags.c_contiguous:
        return base
    return array.tobytes()


def _as_array(field: Field, value: object, document: object) -> Array:
    if isinstance(value, (bytes, bytearray, memoryview)) and field.kind in ("bytes", "image", "video"):
        return np.frombuffer(value, np.uint8)
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InputError(f"field {field.name!r} is not an array: {error}", document=document) from None


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
