"""A step's bytes in host memory, brought from link to link of a published chain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from .boxes import whole
from .codec import Bytes, CodecError
from .deltas import decode
from .dtypes import dtype_of
from .errors import CorruptError, MismatchError, UnsupportedError
from .format import RAW, SAME
from .jsonio import Json
from .loading import entries_by_name
from .local import is_sharded
from .manifest import Manifest, StoredStream, StreamKey, shard_key
from .reader import OpenFile, StepReader, new_scratch
from .staging import copy_range

Range = tuple[int, int]
"""First byte and length."""


@dataclass
class Held:
    """One stream: its bytes, the raw hash of each extent by (start, length), and what has changed since `settle`."""

    data: Bytes
    hashes: dict[Range, bytes] = field(default_factory=dict)
    changed: list[Range] = field(default_factory=list)


class Replica:
    """All streams of the step of `manifest`. Made by `Replica.read`."""

    def __init__(self, manifest: Manifest, held: dict[StreamKey, Held], bytes_read: int) -> None:
        self.manifest, self._held, self.bytes_read = manifest, held, bytes_read
        self.broken = False

    @classmethod
    def read(cls, reader: StepReader) -> Replica:
        """Read and verify a whole step. CorruptError; UnsupportedError for a step of several ranks."""
        _check_whole(reader.manifest)
        held: dict[StreamKey, Held] = {}
        scratch, total = new_scratch(), 0
        for stream in reader.manifest.streams():
            into = held[stream.key] = Held(np.empty(stream.nbytes, np.uint8))
            for file, number, extent in reader.extents_of(stream.placed):
                view = into.data[extent.start : extent.start + extent.raw_bytes]
                reader.read(file, number, view, scratch, stream.name, verify=True)
                into.hashes[extent.start, extent.raw_bytes] = extent.raw_hash
                total += extent.stored_bytes
        return cls(reader.manifest, held, total)

    def apply(self, reader: StepReader) -> int:
        """Go on to the next link, whose parent is the step held; returns the stored bytes read.

        Every stored byte has passed its hash before the first byte changes: CorruptError leaves everything as it was,
        except when decoded bytes fail theirs (then what is held was damaged in memory), which sets `broken`.
        UnsupportedError for a link that takes bytes from another place than their own, or has other tensors.
        """
        fresh = [found for stream in reader.manifest.streams() for found in self._new(reader, stream)]
        self.broken = True
        scratch = (new_scratch(), new_scratch())
        for new in fresh:
            new.decode(*scratch)
        self.broken = False
        self.manifest = reader.manifest
        return sum(new.stored.size for new in fresh)

    def _new(self, reader: StepReader, stream: StoredStream) -> Iterator[_New]:
        """The extents of a stream that differ from what is held, their stored bytes read and checked."""
        held = self._held.get(stream.key)
        if held is None:
            raise UnsupportedError(f"{stream.name}: the step before has no such tensor")
        for file, number, extent in reader.extents_of(stream.placed):
            if held.hashes.get((extent.start, extent.raw_bytes)) == extent.raw_hash:
                continue
            if extent.codec == SAME:
                raise UnsupportedError(f"{stream.name}: extent {number} has moved")
            stored = file.stored(number, np.empty(extent.stored_bytes, np.uint8), stream.name)
            file.check_hash(number, stored, stream.name, raw=False)
            yield _New(held, file, number, stored, stream.name)

    def check(self, into: Mapping[str, torch.Tensor]) -> None:
        """MismatchError unless names, shapes and dtypes of `into` are those of the step."""
        entries = entries_by_name(self.manifest)
        missing = [name for name in into if name not in entries]
        unexpected = [name for name in entries if name not in into]
        mismatched = [
            f"{name}: {e.dtype}{list(e.shape)} -> {into[name].dtype}{list(into[name].shape)}"
            for name, e in entries.items()
            if name in into and (dtype_of(e.dtype), e.shape) != (into[name].dtype, tuple(into[name].shape))
        ]
        if missing or unexpected or mismatched:
            raise MismatchError(missing, unexpected, mismatched)
        if sharded := [name for name, tensor in into.items() if is_sharded(tensor)]:
            raise UnsupportedError(f"{sharded[0]}: a DTensor; give its local or full tensor")

    def copy(self, name: str, tensor: torch.Tensor, *, everything: bool) -> int:
        """Write what has changed since `settle`, or everything, into a tensor that `check` has seen; bytes written."""
        entry = entries_by_name(self.manifest)[name]
        held = self._held[shard_key(entry.name, entry.dtype, entry.shape, whole(entry.shape))]
        total = 0
        for start, length in [(0, held.data.size)] if everything else sorted(set(held.changed)):
            flat = torch.from_numpy(held.data[start : start + length]).view(tensor.dtype)
            copy_range(flat, tensor, start // tensor.element_size(), back=True)
            total += length
        return total

    def settle(self) -> None:
        """Everything that has changed has been copied."""
        for held in self._held.values():
            held.changed.clear()

    def items(self) -> dict[str, Json]:
        """JSON items and bytes items."""
        keys = {stream.name: stream.key for stream in self.manifest.streams()}
        blobs = {entry.name: self._held[keys[entry.name]].data.tobytes() for entry in self.manifest.blobs}
        return {**self.manifest.items, **blobs}


@dataclass
class _New:
    """An extent of the next link: its stored bytes, and where its raw bytes go."""

    held: Held
    file: OpenFile
    number: int
    stored: Bytes
    name: str

    def decode(self, before: Bytes, out: Bytes) -> None:
        """Decode, check, and replace what is held. before, out: (1 MiB,) uint8 scratch."""
        extent = self.file.extents[self.number]
        place = (extent.start, extent.raw_bytes)
        target = self.held.data[extent.start : extent.start + extent.raw_bytes]
        before, out = before[: target.size], out[: target.size]
        if extent.codec == RAW:
            out = self.stored
        else:
            before[:] = target
            try:
                decode(extent.codec, self.stored.data, out, extent.width, before)
            except CodecError as error:
                raise CorruptError(
                    self.file.path, str(error), tensor=self.name, extent=self.number
                ) from error
        self.file.check_hash(self.number, out, self.name, raw=True)
        target[:] = out
        self.held.hashes[place] = extent.raw_hash
        self.held.changed.append(place)


def _check_whole(manifest: Manifest) -> None:
    """UnsupportedError for a step whose tensors are in pieces."""
    for entry in manifest.tensors:
        if len(entry.shards) != 1:
            raise UnsupportedError(
                f"{entry.name}: published by several ranks; publish whole tensors from one"
            )
