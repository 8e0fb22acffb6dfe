"""The base's bytes, which deltas are coded against: kept in host memory within a budget, else read back and checked."""

from __future__ import annotations

import os
import threading
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .codec import Bytes
from .deltas import unit_hashes
from .errors import CkptError, CorruptError
from .free_memory import available_memory
from .manifest import StreamKey, data_file_name
from .options import Options
from .reader import StepReader, new_scratch
from .storage import Storage

Hashes: TypeAlias = npt.NDArray[np.uint64]


def new_parents(options: Options, state_bytes: int, last: ParentBytes | None) -> ParentBytes | None:
    """Takes the bytes of a full save that is about to begin, in the memory of the `last` base; None without deltas.

    CkptError when parent="ram" cannot be met.
    """
    if not options.deltas:
        return None
    free = available_memory()
    held = last.kept_bytes if last is not None else 0
    budget = parent_budget(options, state_bytes, None if free is None else free + held)
    return ParentBytes(budget) if last is None else last.successor(budget)


def parent_budget(options: Options, state_bytes: int, available: int | None) -> int:
    """Bytes of the base to keep in memory. Pure; available: free memory, None when unknown."""
    if options.parent == "disk":
        return 0
    share = 1 if options.parent == "ram" else 4
    limit = options.parent_bytes
    if limit is None:
        limit = 1 << 30 if available is None else available // share
    if options.parent == "ram" and state_bytes > limit:
        raise CkptError(
            f'parent="ram": the state of {state_bytes} bytes does not fit {limit}; raise parent_bytes, or use '
            'parent="auto", which reads back what does not fit'
        )
    return limit


def stored_parents(files: Storage, steps: str, folder: str, root: str, rank: int = 0) -> ParentBytes:
    """Those of a committed full step, nothing of it in memory."""
    parents = ParentBytes(0, hashes=False)
    parents.bind(StoredBase(files, steps, folder, root, rank))
    return parents


class BaseFile(Protocol):
    """Where bytes of a base that are not in memory come from."""

    def extent(self, key: StreamKey, start: int, length: int) -> Bytes | None:
        """Checked raw bytes, None when the base has no such extent; CorruptError or OSError when it fails."""
        ...

    def close(self) -> None:
        """Close its files until the next `extent`."""
        ...


class ParentBytes:
    """Raw bytes of the extents of one rank's base. `keep` and `extent` may be called from several threads.

    budget: bytes to keep in memory. What does not fit leaves 8 bytes of hash per 4 KiB, enough to find dirty units.
    """

    def __init__(self, budget: int, *, hashes: bool = True) -> None:
        self.budget = budget
        self.failed: str | None = None  # why the base can serve no longer
        self.kept_bytes = self.read_bytes = 0
        self.refused: set[StreamKey] = set()
        self._hashes = hashes
        self._source: BaseFile | None = None
        self._kept: dict[tuple[StreamKey, int], Bytes] = {}
        self._spare: dict[tuple[StreamKey, int], Bytes] = {}
        self._units: dict[tuple[StreamKey, int], Hashes] = {}
        self._lock = threading.Lock()

    def successor(self, budget: int) -> ParentBytes:
        """An empty one for the next base that reuses this one's memory; this one keeps nothing."""
        after = ParentBytes(budget, hashes=self._hashes)
        after._spare, self._kept = self._kept, {}
        self.close()
        return after

    def keep(self, key: StreamKey, start: int, raw: Bytes) -> None:
        """Take a copy of an extent that is being written, or its unit hashes."""
        with self._lock:
            fits = self.kept_bytes + raw.size <= self.budget
            self.kept_bytes += raw.size if fits else 0
            room = self._spare.pop((key, start), None)
        if fits:
            if room is None or room.size != raw.size:
                room = np.empty(raw.size, np.uint8)
            room[:] = raw
            self._kept[key, start] = room
        elif self._hashes:
            self._units[key, start] = unit_hashes(raw)

    def bind(self, source: BaseFile) -> None:
        """The step is committed: what was not kept is read from `source` from now on."""
        self._spare.clear()
        self._source = source

    def extent(self, key: StreamKey, start: int, length: int) -> Bytes | None:
        """The base's raw bytes at `start` of a shard; None when it has no such extent, failed, or never paid there."""
        if self.failed is not None or key in self.refused:
            return None
        kept = self._kept.get((key, start))
        if kept is not None:
            return kept if kept.size == length else None
        if self._source is None:
            return None
        try:
            data = self._source.extent(key, start, length)
        except (CorruptError, OSError) as error:
            self.failed = str(error)
            return None
        with self._lock:
            self.read_bytes += 0 if data is None else data.size
        return data

    def dirty(self, key: StreamKey, start: int, raw: Bytes) -> npt.NDArray[np.bool_] | None:
        """Which 4 KiB units of an extent have another hash than the base's; None where there are no hashes."""
        known = self._units.get((key, start))
        if known is None or known.size != -(-raw.size // 4096):
            return None
        dirty: npt.NDArray[np.bool_] = unit_hashes(raw) != known
        return dirty

    def refuse(self, key: StreamKey) -> None:
        """A delta of this shard does not pay: the distance to the base only grows, so it is not tried again."""
        self.refused.add(key)
        for place in [place for place in self._kept if place[0] == key]:
            self.kept_bytes -= self._kept.pop(place).size

    def note(self) -> str:
        """Where the bytes came from, for the report."""
        text = f"base: {self.kept_bytes} bytes in memory, {self.read_bytes} read back"
        return f"{text}; not used further, {self.failed}" if self.failed else text

    def close(self) -> None:
        """End of a save: close the files of the base."""
        if self._source is not None:
            self._source.close()


class StoredBase:
    """The extents of one rank in a committed full step, opened when the first is wanted."""

    def __init__(self, files: Storage, steps: str, folder: str, root: str, rank: int) -> None:
        self._files, self._steps, self._folder, self._root, self._rank = files, steps, folder, root, rank
        self._reader: StepReader | None = None
        self._places: dict[StreamKey, range] = {}
        self._file = 0
        self._lock = threading.Lock()

    def extent(self, key: StreamKey, start: int, length: int) -> Bytes | None:
        """Raw bytes after every check."""
        reader = self._open()
        file = reader.data[self._file]
        number = file.find(self._places.get(key, range(0)), start, length)
        if number is None:
            return None
        out = np.empty(length, np.uint8)
        reader.read(file, number, out, new_scratch(), str(key[0]), verify=True)
        return out

    def close(self) -> None:
        """Close the files; the next `extent` opens them again."""
        if self._reader is not None:
            self._reader.__exit__(None, None, None)
            self._reader = None

    def _open(self) -> StepReader:
        with self._lock:
            if self._reader is None:
                self._reader = self._checked()
            return self._reader

    def _checked(self) -> StepReader:
        reader = StepReader(self._files, self._steps, self._folder)
        try:
            path, found = os.path.join(self._steps, self._folder), reader.manifest.root
            if found != self._root:
                raise CorruptError(path, "base is another save", expected=self._root, found=found)
            names = [file.name for file in reader.manifest.files]
            name = data_file_name(self._rank)
            if name not in names:
                raise CorruptError(path, f"base has no {name}")
            self._file = names.index(name)
            self._places = reader.manifest.places(self._file)
        except BaseException:
            reader.__exit__(None, None, None)
            raise
        return reader
