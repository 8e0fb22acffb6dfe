"""The manifest of one step: what the data files hold, by name. Pure; manifest_text.py has its bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from .boxes import Box, whole
from .dtypes import ITEM_SIZE
from .jsonio import Json

MANIFEST_LIMIT: Final = 256 << 20  # bytes; 100,000 tensors take about 20 MB
PUBLISH: Final = "publish"
_FILE_NAME: Final = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.lfckpt")
_DIR_NAME: Final = re.compile(r"(0|[1-9][0-9]{0,17})(?:\.([1-9][0-9]{0,5}))?")


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
    element: bytes that no extent splits.
    """

    name: str
    number: int
    nbytes: int
    placed: Placed
    key: StreamKey
    element: int


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
        for name, nbytes, placed, key, element in _runs(self):
            yield StoredStream(name, numbers[placed.file], nbytes, placed, key, element)
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


def _runs(m: Manifest) -> Iterator[tuple[str, int, Placed, StreamKey, int]]:
    """(name, bytes, place, key, bytes of an element) of every stream in manifest order."""
    for tensor in m.tensors:
        for shard in tensor.shards:
            key = shard_key(tensor.name, tensor.dtype, tensor.shape, shard.box)
            yield tensor.name, tensor.nbytes_of(shard), shard.placed, key, ITEM_SIZE[tensor.dtype]
    for blob in m.blobs:
        yield blob.name, blob.nbytes, blob.placed, item_key(blob.name), 1
