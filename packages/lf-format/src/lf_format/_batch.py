"""Many .lfg samples at once, by columns: the bytes that one by one would give, with fewer Python calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._blocks import Part
from lf_format._errors import InputError
from lf_format._fields import Field
from lf_format._samples import encode_value, packed
from lf_format._schema import Schema


@dataclass(frozen=True)
class EncodedBatch:
    """Records as their file will hold them.

    Attributes:
        parts: for every field the bytes of its values, [n] each.
        steps: for every field with a column of counts its first-axis steps, [n] each.
        lengths: tokens of every record, [n].
    """

    parts: list[Iterable[Part]]
    steps: list[list[int]]
    lengths: list[int]


def encode_batch(
    columns: Mapping[str, Any], schema: Schema, vocab_size: int, documents: Sequence[int]
) -> EncodedBatch:
    """What `encode_sample` gives for every record, field by field.

    Args:
        columns: by field name an array [n, *shape], a sequence of n values or, where the shape is fixed, an
            iterator over them, which stays one.
        documents: number of the document of every record, [n], for messages.

    Raises:
        InputError: naming document and field, for a missing or unknown column, one of another length, or a value
            that does not fit.
    """
    if not isinstance(columns, Mapping) or columns.keys() != schema.names:
        found = sorted(map(str, columns)) if isinstance(columns, Mapping) else type(columns).__name__
        raise InputError("a batch is a mapping of all fields", expected=sorted(schema.names), found=found)
    sizes = {f.name: len(columns[f.name]) for f in schema.fields if _sized(f, columns[f.name])}
    if set(sizes.values()) - {len(documents)}:
        raise InputError("all columns and flags have one length", expected=len(documents), found=sizes)
    parts: list[Iterable[Part]] = []
    steps: dict[str, list[int]] = {}
    for field in schema.fields:
        column = columns[field.name]
        whole = _whole(field, column, len(documents))
        if whole is not None:
            parts.append(whole)
            continue
        values = _each(field, column, schema, vocab_size, documents)
        if isinstance(column, Sized):
            known = list(values)
            steps[field.name] = [count for _, count in known]
            parts.append([raw for raw, _ in known])
        else:
            parts.append(raw for raw, _ in values)
    lengths = [1] * len(documents) if schema.tokens is None else steps[schema.tokens.name]
    return EncodedBatch(parts, [steps[f.name] for f in schema.counted], lengths)


def _each(
    field: Field, column: Iterable[object], schema: Schema, vocab_size: int, documents: Sequence[int]
) -> Iterator[tuple[bytes, int]]:
    for value, document in zip(column, documents, strict=False):
        yield encode_value(field, value, schema, vocab_size, document)


def _sized(field: Field, column: object) -> bool:
    """Whether the length of `column` can be told; InputError when it must be and cannot."""
    if not isinstance(column, Sized) and (field.ragged or field.kind == "tokens"):
        raise InputError(f"field {field.name!r}: an iterator needs a fixed shape", found=field.shape)
    return isinstance(column, Sized)


def _whole(field: Field, column: object, n: int) -> list[Part] | None:
    """The values of an array in one go; None when they must be looked at one by one, if only to name the wrong one."""
    if not isinstance(column, np.ndarray) or column.shape != (n, *field.shape):
        return None
    if not n or field.kind == "tokens":
        return None
    try:
        rows: npt.NDArray[Any] = packed(field, column.reshape(n, -1), None, 1)
    except InputError:
        return None
    return [row.tobytes() for row in rows]
