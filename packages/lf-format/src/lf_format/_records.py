"""One record: checking what a user hands in, and its hash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import InputError
from lf_format._layout import xxh3

DOCUMENT_START, DOCUMENT_END = 1, 2
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Record(Mapping[str, Array]):
    """One stored record: a mapping of its fields, with names for the token part.

    Attributes:
        tokens: ids, shape [length], the file's token dtype; owned by the caller. Empty in a .lfg without ids.
        loss_mask: bool, shape [length]; None when the file has no field of the role "loss_mask".
        flags: bit 0 = starts a document (an episode), bit 1 = ends it.
        fields: every field by name, owned by the caller.
    """

    tokens: Array
    loss_mask: npt.NDArray[np.bool_] | None
    flags: int
    fields: Mapping[str, Array] = default(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Array:
        return self.fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


def record_hash(field_bytes: Iterable[bytes | memoryview]) -> int:
    """32-bit hash of a record: xxh3_64 chained by seed over its fields in schema order, low half."""
    state = 0
    for part in field_bytes:
        state = xxh3(part, state)
    return state & 0xFFFFFFFF


def check_tokens(
    tokens: object, vocab_size: int, longest: int, dtype: np.dtype[Any], document: object
) -> Array:
    """`tokens` as a contiguous array of `dtype`; InputError naming document and position otherwise."""
    ids = _as_array(tokens, document, "token ids")
    if ids.dtype.kind not in "iu":
        raise _not_integers(tokens, ids, document)
    if ids.ndim != 1:
        raise InputError(
            "token ids must be one-dimensional", document=document, expected="shape [n]", found=ids.shape
        )
    if not 1 <= len(ids) <= longest:
        raise InputError(
            "a record must fit the largest bucket and not be empty",
            document=document, expected=f"1..{longest} tokens", found=len(ids),
        )  # fmt: skip
    negative = ids.dtype.kind == "i" and int(ids.min()) < 0
    if negative or int(ids.max()) >= vocab_size:
        at = int(((ids < 0) | (ids >= vocab_size)).argmax())
        raise InputError(
            "token id outside the vocabulary",
            document=document, position=at, expected=f"0..{vocab_size - 1}", found=int(ids[at]),
        )  # fmt: skip
    return np.ascontiguousarray(ids, dtype)


def check_mask(mask: object, length: int, document: object) -> Array:
    """`mask` as bool[length], None = all true; InputError unless booleans or 0/1 of that shape."""
    if mask is None:
        return np.ones(length, bool)
    values = _as_array(mask, document, "loss mask")
    if values.shape != (length,):
        raise InputError(
            "loss mask must match the tokens", document=document, expected=(length,), found=values.shape
        )
    if values.dtype.kind not in "biu":
        raise InputError(
            "loss mask must be booleans or 0/1", document=document, expected="bool", found=values.dtype
        )
    bad = (values != 0) & (values != 1)
    if bad.any():
        at = int(bad.argmax())
        raise InputError(
            "loss mask must be 0 or 1", document=document, position=at, expected="0 or 1", found=values[at]
        )
    return values.astype(bool)


def pack_bits(mask: Array) -> bytes:
    """Bits of a bool array, first element in the lowest bit, spare bits zero."""
    return np.packbits(mask, bitorder="little").tobytes()


def _as_array(values: object, document: object, what: str) -> Array:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InputError(f"{what} cannot be read as an array: {error}", document=document) from None


def _not_integers(given: object, ids: Array, document: object) -> InputError:
    flat = list(given) if isinstance(given, (list, tuple)) else ids.reshape(-1).tolist()
    at = next((i for i, v in enumerate(flat) if not _is_id(v)), 0)
    if not flat:
        return InputError("a record must not be empty", document=document, expected=">= 1 token", found=0)
    return InputError(
        f"token ids must be integers, not {ids.dtype}",
        document=document, position=at, expected="an integer", found=repr(flat[at])[:60],
    )  # fmt: skip


def _is_id(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 <= int(value) < 1 << 63


def frame_pairs(flags: Array, ids: Array) -> npt.NDArray[np.int64]:
    """Record ids of the frame before and of each frame, int64[n, 2]; the first of an episode pairs with itself.

    Args:
        flags: of the file or data set, uint8[records].
        ids: records, integers [n].
    """
    rows = np.asarray(ids, np.int64)
    return np.stack([rows - ((flags[rows] & DOCUMENT_START) == 0), rows], 1)
