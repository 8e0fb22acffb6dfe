"""A manifest as canonical JSON, and back: whatever bytes come give a manifest or one CorruptError. Pure.

`{"body": {...}, "root": "<sha256 of the canonical body>"}`. The body holds the hash of every index, an index the hash
of every extent: the root stands for the whole step.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any, Final, TypeGuard

from .boxes import Box, cover_problem
from .dtypes import ITEM_SIZE
from .errors import CorruptError
from .jsonio import Json, canonical, decode_item, encode_item, parse_canonical
from .manifest import (
    PUBLISH,
    BlobEntry,
    DataFile,
    Manifest,
    Parent,
    Placed,
    Shard,
    TensorEntry,
    is_data_file,
    parse_folder,
)

_FORMAT: Final = "lfckpt"
_VERSION: Final = [1, 0]
_HEX: Final = re.compile(r"[0-9a-f]*")


def dump(manifest: Manifest) -> tuple[bytes, str]:
    """File content and root hash."""
    body = _body(manifest)
    root = hashlib.sha256(canonical(body)).hexdigest()
    return canonical({"body": body, "root": root}), root


def parse(data: bytes, path: str) -> Manifest:
    """Manifest in `data`; CorruptError for anything `dump` cannot have written."""
    try:
        document = parse_canonical(data)
        if not isinstance(document, dict) or set(document) != {"body", "root"}:
            raise ValueError("not a manifest")
        root = hashlib.sha256(canonical(document["body"])).hexdigest()
    except ValueError as error:
        raise CorruptError(path, f"manifest cannot be read: {error}") from error
    if root != document["root"]:
        raise CorruptError(
            path, "manifest root hash differs", expected=str(document["root"])[:64], found=root
        )
    try:
        return _manifest(document["body"], root)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(path, f"manifest is not valid: {type(error).__name__} {error}") from error


def _body(m: Manifest) -> dict[str, Json]:
    parent = None if m.parent is None else {"folder": m.parent.folder, "root": m.parent.root}
    body: dict[str, Json] = {
        "format": _FORMAT,
        "version": _VERSION,
        "requires": [],
        "store": m.store,
        "step": m.step,
        "folder": m.folder,
        "created": m.created,
        "parent": parent,
        "files": [vars(f) for f in m.files],
        "tensors": [
            {
                "name": t.name,
                "dtype": t.dtype,
                "shape": list(t.shape),
                "shards": [_shard(s) for s in t.shards],
            }
            for t in m.tensors
        ],
        "aliases": m.aliases,
        "blobs": [{"name": b.name, "nbytes": b.nbytes, "extents": _triple(b.placed)} for b in m.blobs],
        "items": {name: encode_item(value, name) for name, value in m.items.items()},
        "versions": m.versions,
    }
    for name, values in (("metrics", m.metrics), ("seconds", m.seconds)):
        if values:
            body[name] = encode_item(values, name)
    if m.profile:
        body["profile"] = m.profile
    return body


def _triple(placed: Placed) -> list[int]:
    return [placed.file, placed.first, placed.count]


def _shard(shard: Shard) -> dict[str, Json]:
    box = shard.box
    return {"offsets": list(box.offsets), "shape": list(box.shape), "extents": _triple(shard.placed)}


def _manifest(body: dict[str, Any], root: str) -> Manifest:
    _require(body["format"] == _FORMAT and body["version"][0] == _VERSION[0], "another format or version")
    _require(body["requires"] == [], f"needs features {body['requires']}")
    files = tuple(_file(f) for f in body["files"])
    _require(len({f.name for f in files}) == len(files), "a file is listed twice")
    parent = body["parent"]
    manifest = Manifest(
        store=_hex(body["store"], 32),
        step=_count(body["step"]),
        folder=_text(body["folder"]),
        created=_count(body["created"]),
        parent=None if parent is None else Parent(_folder(parent["folder"]), _hex(parent["root"], 64)),
        files=files,
        tensors=tuple(_tensor(t, files) for t in body["tensors"]),
        aliases={_text(k): _text(v) for k, v in body["aliases"].items()},
        blobs=tuple(
            BlobEntry(_text(b["name"]), _count(b["nbytes"]), _placed(b["extents"], files))
            for b in body["blobs"]
        ),
        items={_text(name): decode_item(value) for name, value in body["items"].items()},
        versions={_text(k): _text(v) for k, v in body["versions"].items()},
        metrics=_numbers(body.get("metrics", {})),
        seconds=_numbers(body.get("seconds", {})),
        profile=_profile(body.get("profile", "")),
        root=root,
    )
    _check_names(manifest)
    _check_extents(manifest)
    return manifest


def _check_extents(m: Manifest) -> None:
    """The streams of a file take all its extents, one after another."""
    taken = [0] * len(m.files)
    for stream in m.streams():
        file, first, count = stream.placed.file, stream.placed.first, stream.placed.count
        _require(first == taken[file], f"extents of {stream.name[:40]!r} do not follow those before")
        taken[file] += count
    _require(taken == [f.extents for f in m.files], "extents of a file belong to nothing")


def _check_names(m: Manifest) -> None:
    names = [t.name for t in m.tensors]
    items = [*(b.name for b in m.blobs), *m.items]
    _require(len(set(names) | set(m.aliases)) == len(names) + len(m.aliases), "a tensor is named twice")
    _require(len(set(items)) == len(items), "an item is named twice")
    _require(set(m.aliases.values()) <= set(names), "an alias names no tensor")
    at = parse_folder(m.folder)
    _require(at is not None and at[0] == m.step, "folder and step differ")
    _require(m.parent is None or m.parent.folder != m.folder, "a step cannot be its own parent")


def _file(value: dict[str, Any]) -> DataFile:
    name = _text(value["name"])
    _require(is_data_file(name), f"file name {name[:40]!r}")
    return DataFile(name, _count(value["size"]), _count(value["extents"]), _hex(value["index_hash"], 32))


def _tensor(value: dict[str, Any], files: Sequence[DataFile]) -> TensorEntry:
    name, dtype, shape = _text(value["name"]), _text(value["dtype"]), value["shape"]
    _require(dtype in ITEM_SIZE, f"dtype {dtype[:20]!r}")
    _require(isinstance(shape, list) and len(shape) <= 64, "shape")
    shards = tuple(
        Shard(Box(_counts(s["offsets"]), _counts(s["shape"])), _placed(s["extents"], files))
        for s in value["shards"]
    )
    entry = TensorEntry(name, dtype, _counts(shape), shards)
    # torch computes the strides of an empty tensor as if no dimension were 0, and fails when they overflow.
    strides = math.prod(max(n, 1) for n in entry.shape)
    _require(max(entry.nbytes, strides) < 1 << 63, "tensor too large")
    problem = cover_problem(entry.shape, [shard.box for shard in shards])
    _require(problem is None, f"{name[:40]!r}: {problem}")
    return entry


def _placed(value: Any, files: Sequence[DataFile]) -> Placed:
    file, first, count = (_count(n) for n in value)
    _require(file < len(files) and first + count <= files[file].extents, "extents outside the file")
    return Placed(file, first, count)


def _folder(value: Any) -> str:
    _require(parse_folder(_text(value)) is not None, "folder name")
    return str(value)


def _hex(value: Any, length: int) -> str:
    _require(len(_text(value)) == length and _HEX.fullmatch(value) is not None, "hash")
    return str(value)


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(n) for n in values)


def _profile(value: Any) -> str:
    _require(value in ("", PUBLISH), "profile")
    return str(value)


def _numbers(value: Any) -> dict[str, float]:
    numbers = decode_item(value)
    good = all(isinstance(n, float) or (_is_int(n) and abs(n) < 1 << 63) for n in numbers.values())
    _require(good, "a metric or time is not a number")
    return {_text(name): n for name, n in numbers.items()}


def _count(value: Any) -> int:
    _require(_is_int(value) and 0 <= value < 1 << 63, "a count is not a whole number in range")
    return int(value)


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} where text belongs")
    return value


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)
