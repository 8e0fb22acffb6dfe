"""Writing one data file: staged chunks become extents, then index and trailer. Runs in the store's writer thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from .codec import Bytes
from .encoder import Encoded, Encoder
from .errors import CkptError
from .format import (
    DELTAS,
    EXTENT_BYTES,
    HEADER_BYTES,
    SAME,
    TRAILER_BYTES,
    Extent,
    Header,
    Trailer,
    align,
    hash128,
    pack_header,
    pack_index,
    pack_trailer,
)
from .manifest import DataFile, Placed, data_file_name
from .parents import ParentBytes
from .plan import Chunk, Stream
from .sink import Sink


@dataclass(frozen=True)
class Base:
    """The full step that deltas refer to: raw hash of an extent -> its number in the base's data file, and the bytes
    of its extents, None where there are to be no deltas of changed ones."""

    folder: str
    root: str
    table: Mapping[bytes, int]
    parents: ParentBytes | None = None


@dataclass
class DataFileWriter:
    """Appends extents to an open, empty `.lfckpt`. Call `add` per chunk in stream order, then `finish` once."""

    sink: Sink
    header: Header
    streams: Sequence[Stream]
    base: Base | None
    compress: str
    pool: Executor | None = None
    smallest_shared: int = 0
    keeping: ParentBytes | None = None
    extents: list[Extent] = field(default_factory=list)
    codec_bytes: dict[int, int] = field(default_factory=dict)
    codec_stored: dict[int, int] = field(default_factory=dict)
    _place: int = HEADER_BYTES
    _encoder: Encoder = field(init=False)

    def __post_init__(self) -> None:
        table, parents = (self.base.table, self.base.parents) if self.base else (None, None)
        self._encoder = Encoder(self.compress, table, parents, self.keeping, self.pool, self.smallest_shared)

    def start(self) -> None:
        """Write the header."""
        self.sink.put([pack_header(self.header)], 0)

    def add(self, chunk: Chunk, room: Bytes, landed: Callable[[], None]) -> None:
        """Encode and append one chunk.

        room: (align(chunk.length),) uint8, page-aligned, begins with the chunk; it is overwritten by the stored bytes,
        and is free when `landed` is called, by any thread.
        """
        stream = self.streams[chunk.stream]
        if room.size != align(chunk.length):
            raise CkptError(
                f"{stream.name}: {room.size} of {chunk.length} bytes staged; this is a bug in lf-ckpt"
            )
        raw = room[: chunk.length]
        if chunk.start == 0:
            self._encoder.begin(stream.key, stream.width)
        pieces = [raw[at : at + EXTENT_BYTES] for at in range(0, chunk.length, EXTENT_BYTES)]
        encoded = self._encoder.encode(chunk.start, pieces)
        self._number(chunk, pieces, encoded, stream.width)
        self._write(room, encoded, landed)

    def _number(self, chunk: Chunk, pieces: list[Bytes], encoded: list[Encoded], width: int) -> None:
        """Index records for the extents of a chunk."""
        start, place = chunk.start, self._place
        for piece, e in zip(pieces, encoded, strict=True):
            same, stored = e.codec == SAME, len(e.data)
            at = e.parent if same else place
            record = (chunk.stream, e.codec, width, start, piece.size, stored, at, e.raw_hash, e.stored_hash)
            self.extents.append(Extent(*record))
            self.codec_bytes[e.codec] = self.codec_bytes.get(e.codec, 0) + piece.size
            self.codec_stored[e.codec] = self.codec_stored.get(e.codec, 0) + stored
            start += piece.size
            place += align(stored)

    def _write(self, room: Bytes, encoded: list[Encoded], landed: Callable[[], None]) -> None:
        """Append the stored bytes of a chunk, each padded to 4 KiB, with one call."""
        size = _pack(room, encoded)
        if size:
            self.sink.submit(room[:size], self._place, landed)
        else:
            landed()
        self._place += size

    @property
    def shared_bytes(self) -> int:
        """Raw bytes that the base had."""
        return self.codec_bytes.get(SAME, 0)

    @property
    def refers(self) -> bool:
        """Whether an extent needs the base to be read."""
        return any(codec == SAME or codec in DELTAS for codec in self.codec_bytes)

    @property
    def worth(self) -> float:
        """Bytes stored, over those that a save without a base would store by what samples tell."""
        return (self._place - HEADER_BYTES) / max(self._encoder.alone_bytes, 1.0)

    def finish(self) -> DataFile:
        """Append index and trailer; the caller fsyncs. A file that refers to nothing has no parent."""
        self._encoder.end()
        index = pack_index(self.extents)
        size = self._place + len(index) + TRAILER_BYTES
        parent = bytes.fromhex(self.base.root) if self.base and self.refers else None
        digest = hash128(index)
        trailer = Trailer(self._place, len(index), len(self.extents), size, digest, parent)
        self.sink.put([index, pack_trailer(trailer)], self._place)
        return DataFile(data_file_name(self.header.rank), size, len(self.extents), digest.hex())

    def placed(self, file: int = 0) -> list[Placed]:
        """Where each stream landed, by stream number; `file` is the number of this file in the manifest."""
        counts = [0] * len(self.streams)
        for extent in self.extents:
            counts[extent.stream] += 1
        first, result = 0, []
        for count in counts:
            result.append(Placed(file, first, count))
            first += count
        return result

    def table(self) -> dict[bytes, int]:
        """Raw hash -> extent number, for the deltas of a full step."""
        return {extent.raw_hash: number for number, extent in enumerate(self.extents)}


def _pack(room: Bytes, encoded: list[Encoded]) -> int:
    """Move the stored bytes of a chunk to the front of its own memory, padded with zeros; returns the bytes used.

    Nothing stored is longer than what it stands for, and raw extents begin at 4 KiB edges, so what is moved never
    runs over what still has to be.
    """
    at = 0
    for e in encoded:
        end, stop = at + len(e.data), at + align(len(e.data))
        if e.data:
            source = np.frombuffer(e.data, np.uint8)
            if source.ctypes.data != room.ctypes.data + at:
                room[at:end] = source
        room[end:stop] = 0
        at = stop
    return at
