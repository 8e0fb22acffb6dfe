"""From an open step to tensors: fresh ones, or in place into given ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from .boxes import Box, relative, whole
from .codec import Bytes
from .dtypes import dtype_of
from .errors import CorruptError, MismatchError
from .format import EXTENT_BYTES, SAME, Extent
from .manifest import BlobEntry, Manifest, TensorEntry, data_file_name
from .reader import OpenFile, StepReader, new_scratch
from .report import Loaded, LoadReport
from .staging import copy_range
from .windows import Needed, Window, needed, part_of, scatter, window_of
from .writer import Base

T = TypeVar("T")
Found: TypeAlias = tuple[OpenFile, int, Extent]
_local = threading.local()


class Fit(NamedTuple):
    """How saved tensors and receiving tensors match, by name."""

    taken: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]


def fit(manifest: Manifest, into: Mapping[str, torch.Tensor]) -> Fit:
    """Compare names, shapes and dtypes; tied names count as tensors of their own. Pure."""
    saved = entries_by_name(manifest)
    mismatched = [
        f"{name}: {saved[name].dtype}{list(saved[name].shape)} -> {tensor.dtype}{list(tensor.shape)}"
        for name, tensor in into.items()
        if name in saved and not _same_kind(saved[name], tensor)
    ]
    taken = tuple(name for name, tensor in into.items() if name in saved and _same_kind(saved[name], tensor))
    missing = tuple(name for name in into if name not in saved)
    return Fit(taken, missing, tuple(name for name in saved if name not in into), tuple(mismatched))


def entries_by_name(manifest: Manifest) -> dict[str, TensorEntry]:
    """Every tensor name, tied ones included."""
    entries = {entry.name: entry for entry in manifest.tensors}
    return entries | {alias: entries[name] for alias, name in manifest.aliases.items()}


def load_step(
    reader: StepReader, into: Mapping[str, torch.Tensor] | None, *, strict: bool, verify: bool, threads: int
) -> Loaded:
    """Read one step. With `into`, nothing is written before the whole step has passed its hashes.

    Raises CorruptError, MismatchError (strict) and UnsupportedError (a dtype that this torch lacks).
    """
    began = time.perf_counter()
    manifest = reader.manifest
    with ThreadPoolExecutor(threads, thread_name_prefix="lf-ckpt-load") as pool:
        work = _Work(reader, pool, verify)
        if into is None:
            tensors, match = _load_fresh(work), Fit((), (), (), ())
        else:
            match = fit(manifest, into)
            if strict and (match.missing or match.unexpected or match.mismatched):
                raise MismatchError(match.missing, match.unexpected, match.mismatched)
            tensors = _load_into(work, into, match.taken)
        blobs = {entry.name: work.blob(entry) for entry in manifest.blobs}
    report = LoadReport(
        manifest.folder, reader.kind, work.bytes_read, time.perf_counter() - began, verify, (), *match[1:]
    )
    return Loaded(manifest.step, tensors, {**manifest.items, **blobs}, report)


class _Work:
    """The extents of one load, spread over threads; each thread has its own scratch."""

    def __init__(self, reader: StepReader, pool: ThreadPoolExecutor, verify: bool) -> None:
        self.reader, self.pool, self.verify = reader, pool, verify
        self.bytes_read = 0

    def each(self, extents: Iterable[Found], job: Callable[[OpenFile, int, Extent], None]) -> None:
        """Run `job` for every extent; the first error is raised after the others have stopped."""
        found = list(extents)
        self.bytes_read += sum(extent.raw_bytes for _, _, extent in found)
        _drain(self.pool.map(lambda extent: job(*extent), found))

    def fill(self, name: str, extents: Iterable[Found], out: Bytes) -> None:
        """Decode a whole stream into `out`, (nbytes,) uint8."""

        def job(file: OpenFile, number: int, extent: Extent) -> None:
            view = out[extent.start : extent.start + extent.raw_bytes]
            self.reader.read(file, number, view, _scratch()[0], name, verify=self.verify)

        self.each(extents, job)

    def fill_window(self, entry: TensorEntry, window: Window) -> None:
        """Decode what a part of a tensor, of any stride and device, holds."""
        for part in needed(self.reader, entry, window.box):
            if part.shared == part.shard.box:
                place = part_of(window.local, relative(part.shared, window.box.offsets))
                self._fill_shard(entry, part, place)
            else:
                self._decode(entry.name, part, window.local.dtype, partial(scatter, part.shard.box, window))

    def _fill_shard(self, entry: TensorEntry, part: Needed, place: torch.Tensor) -> None:
        """Decode a whole shard into `place`."""
        plain = place.device.type == "cpu" and not (place.is_conj() or place.is_neg())
        if plain and place.is_contiguous():
            self.fill(entry.name, part.extents, _flat_bytes(place))
        else:
            self._decode(entry.name, part, place.dtype, partial(_copy_back, place))

    def _decode(
        self, name: str, part: Needed, dtype: torch.dtype, put: Callable[[torch.Tensor, int], None]
    ) -> None:
        """Decode extents and `put` the elements of each with the number of the first in its shard."""

        def job(file: OpenFile, number: int, extent: Extent) -> None:
            scratch, decoded = _scratch()
            view = decoded[: extent.raw_bytes]
            self.reader.read(file, number, view, scratch, name, verify=self.verify)
            flat = torch.from_numpy(view).view(dtype)
            put(flat, extent.start // flat.element_size())

        self.each(part.extents, job)

    def blob(self, entry: BlobEntry) -> bytes:
        """A bytes item."""
        out = np.empty(entry.nbytes, np.uint8)
        self.fill(entry.name, self.reader.extents_of(entry.placed), out)
        return out.tobytes()

    def precheck(self, name: str, extents: Iterable[Found]) -> None:
        """Hash the stored bytes of these extents."""
        self.each(extents, lambda file, number, _: self._check(file, number, name))

    def _check(self, file: OpenFile, number: int, name: str) -> None:
        self.reader.check(file, number, _scratch()[0], name)


def _load_fresh(work: _Work) -> dict[str, torch.Tensor]:
    manifest = work.reader.manifest
    tensors: dict[str, torch.Tensor] = {}
    for entry in manifest.tensors:
        tensor = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
        work.fill_window(entry, Window(tensor, whole(entry.shape)))
        tensors[entry.name] = tensor
    return tensors | {alias: tensors[name] for alias, name in manifest.aliases.items()}


def _load_into(
    work: _Work, into: Mapping[str, torch.Tensor], names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    entries = entries_by_name(work.reader.manifest)
    windows = {name: window_of(name, into[name]) for name in names}
    if work.verify:
        _check_all(
            work, {(entries[name].name, window.box): entries[name] for name, window in windows.items()}
        )
    for name, window in windows.items():
        work.fill_window(entries[name], window)
    return {name: into[name] for name in names}


def _check_all(work: _Work, wanted: Mapping[tuple[str, Box], TensorEntry]) -> None:
    """Hash everything that is about to be read."""
    for (name, box), entry in wanted.items():
        for part in needed(work.reader, entry, box):
            work.precheck(name, part.extents)
    for blob in work.reader.manifest.blobs:
        work.precheck(blob.name, work.reader.extents_of(blob.placed))


def verify_step(reader: StepReader) -> int:
    """Decode and hash every byte of a step and check its padding; returns raw bytes checked. CorruptError if bad."""
    scratch, out = new_scratch(), new_scratch()
    total = 0
    for stream in reader.manifest.streams():
        for file, number, extent in reader.extents_of(stream.placed):
            reader.read(file, number, out[: extent.raw_bytes], scratch, stream.name, verify=True)
            total += extent.raw_bytes
    reader.check_unused()
    return total


def describe(error: BaseException) -> str:
    """Reason of a fallback in one line."""
    return str(error) if isinstance(error, CorruptError) else f"{type(error).__name__}: {error}"


def verified_base(reader: StepReader, store_id: str, rank: int = 0) -> Base | None:
    """What of a step that was read and verified in full can serve as base of a rank: the extents of the file of its
    name, or those that file refers to. None when there is no such file, or the step is of another store.
    """
    manifest = reader.manifest
    name = data_file_name(rank)
    at = next((i for i, file in enumerate(manifest.files) if file.name == name), None)
    if manifest.store != store_id or at is None:
        return None
    extents = reader.data[at].extents
    if manifest.parent is None:
        return Base(manifest.folder, manifest.root, {e.raw_hash: number for number, e in enumerate(extents)})
    return Base(
        manifest.parent.folder,
        manifest.parent.root,
        {e.raw_hash: e.place for e in extents if e.codec == SAME},
    )


def _same_kind(entry: TensorEntry, tensor: torch.Tensor) -> bool:
    return entry.shape == tuple(tensor.shape) and dtype_of(entry.dtype) == tensor.dtype


def _copy_back(place: torch.Tensor, flat: torch.Tensor, begin: int) -> None:
    copy_range(flat, place, begin, back=True)


def _flat_bytes(tensor: torch.Tensor) -> Bytes:
    """Bytes of a contiguous host tensor, shared with it."""
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    # A contiguous tensor of one element may have any stride, and view(uint8) insists on 1.
    flat: Bytes = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


def _scratch() -> tuple[Bytes, Bytes]:
    if not hasattr(_local, "buffers"):
        _local.buffers = (np.empty(EXTENT_BYTES, np.uint8), np.empty(EXTENT_BYTES, np.uint8))
    buffers: tuple[Bytes, Bytes] = _local.buffers
    return buffers


def _drain(results: Iterable[None]) -> None:
    for _ in results:
        pass
