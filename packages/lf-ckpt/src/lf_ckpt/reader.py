"""Reading one step: manifest, data files and those of its base, and every check on the way. Needs no lock."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol

import numpy as np

from .codec import Bytes, CodecError
from .deltas import decode
from .errors import CorruptError
from .files import gone, read_all
from .format import (
    ALIGN,
    DELTAS,
    EXTENT_BYTES,
    HEADER_BYTES,
    RAW,
    SAME,
    TRAILER_BYTES,
    Extent,
    Trailer,
    align,
    hash128,
    parse_header,
    parse_index,
    parse_trailer,
)
from .manifest import MANIFEST_LIMIT, PUBLISH, DataFile, Manifest, Placed, StreamKey, rank_of
from .manifest_text import parse
from .storage import Storage

MANIFEST = "MANIFEST"
MAX_CHAIN: Final = 200  # links of a published chain; each is an open file while the last one is read
_local = threading.local()


def read_manifest(files: Storage, steps: str, folder: str) -> Manifest:
    """Parse `steps/folder/MANIFEST`; CorruptError, or OSError when it is not there."""
    data = manifest_bytes(files, steps, folder)
    return parse_manifest(data, os.path.join(steps, folder, MANIFEST), folder)


def manifest_bytes(files: Storage, steps: str, folder: str) -> bytes:
    """Content of `steps/folder/MANIFEST`; CorruptError when it is too large, OSError when it is not there."""
    path = os.path.join(steps, folder, MANIFEST)
    data = read_all(files, path, MANIFEST_LIMIT)
    if data is None:
        raise CorruptError(path, "manifest is too large", expected=f"<= {MANIFEST_LIMIT}")
    return data


def parse_manifest(data: bytes, path: str, folder: str) -> Manifest:
    """The manifest of the step in `folder` from its bytes; CorruptError."""
    manifest = parse(data, path)
    if manifest.folder != folder:
        raise CorruptError(path, "manifest belongs to another step", expected=folder, found=manifest.folder)
    return manifest


class Direct(Protocol):
    """Reads past the page cache; see fetch.py."""

    def read(self, view: Bytes, offset: int) -> int:
        """Fill `view` from `offset`; the bytes read."""


@dataclass
class OpenFile:
    """An open, structurally checked data file."""

    files: Storage
    path: str
    fd: int
    trailer: Trailer
    extents: list[Extent]
    base: OpenFile | None = None  # the base's file of the same name, when this step is a delta
    direct: Direct | None = None  # another way to read it, while a load is under way
    parents: dict[int, int] = field(default_factory=dict)  # extent with a delta codec -> extent of `base`

    def read(self, view: Bytes, offset: int) -> int:
        """Fill `view` from `offset`, where an extent begins; the bytes read, fewer only at the end of the file."""
        if self.direct is not None:
            return self.direct.read(view, offset)
        return self.files.read(self.fd, view.data, offset)

    def lineage(self) -> Iterator[OpenFile]:
        """This file, its base, and so on."""
        file: OpenFile | None = self
        while file is not None:
            yield file
            file = file.base

    def find(self, numbers: range, start: int, raw_bytes: int) -> int | None:
        """Which of these consecutive extents of a stream begins at `start` and has that length."""
        at = bisect_left(numbers, start, key=lambda number: self.extents[number].start)
        if at == len(numbers):
            return None
        found = self.extents[numbers[at]]
        return numbers[at] if (found.start, found.raw_bytes) == (start, raw_bytes) else None

    def stored(self, number: int, scratch: Bytes, name: str) -> Bytes:
        """The stored bytes of an extent, in `scratch`."""
        extent = self.extents[number]
        view = scratch[: extent.stored_bytes]
        got = self.read(view, extent.place)
        if got != extent.stored_bytes:
            raise CorruptError(
                self.path, "file is cut", tensor=name, extent=number, offset=extent.place,
                expected=extent.stored_bytes, found=got,
            )  # fmt: skip
        return view

    def check_hash(self, number: int, data: Bytes, name: str, *, raw: bool) -> None:
        """CorruptError when `data` does not hash to what the index says."""
        extent = self.extents[number]
        expected = extent.raw_hash if raw else extent.stored_hash
        found = hash128(data.data)
        if found != expected:
            what = "decoded bytes" if raw else "stored bytes"
            raise CorruptError(
                self.path, f"{what} differ from their hash", tensor=name, extent=number, offset=extent.place,
                expected=expected.hex(), found=found.hex(),
            )  # fmt: skip


class StepReader:
    """An open step. A context manager; files stay open, so retention by a writer cannot pull them away."""

    def __init__(
        self,
        files: Storage,
        steps: str,
        folder: str,
        *,
        follow: bool = True,
        _manifest: Manifest | None = None,
        _depth: int = 0,
    ) -> None:
        """Check all structure: manifest, header, trailer, index, lengths, parent. CorruptError or OSError.

        follow=False leaves the parent alone, for one who has its bytes: extents that refer to it cannot be read then.
        """
        self._files, self._steps, self._follow, self._depth = files, steps, follow, _depth
        self._stack = ExitStack()
        self._places: dict[str, dict[StreamKey, range]] = {}  # of the base's files, by the path of ours
        try:
            self.manifest = _manifest or read_manifest(files, steps, folder)
            self.path = os.path.join(steps, folder)
            self.data = [self._open(folder, self.manifest, file) for file in self.manifest.files]
            if follow:
                self._open_base()
            self._check_streams()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> StepReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def kind(self) -> str:
        """ "full" or "delta"."""
        return "full" if self.manifest.parent is None else "delta"

    def extents_of(self, placed: Placed) -> Iterator[tuple[OpenFile, int, Extent]]:
        """(file, number, extent) of a stream in order."""
        file = self.data[placed.file]
        for number in range(placed.first, placed.first + placed.count):
            yield (file, number, file.extents[number])

    def read(
        self, file: OpenFile, number: int, out: Bytes, scratch: Bytes, name: str, *, verify: bool
    ) -> None:
        """Decode one extent into `out`, (raw_bytes,) uint8 contiguous; scratch: (1 MiB,) uint8."""
        before: Bytes | None = None
        line = self._line(file, number)
        # What stands alone comes first, then what was coded against it.
        for left in reversed(range(len(line))):
            target = out if left == 0 else _buffer(left % 2)[: out.size]
            _decode(*line[left], target, scratch, name, before, verify)
            before = target

    def check(self, file: OpenFile, number: int, scratch: Bytes, name: str) -> int:
        """Hash the stored bytes that one extent needs, its own and those of its parents; returns the bytes read."""
        total = 0
        for source, at in self._line(file, number):
            source.check_hash(at, source.stored(at, scratch, name), name, raw=False)
            total += source.extents[at].stored_bytes
        return total

    def _line(self, file: OpenFile, number: int) -> list[tuple[OpenFile, int]]:
        """The extent that holds these bytes, the one it was coded against, and so on to one that stands alone."""
        line: list[tuple[OpenFile, int]] = []
        at: int | None = number
        while at is not None:
            file, at = self.resolve(file, at)
            line.append((file, at))
            at = file.parents.get(at)
            file = file.base or file
        return line

    def check_unused(self) -> None:
        """CorruptError when alignment padding in the step's own files is not zero."""
        padding = np.empty(ALIGN, np.uint8)
        for file in self.data:
            for number, extent in enumerate(file.extents):
                end = extent.place + extent.stored_bytes
                view = padding[: align(end) - end]
                if extent.codec == SAME or not view.size:
                    continue
                if file.files.read(file.fd, view.data, end) != view.size or view.any():
                    raise CorruptError(file.path, "padding is not zero", extent=number, offset=end)

    def resolve(self, file: OpenFile, number: int) -> tuple[OpenFile, int]:
        """Where the bytes of an extent are: itself, or the extent of the base that it refers to."""
        while file.extents[number].codec == SAME:
            assert file.base is not None  # `_check_streams` refused references without a base
            file, number = file.base, file.extents[number].place
        return file, number

    def _open(self, folder: str, manifest: Manifest, entry: DataFile) -> OpenFile:
        path = os.path.join(self._steps, folder, entry.name)
        try:
            fd = self._files.open(path)
        except FileNotFoundError as error:
            if not self._files.exists(os.path.join(self._steps, folder, MANIFEST)):
                raise  # the step has just been retired; that is no damage
            raise CorruptError(path, "data file is missing") from error
        self._stack.callback(self._files.close, fd)
        size = self._files.size(fd)
        if size != entry.size:
            raise CorruptError(path, "file length differs", expected=entry.size, found=size)
        header = parse_header(self._bytes(fd, HEADER_BYTES, 0), path)
        trailer = parse_trailer(self._bytes(fd, TRAILER_BYTES, size - TRAILER_BYTES), size, path)
        if (header.step, header.store.hex()) != (manifest.step, manifest.store):
            raise CorruptError(
                path, "file belongs to another step", expected=manifest.step, found=header.step
            )
        place = (rank_of(entry.name), len(manifest.files))
        if (header.rank, header.world) != place:
            expected, found = f"rank {place[0]} of {place[1]}", f"rank {header.rank} of {header.world}"
            raise CorruptError(path, "file is that of another rank", expected=expected, found=found)
        index = self._bytes(fd, trailer.index_bytes, trailer.index_offset)
        parent = None if manifest.parent is None else bytes.fromhex(manifest.parent.root)
        if trailer.parent_root not in (None, parent):
            raise CorruptError(path, "file and manifest name different parents")
        extents = parse_index(index, trailer, path)
        if len(extents) != entry.extents or trailer.index_hash.hex() != entry.index_hash:
            expected, found = entry.index_hash, trailer.index_hash.hex()
            raise CorruptError(path, "index is not the one in the manifest", expected=expected, found=found)
        return OpenFile(self._files, path, fd, trailer, extents)

    def _bytes(self, fd: int, count: int, offset: int) -> bytes:
        data = bytearray(max(count, 0))
        return bytes(data[: self._files.read(fd, memoryview(data), max(offset, 0))])

    def _open_base(self) -> None:
        """Open the base's files beside those of the same name; other files of the base are not needed."""
        parent = self.manifest.parent
        if parent is None:
            return
        path = os.path.join(self._steps, parent.folder)
        try:
            manifest = read_manifest(self._files, self._steps, parent.folder)
        except OSError as error:
            if not gone(error):
                raise
            if not self._files.exists(os.path.join(self.path, MANIFEST)):
                raise  # this step has just been retired, and its base after it; that is no damage
            raise CorruptError(path, f"base of step {self.manifest.step} is missing") from error
        if manifest.root != parent.root:
            raise CorruptError(path, "base is another save", expected=parent.root, found=manifest.root)
        chained = self.manifest.profile == manifest.profile == PUBLISH
        if manifest.parent is not None and not chained:
            raise CorruptError(path, "base is not a full step")
        if self._depth == MAX_CHAIN:
            raise CorruptError(path, "chain of deltas is too long", expected=f"<= {MAX_CHAIN}")
        base = StepReader(self._files, self._steps, parent.folder, _manifest=manifest, _depth=self._depth + 1)
        self._stack.enter_context(base)
        named = {os.path.basename(file.path): (number, file) for number, file in enumerate(base.data)}
        for file in self.data:
            if (found := named.get(os.path.basename(file.path))) is not None:
                file.base = found[1]
                self._places[file.path] = manifest.places(found[0])

    def _check_streams(self) -> None:
        """Every stream's extents are its own, in order, and add up to its size; references fit the base."""
        for stream in self.manifest.streams():
            total = 0
            for file, at, extent in self.extents_of(stream.placed):
                total += extent.raw_bytes
                if extent.stream != stream.number:
                    raise CorruptError(file.path, "extent of another stream", tensor=stream.name, extent=at)
                if extent.raw_bytes % stream.element:
                    raise CorruptError(
                        file.path, "extent ends inside an element", tensor=stream.name, extent=at
                    )
                if not self._follow:
                    continue
                if extent.codec == SAME:
                    _check_reference(file, at, stream.name)
                elif extent.codec in DELTAS:
                    numbers = self._places.get(file.path, {}).get(stream.key, range(0))
                    file.parents[at] = _parent_number(file, at, numbers, stream.name)
            if total != stream.nbytes:
                raise CorruptError(
                    self.path, "extents do not add up", tensor=stream.name, expected=stream.nbytes,
                    found=total,
                )  # fmt: skip


