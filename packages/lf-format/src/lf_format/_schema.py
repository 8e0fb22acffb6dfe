"""Schema of a file: its fields and length buckets, stored as canonical JSON (SPEC.md section 3)."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import FormatError
from lf_format._layout import MAX_RECORD_TOKENS, MAX_VOCAB

SCHEMA_VERSION = 1
MAX_BUCKETS = 65_535
_WIDTHS = {"uint8": "u1", "uint16": "<u2", "uint32": "<u4"}
TOKEN_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(code) for name, code in _WIDTHS.items()}


@dataclass(frozen=True)
class TokenizerInfo:
    """Which tokenizer made the ids.

    Attributes:
        name: for people, at most 256 bytes.
        hash: hex digest of the tokenizer's canonical content, at most 120 bytes; ids mean the same only
            where it is equal.
    """

    name: str
    hash: str


@dataclass(frozen=True)
class Field:
    """One field of every record.

    Attributes:
        name: "tokens" or "loss_mask" in version 1.0.
        kind: "tokens" (unsigned integers) or "bits" (one bit per token, packed per record).
        dtype: "uint8", "uint16", "uint32" for tokens; "bit" for bits.
        role: what a trainer does with it: "input" or "loss_mask".
    """

    name: str
    kind: str
    dtype: str
    role: str

    def nbytes(self, lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Bytes that records of `lengths` tokens (integers, shape [n]) take in this field: int64[n]."""
        wide = lengths.astype(np.int64)
        return (wide + 7) // 8 if self.kind == "bits" else wide * TOKEN_DTYPES[self.dtype].itemsize

    def nbytes_of(self, length: int) -> int:
        """Bytes of one record of `length` tokens."""
        return (length + 7) // 8 if self.kind == "bits" else length * TOKEN_DTYPES[self.dtype].itemsize


LOSS_MASK = Field("loss_mask", "bits", "bit", "loss_mask")


def token_dtype(vocab_size: int) -> str:
    """Narrowest dtype name that holds every id below `vocab_size`, by the exact bound."""
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise FormatError("vocabulary size", expected=f"1..{MAX_VOCAB}", found=vocab_size)
    if vocab_size <= 1 << 8:
        return "uint8"
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class Schema:
    """Fields in payload order, and bucket edges: a record lies in the first bucket whose edge holds it."""

    fields: tuple[Field, ...]
    buckets: tuple[int, ...]

    @classmethod
    def of(cls, vocab_size: int, buckets: tuple[int, ...], loss_mask: bool) -> Schema:
        """The schema a writer uses; FormatError when vocabulary or buckets are out of range."""
        tokens = Field("tokens", "tokens", token_dtype(vocab_size), "input")
        schema = cls((tokens, LOSS_MASK) if loss_mask else (tokens,), buckets)
        schema._check()
        return schema

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Dtype of the token field."""
        return TOKEN_DTYPES[self.fields[0].dtype]

    def to_json(self) -> bytes:
        """Canonical UTF-8 JSON: sorted keys, no spaces."""
        return _canonical(
            {
                "version": SCHEMA_VERSION,
                "buckets": list(self.buckets),
                "fields": [_spell(f) for f in self.fields],
            }
        )

    def _check(self) -> None:
        edges = self.buckets
        if not 1 <= len(edges) <= MAX_BUCKETS:
            raise FormatError("number of buckets", expected=f"1..{MAX_BUCKETS}", found=len(edges))
        if any(type(e) is not int for e in edges) or not 1 <= edges[0] <= edges[-1] <= MAX_RECORD_TOKENS:
            raise FormatError(
                "bucket edges", expected=f"integers in 1..{MAX_RECORD_TOKENS}", found=_clip(edges)
            )
        if any(a >= b for a, b in itertools.pairwise(edges)):
            raise FormatError(
                "bucket edges must increase", expected="strictly increasing", found=_clip(edges)
            )


def _spell(field: Field) -> dict[str, Any]:
    return asdict(field) | {"codec": "block", "shape": [-1]}


def _clip(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def parse_schema(raw: bytes, vocab_size: int, path: str, offset: int) -> Schema:
    """Schema from its canonical JSON; FormatError for anything that version 1.0 cannot read exactly."""

    def refuse(what: str, expected: object, found: object) -> FormatError:
        return FormatError(what, path=path, offset=offset, expected=expected, found=_clip(found))

    try:
        value = json.loads(raw.decode("utf-8"))
        same = _canonical(value) == raw
    except (ValueError, RecursionError) as error:
        raise refuse("schema is not JSON", "JSON", error) from None
    # One spelling per schema: no duplicate keys, no second encoding with another hash.
    if not same or not isinstance(value, dict) or not isinstance(value.get("buckets"), list):
        raise refuse(
            "schema is not a canonical JSON object", "sorted keys without spaces, buckets a list", raw[:60]
        )
    if value.get("version") != SCHEMA_VERSION:
        raise refuse("schema version", SCHEMA_VERSION, value.get("version"))
    for loss_mask in (False, True):
        try:
            schema = Schema.of(vocab_size, tuple(value["buckets"]), loss_mask)
        except (FormatError, TypeError) as error:
            raise refuse(f"schema buckets: {error}", "valid bucket edges", value["buckets"]) from None
        if value.get("fields") == [_spell(f) for f in schema.fields]:
            return schema
    raise refuse(
        "schema fields",
        "tokens of the width of the vocabulary, then optionally loss_mask",
        value.get("fields"),
    )
