"""FORMAT, the file that says that a directory is a store, and which. Pure: the id to canonical JSON and back."""

from __future__ import annotations

from typing import Any, Final

from .errors import CorruptError
from .format import hash128
from .jsonio import Json, canonical, parse_canonical

FORMAT_LIMIT: Final = 4096  # bytes
_NAME: Final = "lfckpt-store"
_VERSION: Final = (1, 0)


class OtherVersionError(CorruptError):
    """FORMAT is whole and names what this version does not know."""


def dump_format(store_id: str, version: tuple[int, int] = _VERSION) -> bytes:
    """Content of FORMAT. store_id: 32 hex digits."""
    document: dict[str, Json] = {"format": _NAME, "store": store_id, "version": list(version)}
    return canonical({**document, "sum": _sum(document)}) + b"\n"


def parse_format(data: bytes | None, path: str) -> str:
    """The store's id; CorruptError for anything `dump_format` of this version cannot have written."""
    try:
        document: dict[str, Any] = dict(parse_canonical((data or b"").removesuffix(b"\n")))
        found = document.pop("sum")
        name, version, store = document["format"], document["version"], document["store"]
        expected = _sum(document)
        readable = name == _NAME and version[0] == _VERSION[0]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CorruptError(path, f"cannot be read: {error}") from error
    if found != expected:
        raise CorruptError(path, "checksum differs", expected=expected, found=str(found)[:32])
    if not readable:
        known = f"{_NAME} {list(_VERSION)}"
        raise OtherVersionError(
            path, "another format or version", expected=known, found=f"{name} {version}"[:80]
        )
    if not isinstance(store, str) or len(store) != 32 or not set(store) <= set("0123456789abcdef"):
        raise CorruptError(path, "no id of a store", found=str(store)[:40])
    return store


def _sum(document: dict[str, Json]) -> str:
    """xxh3-128 of the other fields, hex: a flipped digit of the id would make the steps those of another store."""
    return hash128(canonical(document)).hex()
