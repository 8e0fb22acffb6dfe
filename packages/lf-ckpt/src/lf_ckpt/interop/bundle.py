"""A step as one self-contained file: `<name>.lfckpt` = a data file, its MANIFEST, and a footer (SPEC.md, section 6).

The step is written anew as a full one of one data file, so a bundle refers to nothing. It is read by `StepReader`,
through a storage in which the two parts are the files of a step: every check of a store holds.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
import xxhash

from ..codec import Bytes
from ..errors import CkptError, CorruptError
from ..fetch import ReadIo
from ..files import FileLayer
from ..format import END_MAGIC, Header, align
from ..loading import Wanted, entries_by_name, load_step, verify_step
from ..manifest import (
    MANIFEST_LIMIT,
    BlobEntry,
    Manifest,
    TensorEntry,
    data_file_name,
    unsharded,
)
from ..manifest_text import dump, parse
from ..naming import MapNames, select
from ..options import Compress
from ..plan import Chunk, Stream
from ..ranked import seen_by_one
from ..reader import MANIFEST, StepReader
from ..report import Loaded
from ..saving import versions
from ..sink import Sink
from ..storage import Storage
from ..store import Store
from ..typed import Collected
from ..writer import DataFileWriter
from .writing import ExportReport, publish_file, raw_pieces

FOOTER_BYTES: Final = 128
_MAGIC: Final = b"\x89LFCBUN\n"
_FOOTER: Final = struct.Struct("<8sHHIQQQ32s")
_SUM: Final = struct.Struct("<Q")
_VERSION: Final = (1, 0)


class Footer(NamedTuple):
    """The last 128 bytes: lengths of the data file, the manifest and the whole, and the root of the manifest."""

    data_bytes: int
    manifest_bytes: int
    file_bytes: int
    root: bytes


def pack_footer(footer: Footer) -> bytes:
    """128 bytes."""
    fixed = _FOOTER.pack(_MAGIC, *_VERSION, 0, *footer).ljust(FOOTER_BYTES - _SUM.size, b"\0")
    return fixed + _SUM.pack(xxhash.xxh3_64_intdigest(fixed))


def parse_footer(data: bytes, file_bytes: int, path: str) -> Footer:
    """Check the last 128 bytes of `path` against its length."""
    at = max(file_bytes - FOOTER_BYTES, 0)
    if len(data) != FOOTER_BYTES or data[:8] != _MAGIC:
        reason = "not an .lfckpt bundle, or it is cut"
        if data[:8] == END_MAGIC:  # also of a bundle that was cut after its first part
            reason += ": it ends as the data file of a step does, which is read through its store"
        raise CorruptError(path, reason, offset=at)
    expected, found = _SUM.unpack(data[-8:])[0], xxhash.xxh3_64_intdigest(data[:-8])
    if expected != found:
        raise CorruptError(
            path, "footer checksum differs", offset=at, expected=f"{expected:016x}", found=f"{found:016x}"
        )
    _, major, _, features, *rest = _FOOTER.unpack_from(data)
    if major != _VERSION[0] or features:
        found_version = f"{major}, features {features:#x}"
        raise CorruptError(
            path, "written by a newer lf-ckpt", offset=at + 8, expected="1", found=found_version
        )
    footer = Footer(*rest)
    if footer.file_bytes != file_bytes or sum(footer[:2]) + FOOTER_BYTES != file_bytes:
        raise CorruptError(path, "file length differs", expected=footer.file_bytes, found=file_bytes)
    return footer


def export_file(
    store: Store,
    step: int | Literal["latest"],
    path: str | os.PathLike[str],
    *,
    only: str | Sequence[str] | None = None,
    compress: Compress = "auto",
    canonical: bool = False,
    rank: int = 0,
    files: Storage | None = None,
) -> ExportReport:
    """Write a step (a delta with what it takes from its base, shards put together) as one new file.

    only: names or shell globs of the tensors to export; items are always in. rank: whose values that are kept per rank
    come with it, under their plain names; those of other ranks do not. canonical: raw bytes, no time, no ids and
    no library versions, so that the same state gives the same file everywhere. The file appears complete or not at all.
    Raises CorruptError (a step that does not verify) and CkptError.
    """
    layer, target = files or FileLayer(), os.path.abspath(path)
    with store._open_step(step) as reader:
        source = seen_by_one(reader.manifest, rank)
        entries = entries_by_name(source)
        chosen = select(entries, only)
        # In order of name, whatever order the state was given in; of tied names the first stands for the tensor.
        named = _chosen(source, sorted(chosen) if canonical else chosen)
        job = _Job(layer, reader, source, named, "raw" if canonical else compress, canonical)
        try:
            publish_file(layer, target, job.write)
        except OSError as error:
            raise CkptError(f"{target}: cannot be written: {error}") from error
        kept = job.manifest
        return ExportReport(
            step=source.step,
            path=target,
            files=((os.path.basename(target), job.size),),
            tensors=len(kept.tensors),
            bytes_raw=kept.raw_bytes,
            aliases=tuple(sorted(kept.aliases.items())),
            left_out=len(entries_by_name(reader.manifest)) - len(chosen),
        )


def load_file(
    path: str | os.PathLike[str],
    into: Mapping[str, torch.Tensor] | None = None,
    *,
    only: str | Sequence[str] | None = None,
    map_names: MapNames | None = None,
    reshape: bool = False,
    cast: bool = False,
    device: str | torch.device | None = None,
    strict: bool = True,
    verify: bool = True,
    io: ReadIo = "auto",
    files: Storage | None = None,
) -> Loaded:
    """Load a bundle; the options are those of `Store.load`. CorruptError when it is damaged, CkptError without it."""
    wanted = Wanted.of(
        device,
        into=into,
        only=only,
        map_names=map_names,
        reshape=reshape,
        cast=cast,
        strict=strict,
        verify=verify,
        io=io,
    )
    with bundle_reader(path, files) as reader:
        return load_step(reader, wanted, min(4, os.cpu_count() or 1))


def verify_file(path: str | os.PathLike[str], files: Storage | None = None) -> int:
    """Decode and hash every byte of a bundle; returns the raw bytes checked. CorruptError when it is damaged."""
    with bundle_reader(path, files) as reader:
        return verify_step(reader)


def import_file(path: str | os.PathLike[str], files: Storage | None = None) -> Collected:
    """Tensors and items of a bundle, verified, for `store.save(step, *imported)`."""
    loaded = load_file(path, files=files)
    return Collected(loaded.tensors, loaded.items)


def is_bundle(path: str | os.PathLike[str], files: Storage | None = None) -> bool:
    """Whether a file ends as a bundle does; it may still be damaged."""
    layer = files or FileLayer()
    fd = layer.open(os.path.abspath(path))
    try:
        return _tail(layer, fd)[:8] == _MAGIC
    finally:
        layer.close(fd)


@contextmanager
def bundle_reader(path: str | os.PathLike[str], files: Storage | None = None) -> Iterator[StepReader]:
    """The step in a bundle, opened and checked in structure as one of a store."""
    layer, target = files or FileLayer(), os.path.abspath(path)
    try:
        fd = layer.open(target)
    except OSError as error:
        raise CkptError(f"{target}: cannot be read: {error}") from error
    try:
        try:
            size, tail = layer.size(fd), _tail(layer, fd)
        except OSError as error:  # a directory can be opened, and not read
            raise CkptError(f"{target}: cannot be read: {error}") from error
        footer = parse_footer(tail, size, target)
        inside = _Inside(layer, fd, target, footer)
        with StepReader(inside, target, inside.folder()) as reader:
            if reader.manifest.root != footer.root.hex():
                raise CorruptError(
                    target,
                    "manifest root hash differs",
                    expected=footer.root.hex(),
                    found=reader.manifest.root,
                )
            if reader.manifest.parent is not None or len(reader.manifest.files) != 1:
                raise CorruptError(target, "a bundle is a full step of one data file")
            yield reader
    finally:
        layer.close(fd)


def _tail(files: Storage, fd: int) -> bytes:
    data = bytearray(FOOTER_BYTES)
    return bytes(data[: files.read(fd, memoryview(data), max(files.size(fd) - FOOTER_BYTES, 0))])


_DATA: Final = -1
_MANIFEST: Final = -2


class _Inside(FileLayer):
    """A storage with two files, which are runs of bytes of a bundle, under the two descriptors above.

    The data file begins where the bundle does, so direct reads of the bundle are direct reads of it.
    """

    def __init__(self, files: Storage, fd: int, path: str, footer: Footer) -> None:
        self.traits = files.traits
        self._files, self._fd, self._path = files, fd, path
        self._runs = {
            _DATA: (0, footer.data_bytes),
            _MANIFEST: (footer.data_bytes, footer.manifest_bytes),
        }

    def folder(self) -> str:
        """Name of the step's folder, as the manifest has it; the reader then holds the manifest to it."""
        length = self.size(_MANIFEST)
        if length > MANIFEST_LIMIT:
            raise CorruptError(self._path, "manifest is too large", expected=f"<= {MANIFEST_LIMIT}")
        text = bytearray(length)
        self.read(_MANIFEST, memoryview(text), 0)
        return parse(bytes(text), self._path).folder

    def open(self, path: str) -> int:
        """One of the two."""
        name = os.path.basename(path)
        if not self.exists(path):
            raise FileNotFoundError(f"{path}: a bundle has one data file")
        return _MANIFEST if name == MANIFEST else _DATA

    def open_direct_read(self, path: str) -> int | None:
        """The bundle itself."""
        return self._files.open_direct_read(self._path) if isinstance(self._files, FileLayer) else None

    def cached(self, fd: int, offset: int) -> bool:
        """As for the bundle."""
        return isinstance(self._files, FileLayer) and self._files.cached(self._fd, self._runs[fd][0] + offset)

    def close(self, fd: int) -> None:
        """The bundle stays open until its reader is closed."""
        if fd not in self._runs:
            self._files.close(fd)

    def exists(self, path: str) -> bool:
        """By the last part of the path."""
        return os.path.basename(path) in (MANIFEST, data_file_name(0))

    def size(self, fd: int) -> int:
        """Of a run."""
        return self._runs[fd][1]

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        """Within a run, or of the bundle through a descriptor of `open_direct_read`."""
        if fd not in self._runs:
            return self._files.read(fd, view, offset)
        start, length = self._runs[fd]
        inside = max(min(len(view), length - offset), 0)
        return self._files.read(self._fd, view[:inside], start + offset) if inside else 0


