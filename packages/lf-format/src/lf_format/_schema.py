"""Schema of a file: its fields and length buckets, stored as canonical JSON (SPEC.md section 3)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from dataclasses import field as default
from functools import cached_property
from typing import Any

import numpy as np

from lf_format._errors import FormatError
from lf_format._fields import MAX_FIELDS, SAMPLE_TOKEN_DTYPES, Field, check_field
from lf_format._layout import MAX_RECORD_TOKENS, MAX_VOCAB, PROFILE_LFG, PROFILE_LOONGBIN

SCHEMA_VERSION = 1
MAX_BUCKETS = 65_535


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
    """What every record of a file holds.

    Attributes:
        fields: in payload order.
        buckets: edges in tokens; a record lies in the first bucket whose edge holds it.
        profile: PROFILE_LOONGBIN or PROFILE_LFG.
        meta: a JSON object for people and trainers, stored with the fields of a .lfg.
    """

    fields: tuple[Field, ...]
    buckets: tuple[int, ...]
    profile: int = PROFILE_LOONGBIN
    meta: Mapping[str, Any] = default(default_factory=dict, hash=False)

    @classmethod
    def of(cls, vocab_size: int, buckets: tuple[int, ...], loss_mask: bool) -> Schema:
        """The schema of a .loongbin; FormatError when vocabulary or buckets are out of range."""
        tokens = Field("tokens", "tokens", token_dtype(vocab_size), "input")
        schema = cls((tokens, LOSS_MASK) if loss_mask else (tokens,), buckets)
        schema._check()
        return schema

    @classmethod
    def of_samples(
        cls, fields: tuple[Field, ...], vocab_size: int, buckets: tuple[int, ...], meta: Mapping[str, Any]
    ) -> Schema:
        """The schema of a .lfg; FormatError for fields, buckets or vocabulary it cannot have."""
        token_dtype(vocab_size)  # refuses a size out of range
        if not 1 <= len(fields) <= MAX_FIELDS:
            raise FormatError("number of fields", expected=f"1..{MAX_FIELDS}", found=len(fields))
        for field in fields:
            check_field(field, vocab_size)
        for k, field in enumerate(fields):
            if field.kind == "video" and fields[k : k + 3] != Field.video(field.name, field.role):
                raise FormatError(f"video {field.name!r} must be followed by its frame table and time base")
        names = [f.name for f in fields]
        if len(set(names)) < len(names):
            raise FormatError("field names must differ", found=_clip(names))
        schema = cls(fields, buckets, PROFILE_LFG, meta)
        schema._check()
        return schema

    @cached_property
    def tokens(self) -> Field | None:
        """The field that gives a record its length and bucket; None in a .lfg without token ids."""
        return next((f for f in self.fields if f.kind == "tokens"), None)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the fields."""
        return frozenset(f.name for f in self.fields)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Dtype of the token field; uint8 when there is none."""
        return SAMPLE_TOKEN_DTYPES[self.tokens.dtype if self.tokens else "uint8"]

    @property
    def counted(self) -> tuple[Field, ...]:
        """Ragged fields with an index column of their own; the others follow from the record's length."""
        if self.profile == PROFILE_LOONGBIN:
            return ()
        return tuple(f for f in self.fields if f.ragged and f is not self.tokens)

    def to_json(self) -> bytes:
        """Canonical UTF-8 JSON: sorted keys, no spaces."""
        value: dict[str, Any] = {
            "version": SCHEMA_VERSION,
            "buckets": list(self.buckets),
            "fields": [_spell(f) for f in self.fields],
        }
        if self.profile == PROFILE_LFG:
            value["meta"] = dict(self.meta)
        try:
            return _canonical(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"meta is not JSON: {error}") from None

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
    return asdict(field) | {"codec": "block", "shape": list(field.shape)}


def _clip(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _canonical(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def parse_schema(
    raw: bytes, vocab_size: int, path: str, offset: int, profile: int = PROFILE_LOONGBIN
) -> Schema:
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
    version = value.get("version")
    if type(version) is not int or version != SCHEMA_VERSION:  # true and 1.0 are equal to 1
        raise refuse("schema version", SCHEMA_VERSION, value.get("version"))
    if profile == PROFILE_LFG:
        try:
            return _parse_samples(value, vocab_size)
        except (FormatError, TypeError, KeyError, AttributeError) as error:
            raise refuse(f"schema of samples: {error}", "fields of SPEC.md section 8", raw[:60]) from None
    for loss_mask in (False, True):
        try:
            schema = Schema.of(vocab_size, tuple(value["buckets"]), loss_mask)
        except (FormatError, TypeError) as error:
            raise refuse(f"schema buckets: {error}", "valid bucket edges", value["buckets"]) from None
        if _canonical(value.get("fields")) == _canonical([_spell(f) for f in schema.fields]):
            return schema
    raise refuse(
        "schema fields",
        "tokens of the width of the vocabulary, then optionally loss_mask",
        value.get("fields"),
    )


def _parse_samples(value: dict[str, Any], vocab_size: int) -> Schema:
    """Schema of a .lfg; any of the errors caught above when `value` does not have its form."""
    fields = tuple(
        Field(f["name"], f["kind"], f["dtype"], f["role"], tuple(f["shape"])) for f in value["fields"]
    )
    meta = value["meta"]
    if _canonical([_spell(f) for f in fields]) != _canonical(value["fields"]) or not isinstance(meta, dict):
        raise FormatError("keys of a field are codec, dtype, kind, name, role, shape; meta is an object")
    return Schema.of_samples(fields, vocab_size, tuple(value["buckets"]), meta)
