"""Writing one data file: staged chunks become extents, then index and trailer. Runs in the store's writer thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from .codec import Bytes, PlaneChooser, encode_planes
from .errors import CkptError
from .format import (
    EXTENT_BYTES,
    HEADER_BYTES,
    PLANES,
    RAW,
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
from .plan import Chunk, Stream
from .sink import Sink
from .storage import Buffer


@dataclass(frozen=True)
class Base:
    """The full step that deltas refer to: raw hash of an extent -> its number in the base's data file."""

    folder: str
    root: str
    table: Mapping[bytes, int]


@dataclass
class Encoded:
    """An extent on its way to the file; `data` is empty for codec SAME."""

    codec: int
    raw_hash: bytes
    stored_hash: bytes
    data: Buffer
    parent: int = 0


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
    extents: list[Extent] = field(default_factory=list)
    codec_bytes: dict[int, int] = field(default_factory=dict)
    _place: int = HEADER_BYTES
    _chooser: PlaneChooser = field(default_factory=lambda: PlaneChooser(1, "raw"))

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
            self._chooser = PlaneChooser(stream.width, self.compress)
        pieces = [raw[at : at + EXTENT_BYTES] for at in range(0, chunk.length, EXTENT_BYTES)]
        encoded = self._encode_all(pieces, stream)
        self._number(chunk, pieces, encoded, stream.width)
        self._write(room, encoded, landed)

    def _encode_all(self, pieces: list[Bytes], stream: Stream) -> list[Encoded]:
        """Encode the extents of a chunk, in the pool when there is one; masks are chosen here, in order."""
        masks = [self._chooser.mask(piece) for piece in pieces]
        jobs = [
            (piece, stream.width, mask, self._table_for(piece))
            for piece, mask in zip(pieces, masks, strict=True)
        ]
        if self.pool is None or len(jobs) == 1:
            return [_encode(*job) for job in jobs]
        return list(self.pool.map(lambda job: _encode(*job), jobs))

    def _table_for(self, piece: Bytes) -> Mapping[bytes, int] | None:
        """The base's hashes, but not for an extent so small that it is not worth tying the step to its base."""
        return None if self.base is None or piece.size < self.smallest_shared else self.base.table

    def _number(self, chunk: Chunk, pieces: list[Bytes], encoded: list[Encoded], width: int) -> None:
        """Index records for the extents of a chunk."""
        start, place = chunk.start, self._place
        for piece, e in zip(pieces, encoded, strict=True):
            same, stored = e.codec == SAME, len(e.data)
            at = e.parent if same else place
            record = (chunk.stream, e.codec, width, start, piece.size, stored, at, e.raw_hash, e.stored_hash)
            self.extents.append(Extent(*record))
            self.codec_bytes[e.codec] = self.codec_bytes.get(e.codec, 0) + piece.size
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

    def finish(self) -> DataFile:
        """Append index and trailer; the caller fsyncs. A file that refers to nothing has no parent."""
        index = pack_index(self.extents)
        size = self._place + len(index) + TRAILER_BYTES
        parent = bytes.fromhex(self.base.root) if self.base and self.shared_bytes else None
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


def _encode(raw: Bytes, width: int, mask: int, base: Mapping[bytes, int] | None) -> Encoded:
    digest = hash128(raw.data)
    if base is not None and digest in base:
        return Encoded(SAME, digest, bytes(16), b"", base[digest])
    packed = encode_planes(raw, width, mask)
    if packed is None or align(len(packed)) == align(raw.size):
        return Encoded(RAW, digest, digest, raw.data)
    return Encoded(PLANES, digest, hash128(packed), packed)