def _chosen(source: Manifest, names: Sequence[str]) -> tuple[list[TensorEntry], dict[str, str]]:
    """Tensors to write, each under its first chosen name, and the other chosen names -> that one."""
    entries = entries_by_name(source)
    first: dict[str, str] = {}
    aliases: dict[str, str] = {}
    tensors = []
    for name in names:
        entry = entries[name]
        if entry.name in first:
            aliases[name] = first[entry.name]
            continue
        first[entry.name] = name
        tensors.append(TensorEntry(name, entry.dtype, entry.shape, entry.shards))
    return tensors, aliases


class _Job:
    """One bundle being written."""

    def __init__(
        self,
        files: Storage,
        reader: StepReader,
        source: Manifest,
        chosen: tuple[list[TensorEntry], dict[str, str]],
        compress: Compress,
        canonical: bool,
    ) -> None:
        self._files, self._reader, self._source = files, reader, source
        self._compress, self._canonical = compress, canonical
        self._tensors, self._aliases = chosen
        self.manifest: Manifest
        self.size = 0

    def write(self, fd: int) -> None:
        """Data file, manifest, footer."""
        source, fixed = self._source, self._canonical
        store = "0" * 32 if fixed else source.store
        blobs = sorted(source.blobs, key=lambda b: b.name) if fixed else list(source.blobs)
        entries: list[TensorEntry | BlobEntry] = [*self._tensors, *blobs]
        streams = [_stream(entry) for entry in entries]
        header = Header(source.step, 0, 1, bytes.fromhex(store), bytes(16) if fixed else os.urandom(16))
        writer = DataFileWriter(Sink(self._files, [fd]), header, streams, None, self._compress)
        writer.start()
        for number, entry in enumerate(entries):
            start = 0
            for piece in raw_pieces(self._reader, entry):
                writer.add(Chunk(number, start, piece.size), _room(piece), lambda: None)
                start += piece.size
        file = writer.finish()
        placed = writer.placed()
        count = len(self._tensors)
        self.manifest = Manifest(
            store=store,
            step=source.step,
            folder=str(source.step),
            created=0 if fixed else int(time.time()),
            parent=None,
            files=(file,),
            tensors=tuple(
                unsharded(t.name, t.dtype, t.shape, at)
                for t, at in zip(self._tensors, placed[:count], strict=True)
            ),
            aliases=self._aliases,
            blobs=tuple(BlobEntry(b.name, b.nbytes, at) for b, at in zip(blobs, placed[count:], strict=True)),
            items=source.items,
            versions={} if fixed else versions(),
            metrics=source.metrics,
        )
        text, root = dump(self.manifest)
        self.size = file.size + len(text) + FOOTER_BYTES
        footer = pack_footer(Footer(file.size, len(text), self.size, bytes.fromhex(root)))
        self._files.write(fd, [text, footer], file.size)


def _stream(entry: TensorEntry | BlobEntry) -> Stream:
    if isinstance(entry, BlobEntry):
        return Stream(entry.name, "U8", (), entry.nbytes, b"")
    return Stream(entry.name, entry.dtype, entry.shape, entry.nbytes, torch.empty(0, device="cpu"))


def _room(piece: Bytes) -> Bytes:
    """A piece with room up to the next 4 KiB edge; pieces are parts of buffers of 1 MiB."""
    room = np.zeros(align(piece.size), np.uint8)
    room[: piece.size] = piece
    return room
