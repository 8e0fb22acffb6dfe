"""The manifest of one step: what the data files hold, by name. Pure: dataclasses to canonical JSON and back.

`{"body": {...}, "root": "<sha256 of the canonical body>"}`. The body holds the hash of every index, an index the hash
of every extent: the root stands for the whole step.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, TypeGuard

from .boxes import Box, cover_problem, whole
from .dtypes import ITEM_SIZE
from .errors import CorruptError
from .jsonio import Json, canonical, decode_item, encode_item, parse_canonical

MANIFEST_LIMIT: Final = 256 << 20  # bytes; 100,000 tensors take about 20 MB
PUBLISH: Final = "publish"
_FORMAT: Final = "lfckpt"
_VERSION: Final = [1, 0]
_FILE_NAME: Final = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.lfckpt")
_DIR_NAME: Final = re.compile(r"(0|[1-9][0-9]{0,17})(?:\.([1-9][0-9]{0,5}))?")
_HEX: Final = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True)
class DataFile:
    """One `.lfckpt`: its length in bytes, its number of extents and the xxh3-128 of its index (hex)."""

    name: str
    size: int
    extents: int
    index_hash: str


@dataclass(frozen=True)
class Placed:
    """A stream of bytes in a data file: extents `first .. first + count - 1` of `files[file]`."""

    file: int
    first: int
    count: int


@dataclass(frozen=True)
class Shard:
    """A box of a tensor and where its row-major bytes are."""

    box: Box
    placed: Placed


@dataclass(frozen=True)
class TensorEntry:
    """A tensor by name: dtype name, global shape, and the shards that hold every element of it once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        """Raw bytes."""
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]

    def nbytes_of(self, shard: Shard) -> int:
        """Raw bytes of a shard."""
        return shard.box.volume * ITEM_SIZE[self.dtype]

    def runs(self) -> list[tuple[Placed, int]]:
        """(place, raw bytes) of every shard."""
        return [(shard.placed, self.nbytes_of(shard)) for shard in self.shards]


def unsharded(name: str, dtype: str, shape: tuple[int, ...], placed: Placed) -> TensorEntry:
    """A tensor that one file holds in one piece."""
    return TensorEntry(name, dtype, shape, (Shard(whole(shape), placed),))


@dataclass(frozen=True)
class BlobEntry:
    """A bytes item: its length and where it is."""

    name: str
    nbytes: int
    placed: Placed

    def runs(self) -> list[tuple[Placed, int]]:
        """(place, raw bytes), as for a tensor of one shard."""
        return [(self.placed, self.nbytes)]


StreamKey: TypeAlias = tuple[object, ...]


def shard_key(name: str, dtype: str, shape: tuple[int, ...], box: Box) -> StreamKey:
    """Equal for the shards of two steps that hold the same part of the same tensor: the one is the other's parent."""
    return (name, dtype, shape, *box)


def item_key(name: str) -> StreamKey:
    """The same for a bytes item."""
    return (name,)


class StoredStream(NamedTuple):
    """A run of bytes in one file: a shard or a bytes item. `number` is that of its index records, counted per file.

    key: equal for the streams of two steps that hold the same part of the same tensor or item (the parent of a delta).
    """

    name: str
    number: int
    nbytes: int
    placed: Placed
    key: StreamKey


@dataclass(frozen=True)
class Parent:
    """The step whose extents a delta refers to: directory name and root hash (hex)."""

    folder: str
    root: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a step but the bytes. `root` is "" until `dump` or `parse` has fixed it.

    metrics: what the caller measured, for retention. seconds: from the call of `save` to its states staged and written.
    profile: "publish" for a link of a chain, whose parent may be a delta itself; else "".
    """

    store: str
    step: int
    folder: str
    created: int
    parent: Parent | None
    files: tuple[DataFile, ...]
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str]
    blobs: tuple[BlobEntry, ...]
    items: dict[str, Json]
    versions: dict[str, str]
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    profile: str = ""
    root: str = field(default="", compare=False)

    @property
    def entries(self) -> list[TensorEntry | BlobEntry]:
        """Tensors, then bytes items."""
        return [*self.tensors, *self.blobs]

    def streams(self) -> Iterator[StoredStream]:
        """Every stream, in the order that numbers them: shards of the tensors, then bytes items."""
        numbers = [0] * len(self.files)
        for name, nbytes, placed, key in _runs(self):
            yield StoredStream(name, numbers[placed.file], nbytes, placed, key)
            numbers[placed.file] += 1

    def places(self, file: int) -> dict[StreamKey, range]:
        """Numbers of the extents of every stream of one data file, by what the stream holds."""
        runs = ((s.key, s.placed) for s in self.streams() if s.placed.file == file)
        return {key: range(p.first, p.first + p.count) for key, p in runs}

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tensors and bytes items, aliases counted once."""
        return sum(entry.nbytes for entry in self.entries)


def parse_folder(name: str) -> tuple[int, int] | None:
    """(step, attempt) of the name of a step directory; None for any other name."""
    found = _DIR_NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or 0)) if found else None


def folder_name(step: int, attempt: int) -> str:
    """Inverse of `parse_folder`."""
    return f"{step}.{attempt}" if attempt else str(step)


def data_file_name(rank: int) -> str:
    """Name of the data file of a rank."""
    return f"rank-{rank}.lfckpt"


def rank_of(name: str) -> int | None:
    """Inverse of `data_file_name`; None for any other name."""
    found = _FILE_NAME.fullmatch(name)
    return int(found[1]) if found else None


def is_data_file(name: str) -> bool:
    """Whether a file name is that of a rank's data file."""
    return rank_of(name) is not None


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
    except (ValueError, LookupError, TypeError, AttributeError) as error:
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


def _runs(m: Manifest) -> Iterator[tuple[str, int, Placed, StreamKey]]:
    """(name, bytes, place, key) of every stream in manifest order."""
    for tensor in m.tensors:
        for shard in tensor.shards:
            key = shard_key(tensor.name, tensor.dtype, tensor.shape, shard.box)
            yield tensor.name, tensor.nbytes_of(shard), shard.placed, key
    for blob in m.blobs:
        yield blob.name, blob.nbytes, blob.placed, item_key(blob.name)


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