def _decode(
    file: OpenFile, at: int, out: Bytes, scratch: Bytes, name: str, before: Bytes | None, verify: bool
) -> None:
    """Decode one extent, given the raw bytes of its parent if it has one."""
    extent = file.extents[at]
    if extent.codec == RAW:
        file.stored(at, out, name)
    else:
        stored = file.stored(at, scratch, name)
        if verify:
            file.check_hash(at, stored, name, raw=False)
        try:
            decode(extent.codec, stored.data, out, extent.width, before)
        except CodecError as error:
            raise CorruptError(file.path, str(error), tensor=name, extent=at, offset=extent.place) from error
    if verify:
        file.check_hash(at, out, name, raw=True)


def _check_reference(file: OpenFile, at: int, name: str) -> None:
    extent = file.extents[at]
    known = file.base.extents if file.base else []
    target = known[extent.place] if extent.place < len(known) else None
    if target is None or (target.raw_bytes, target.raw_hash) != (extent.raw_bytes, extent.raw_hash):
        raise CorruptError(file.path, "reference does not fit the base", tensor=name, extent=at)


def _parent_number(file: OpenFile, at: int, numbers: range, name: str) -> int:
    """The extent of the base that a delta was coded against: same stream, start and length."""
    extent = file.extents[at]
    number = file.base.find(numbers, extent.start, extent.raw_bytes) if file.base else None
    if file.base is None or number is None:
        raise CorruptError(file.path, "delta has no parent in the base", tensor=name, extent=at)
    return number


def _buffer(which: int) -> Bytes:
    """One of two buffers of this thread, between which a chain of deltas is decoded."""
    if not hasattr(_local, "buffers"):
        _local.buffers = (new_scratch(), new_scratch())
    buffers: tuple[Bytes, Bytes] = _local.buffers
    return buffers[which]


def new_scratch() -> Bytes:
    """Room for the stored bytes of one extent."""
    return np.empty(EXTENT_BYTES, np.uint8)
