"""From raw extents to stored ones: what the base has already, else the codec of the stream; spread over threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .choose import Choice, StreamChooser
from .codec import Bytes, Layout
from .deltas import dirty_units, encode, encode_dirty
from .format import DELTAS, DIRTY, PLANES, RAW, SAME, align, hash128
from .manifest import StreamKey
from .parents import ParentBytes
from .storage import Buffer

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Encoded:
    """An extent on its way to the file; `data` is empty for codec SAME, where `parent` is the base's extent."""

    codec: int
    raw_hash: bytes
    stored_hash: bytes
    data: Buffer
    parent: int = 0


class Encoder:
    """Encodes the extents of one save, stream after stream: `begin` each, then `encode` its extents in order.

    mode: see `StreamChooser`. table: raw hash of the base's extents -> their numbers; parents: their bytes, for deltas;
    both None in a full save. keeping: takes the raw bytes for later deltas. smallest: bytes of an extent below which it
    alone does not tie the save to its base.
    """

    def __init__(
        self,
        mode: str,
        table: Mapping[bytes, int] | None = None,
        parents: ParentBytes | None = None,
        keeping: ParentBytes | None = None,
        pool: Executor | None = None,
        smallest: int = 0,
    ) -> None:
        self._mode, self._table, self._parents, self._keeping = mode, table, parents, keeping
        self._pool, self._smallest = pool, smallest
        self._key: StreamKey = ()
        self._width = 1
        self._chooser = StreamChooser(1, "raw")
        self.tied = False  # whether an extent refers to the base
        self.alone_bytes = 0.0  # what the extents would take without a base, as far as samples tell

    def begin(self, key: StreamKey, width: int) -> None:
        """Start a stream of numbers of `width` bytes."""
        self.end()
        self._key, self._width = key, width
        self._chooser = StreamChooser(width, self._mode, self._parent, self._dirty, lambda: self.tied)

    def end(self) -> None:
        """End of a stream: where no delta paid, none is tried again on this base."""
        if self._parents is not None and self._chooser.refused:
            self._parents.refuse(self._key)

    def encode(self, start: int, pieces: list[Bytes]) -> list[Encoded]:
        """Consecutive extents, the first at `start` of the stream. Raw ones share their memory with `pieces`."""
        hashes = self._each(lambda piece: hash128(piece.data), pieces)
        jobs = []
        for piece, digest in zip(pieces, hashes, strict=True):
            same = self._same(digest, piece.size)
            choice = None if same is not None else self._chooser.choose(start, piece)
            self.alone_bytes += piece.size * (1.0 if choice is None else choice.full)
            self.tied |= choice is None or choice.codec in DELTAS
            jobs.append((start, piece, digest, same, choice))
            start += piece.size
        return self._each(lambda job: self._one(*job), jobs)

    def _each(self, work: Callable[[T], R], jobs: list[T]) -> list[R]:
        spread: Callable[[Callable[[T], R], Iterable[T]], Iterable[R]] = map
        if self._pool is not None and len(jobs) > 1:
            spread = self._pool.map
        return list(spread(work, jobs))

    def _one(self, start: int, raw: Bytes, digest: bytes, same: int | None, choice: Choice | None) -> Encoded:
        if self._keeping is not None:
            self._keeping.keep(self._key, start, raw)
        if choice is None:
            assert same is not None
            return Encoded(SAME, digest, bytes(16), b"", same)
        codec, payload = choice.codec, None
        if codec in DELTAS:
            payload = self._delta(codec, choice.layout, start, raw)
            codec = codec if payload is not None else choice.alone
        if codec == PLANES:
            payload = encode(PLANES, choice.plain, raw, self._width, None)
        if payload is None or align(len(payload)) >= align(raw.size):
            return Encoded(RAW, digest, digest, raw.data)
        return Encoded(codec, digest, hash128(payload), payload)

    def _delta(self, codec: int, layout: Layout, start: int, raw: Bytes) -> bytes | None:
        """Payload against the base; None when the base lacks the extent, fails, or has the same bytes."""
        units = self._dirty(start, raw) if codec == DIRTY else None
        if units is None:
            before = self._parent(start, raw.size)
            if before is None:
                return None
            if codec != DIRTY:
                return encode(codec, layout, raw, self._width, before)
            units = dirty_units(raw, before)
        return encode_dirty(raw, self._width, units, layout)

    def _same(self, digest: bytes, size: int) -> int | None:
        return self._table.get(digest) if self._table is not None and self._may_refer(size) else None

    def _parent(self, start: int, size: int) -> Bytes | None:
        if self._parents is None or not self._may_refer(size):
            return None
        return self._parents.extent(self._key, start, size)

    def _dirty(self, start: int, raw: Bytes) -> npt.NDArray[np.bool_] | None:
        if self._parents is None or not self._may_refer(raw.size):
            return None
        return self._parents.dirty(self._key, start, raw)

    def _may_refer(self, size: int) -> bool:
        """Whether the base is good, and this extent large enough or the save tied to the base anyway."""
        failed = self._parents is not None and self._parents.failed is not None
        return not failed and (self.tied or size >= self._smallest)
