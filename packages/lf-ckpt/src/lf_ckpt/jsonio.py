"""Canonical JSON, and items (counters, loader positions) as JSON that keeps bytes and non-finite floats.

Canonical: ASCII, keys sorted, no spaces. One value has one text, so a text that is not canonical has been altered.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from .errors import UnsupportedError

_SPLIT_PAIR: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")

Json: TypeAlias = Any
"""None, bool, int, float, str, bytes, or a list, tuple or str-keyed mapping of them."""


def canonical(value: Json) -> bytes:
    """The one canonical text of plain JSON data."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def parse_canonical(data: bytes) -> Json:
    """Inverse of `canonical`; ValueError for any other text, also one that means the same."""
    try:
        value = json.loads(data.decode("ascii"))
        if canonical(value) != data:
            raise ValueError("JSON is not in canonical form")
    except (RecursionError, OverflowError) as error:
        raise ValueError(f"JSON beyond limits: {error}") from error
    return value


def encode_item(value: Json, where: str) -> Json:
    """Plain JSON for `value`; bytes become {"$bytes": base64}, NaN and infinities {"$float": text}.

    Tuples become lists. Keys that begin with "$" get one more. UnsupportedError names the place of anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return checked_text(value, where)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(bytes(value)).decode("ascii")}
    if isinstance(value, list | tuple):
        return [encode_item(element, f"{where}[{i}]") for i, element in enumerate(value)]
    if isinstance(value, Mapping):
        return {_escape(key, where): encode_item(element, f"{where}.{key}") for key, element in value.items()}
    hint = "put tensors in `tensors`; give the rest as JSON data or bytes, or through lf_ckpt.pack"
    raise UnsupportedError(f"item {where}: {type(value).__name__} cannot be stored; {hint}")


def decode_item(value: Json) -> Json:
    """Inverse of `encode_item` (tuples stay lists); ValueError for tags it never writes."""
    if isinstance(value, list):
        return [decode_item(element) for element in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and "$bytes" in value:
        return _unbase64(value["$bytes"])
    if len(value) == 1 and "$float" in value:
        return _special_float(value["$float"])
    return {_unescape(key): decode_item(element) for key, element in value.items()}


def checked_text(text: str, where: str) -> str:
    """`text`, unless JSON would alter it: a split surrogate pair would come back joined."""
    if _SPLIT_PAIR.search(text):
        raise UnsupportedError(f"{where}: the text {text!r} holds a surrogate pair as two characters")
    return str(text)


def _escape(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise UnsupportedError(f"item {where}: key {key!r} is {type(key).__name__}; JSON keys are strings")
    checked_text(key, where)
    return "$" + key if key.startswith("$") else key


def _unescape(key: str) -> str:
    if key.startswith("$$"):
        return key[1:]
    if key.startswith("$"):
        raise ValueError(f"unknown tag {key}")
    return key


def _unbase64(text: object) -> bytes:
    try:
        data = base64.b64decode(text if isinstance(text, str) else "!", validate=True)
    except binascii.Error as error:
        raise ValueError(f"bad base64: {error}") from error
    if base64.b64encode(data).decode("ascii") != text:
        raise ValueError("base64 is not in canonical form")
    return data


def _special_float(text: object) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"unknown float {text!r}")
    return float(str(text))
