"""How two steps differ, tensor by tensor, bit by bit. Reads one tensor of each at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from .boxes import whole
from .codec import Bytes
from .dtypes import ITEM_SIZE, dtype_of
from .jsonio import Json, canonical, encode_item
from .loading import entries_by_name
from .manifest import BlobEntry, Manifest, Placed, TensorEntry
from .reader import StepReader, new_scratch

_CHUNK: Final = 1 << 20  # elements compared at a time
_FLOATS: Final = {"F16", "BF16", "F32", "F64", "C32", "C64", "C128"}

Kind = Literal["added", "removed", "changed", "same"]


@dataclass(frozen=True)
class TensorDiff:
    """One tensor, or one bytes item. before, after: "F32[2, 3]", or None where it does not exist.

    elements, bytes: how many differ; None when dtype or shape differ. max_abs: largest difference of two finite floats
    (of complex numbers: its magnitude); None when there is none. nonfinite: changed elements that are or were infinite
    or NaN.
    """

    name: str
    kind: Kind
    before: str | None
    after: str | None
    elements: int | None = None
    bytes: int | None = None
    max_abs: float | None = None
    nonfinite: int = 0


@dataclass(frozen=True)
class StepDiff:
    """Two steps. items: (name, kind) of every JSON item that is not the same in both."""

    before: str
    after: str
    tensors: tuple[TensorDiff, ...]
    items: tuple[tuple[str, Kind], ...] = field(default=())

    @property
    def equal(self) -> bool:
        """Whether tensors and items are the same, bit for bit."""
        return not self.items and all(diff.kind == "same" for diff in self.tensors)


def compare(before: StepReader, after: StepReader) -> StepDiff:
    """Every tensor and item of two open steps, of the same store or not; CorruptError when one is damaged."""
    old, new = _streams(before.manifest), _streams(after.manifest)
    tensors = [_entry(name, old.get(name), new.get(name), before, after) for name in {**old, **new}]
    items = tuple(_items(before.manifest.items, after.manifest.items))
    return StepDiff(before.manifest.folder, after.manifest.folder, tuple(tensors), items)


Entry = TensorEntry | BlobEntry


def _streams(manifest: Manifest) -> dict[str, Entry]:
    return {**entries_by_name(manifest), **{f"item {entry.name}": entry for entry in manifest.blobs}}


def _items(old: dict[str, Json], new: dict[str, Json]) -> Iterator[tuple[str, Kind]]:
    for name in sorted({*old, *new}):
        if name not in new:
            yield name, "removed"
        elif name not in old:
            yield name, "added"
        elif canonical(encode_item(old[name], name)) != canonical(encode_item(new[name], name)):
            yield name, "changed"


def _entry(name: str, a: Entry | None, b: Entry | None, before: StepReader, after: StepReader) -> TensorDiff:
    if a is None or b is None:
        kind: Kind = "added" if a is None else "removed"
        return TensorDiff(name, kind, _kind(a) if a else None, _kind(b) if b else None)
    old, new = _kind(a), _kind(b)
    if old != new:
        return TensorDiff(name, "changed", old, new)
    if _same_hashes(a, b, before, after):
        return TensorDiff(name, "same", old, new, 0, 0)
    dtype = a.dtype if isinstance(a, TensorEntry) else "U8"
    return _bits(name, old, dtype, read_bytes(before, a), read_bytes(after, b))


def _kind(entry: Entry) -> str:
    return f"{entry.dtype}{list(entry.shape)}" if isinstance(entry, TensorEntry) else f"bytes[{entry.nbytes}]"


def _same_hashes(a: Entry, b: Entry, before: StepReader, after: StepReader) -> bool:
    """Whether the indexes say that both hold the same bytes: cut in the same way, and all raw hashes agree."""
    return _cuts(a) == _cuts(b) and all(
        _hashes(before, pa) == _hashes(after, pb) for (pa, _), (pb, _) in zip(a.runs(), b.runs(), strict=True)
    )


def _cuts(entry: Entry) -> list[object]:
    return [shard.box for shard in entry.shards] if isinstance(entry, TensorEntry) else [entry.nbytes]


def _hashes(reader: StepReader, placed: Placed) -> list[tuple[int, bytes]]:
    return [(extent.raw_bytes, extent.raw_hash) for _, _, extent in reader.extents_of(placed)]


def read_bytes(reader: StepReader, entry: Entry) -> Bytes:
    """All bytes of a tensor in row-major order, or of an item, as (elements, bytes per element) uint8, verified."""
    if isinstance(entry, BlobEntry):
        return _run(reader, entry.placed, entry.nbytes, entry.name).reshape(-1, 1)
    size = ITEM_SIZE[entry.dtype]
    if len(entry.shards) == 1 and entry.shards[0].box == whole(entry.shape):
        return _run(reader, entry.shards[0].placed, entry.nbytes, entry.name).reshape(-1, size)
    out = np.empty((*entry.shape, size), np.uint8)
    for shard in entry.shards:
        part = _run(reader, shard.placed, entry.nbytes_of(shard), entry.name)
        place = tuple(slice(at, at + length) for at, length in zip(*shard.box, strict=True))
        out[place] = part.reshape(*shard.box.shape, size)
    return out.reshape(-1, size)


def _run(reader: StepReader, placed: Placed, nbytes: int, name: str) -> Bytes:
    out, scratch = np.empty(nbytes, np.uint8), new_scratch()
    for file, number, extent in reader.extents_of(placed):
        view = out[extent.start : extent.start + extent.raw_bytes]
        reader.read(file, number, view, scratch, name, verify=True)
    return out


def _bits(name: str, kind: str, dtype: str, old: Bytes, new: Bytes) -> TensorDiff:
    elements = total = nonfinite = 0
    largest: float | None = None
    for at in range(0, len(old), _CHUNK):
        a, b = old[at : at + _CHUNK], new[at : at + _CHUNK]
        differ = a != b
        rows = differ.any(1)
        elements += int(rows.sum())
        total += int(differ.sum())
        if dtype in _FLOATS or dtype.startswith("F8"):
            x, y = _numbers(a[rows], dtype), _numbers(b[rows], dtype)
            finite = np.isfinite(x) & np.isfinite(y)
            nonfinite += int((~finite).sum())
            if finite.any():
                with np.errstate(over="ignore"):  # of two huge numbers the difference is infinite
                    largest = max(largest or 0.0, float(np.abs(x[finite] - y[finite]).max()))
    return TensorDiff(name, "changed" if total else "same", kind, kind, elements, total, largest, nonfinite)


def _numbers(rows: Bytes, dtype: str) -> npt.NDArray[Any]:
    """(n, size) bytes as n float64 or complex128 numbers."""
    flat = torch.from_numpy(np.ascontiguousarray(rows).reshape(-1)).view(dtype_of(dtype))
    wide = flat.to(torch.complex128 if dtype.startswith("C") else torch.float64)
    numbers: npt.NDArray[Any] = wide.numpy()
    return numbers
