"""Reading data files past the page cache, where that is allowed and pays, in runs of several extents.

A cold read through the page cache costs one more copy and is as deep as the kernel's read-ahead; several threads with
O_DIRECT keep the disk busy. A file that is in the cache already is read from there.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch

from .codec import Bytes
from .errors import CkptError, CorruptError
from .files import FileLayer
from .format import ALIGN, EXTENT_BYTES, RAW, Extent, align
from .reader import OpenFile, StepReader

ReadIo: TypeAlias = Literal["auto", "direct", "buffered"]
Found: TypeAlias = tuple[OpenFile, int, Extent]

# Half the CPU per byte of reads of 1 MiB, and still in the cache when it is hashed.
RUN_BYTES = 4 << 20
_SAMPLES = 8
_ALIGNMENTS = (1, 512, ALIGN)  # what devices ask of memory; NVMe drives often less than a sector
_bounces: queue.SimpleQueue[Bytes] = queue.SimpleQueue()


class Run(NamedTuple):
    """Extents `first .. first + extents - 1` of `file`, raw, one after another in the file and in their stream."""

    file: OpenFile
    first: int
    extents: int
    start: int
    nbytes: int


class Landed(NamedTuple):
    """Bytes of a run in memory: where they belong, or `lent`, from where they still have to be copied."""

    memory: Bytes
    got: int
    lent: Bytes | None

    def give_back(self) -> None:
        """Let the next run have the lent memory; the bytes are not looked at any more."""
        if self.lent is not None:
            _bounces.put(self.lent)


class Fetch:
    """How the files of one load are read. Made when the step is open, closed before it is."""

    def __init__(self, reader: StepReader, io: ReadIo) -> None:
        """CkptError when io="direct" is not to be had."""
        if io not in get_args(ReadIo):
            raise ValueError(f"io={io!r}: choose {' or '.join(get_args(ReadIo))}")
        self._files = {id(file): file for own in reader.data for file in own.lineage()}.values()
        self._direct: list[DirectFile] = []
        self._note = "buffered, as asked" if io == "buffered" else ""
        if self._note:
            return
        cached = "" if io == "direct" else _why_cached(self._files)
        self._note = cached or self._all_direct()
        if io == "direct" and not self._direct:
            raise CkptError(f"{reader.path}: io='direct' cannot be had: {self._note}; use io='auto'")

    @property
    def note(self) -> str:
        """How the files were read and why; complete after `close`."""
        return self._note

    def close(self) -> None:
        """Close the descriptors; nothing may be reading."""
        if any(direct.refused for direct in self._direct):
            self._note += ", in part buffered: refused"
        for file in self._files:
            file.direct = None
        while self._direct:
            self._direct.pop().close()

    def _all_direct(self) -> str:
        """Open every file past the page cache, or none; how, or why not."""
        opened = False
        try:
            note = self._open_direct()
            opened = len(self._direct) == len(self._files)
        finally:
            if not opened:
                self.close()
        return note

    def _open_direct(self) -> str:
        """Open file after file past the page cache until one refuses; how, or why not."""
        for file in self._files:
            files = file.files
            if not isinstance(files, FileLayer):
                return f"buffered, {files.traits.why}"
            fd = files.open_direct_read(file.path)
            if fd is None:
                refusal = files.traits.why if files.traits.shared else "the file system refuses O_DIRECT"
                return f"buffered, {refusal}"
            file.direct = DirectFile(files, fd, file.fd)
            self._direct.append(file.direct)
        return "direct, the files are not in the page cache"


class DirectFile:
    """A file read past the page cache into memory of any alignment. Threads may share it."""

    def __init__(self, files: FileLayer, fd: int, fallback: int) -> None:
        self._files, self._fd, self._fallback = files, fd, fallback
        self._alignment = 0  # index into _ALIGNMENTS; raised when the device refuses
        self.refused = False

    def read(self, view: Bytes, offset: int) -> int:
        """Fill `view` from `offset`, a 4 KiB edge; the bytes read, fewer only at the end of the file.

        What the device cannot write to where it lies, and a tail that is no whole block, come through aligned memory.
        """
        whole = view.size // ALIGN * ALIGN
        got = self._blocks(view[:whole], offset)
        if got == whole < view.size:
            with _bounce() as bounce:
                block = bounce[:ALIGN]
                tail = min(self._blocks(block, offset + whole), view.size - whole)
                view[whole : whole + tail] = block[:tail]
            got += tail
        return got

    def reaches(self, view: Bytes) -> bool:
        """Whether the device can write to where `view` lies, as far as is known; `read` sees to a tail."""
        return bool(view.ctypes.data % _ALIGNMENTS[self._alignment] == 0)

    def close(self) -> None:
        """Close the descriptor."""
        self._files.close(self._fd)

    def _blocks(self, view: Bytes, offset: int) -> int:
        while not self.refused:
            need = _ALIGNMENTS[self._alignment]
            if view.ctypes.data % need:
                return self._bounced(view, offset)
            try:
                return self._files.read(self._fd, view.data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._learn(view.ctypes.data, need)
        return self._files.read(self._fallback, view.data, offset)

    def _learn(self, address: int, tried: int) -> None:
        """Raise the alignment to the next one that this address would not have met; none left means refused."""
        for number in range(_ALIGNMENTS.index(tried) + 1, len(_ALIGNMENTS)):
            if address % _ALIGNMENTS[number]:
                self._alignment = max(self._alignment, number)
                return
        self.refused = True

    def _bounced(self, view: Bytes, offset: int) -> int:
        got = 0
        with _bounce() as bounce:
            while got < view.size:
                part = bounce[: min(bounce.size, view.size - got)]
                count = self._blocks(part, offset + got)
                view[got : got + count] = part[:count]
                got += count
                if count < part.size:
                    break
        return got


def runs(reader: StepReader, extents: Iterable[Found]) -> Iterator[Run | Found]:
    """The same extents in order, raw ones that lie side by side joined up to RUN_BYTES."""
    run: Run | None = None
    end = 0
    for found in extents:
        file, at = reader.resolve(*found[:2])
        stored = file.extents[at]
        if stored.codec != RAW:
            if run is not None:
                yield run
                run = None
            yield found
            continue
        joined = None
        if run is not None and stored.place == end and _joins(run, file, at, stored):
            joined = run._replace(extents=run.extents + 1, nbytes=run.nbytes + stored.raw_bytes)
        if run is not None and joined is None:
            yield run
        run = joined or Run(file, at, 1, found[2].start, stored.raw_bytes)
        end = align(stored.place + stored.stored_bytes)
    if run is not None:
        yield run


def land(run: Run, out: Bytes | None) -> Landed:
    """Read a run into `out`, (run.nbytes,) uint8, or into lent memory where that cannot be done or is not wanted.

    A run that the device cannot write where it belongs is not copied yet: its thread is better off with the next read.
    """
    direct, place = run.file.direct, run.file.extents[run.first].place
    if out is not None and not (isinstance(direct, DirectFile) and not direct.reaches(out)):
        return Landed(out, run.file.read(out, place), None)
    lent = _lend()
    try:
        # Up to the edge of a block: what follows the last extent is padding.
        return Landed(lent, run.file.read(lent[: align(run.nbytes)], place), lent)
    except BaseException:
        _bounces.put(lent)
        raise


def settle(run: Run, landed: Landed, out: Bytes | None, name: str, *, verify: bool) -> None:
    """Hash each extent of a run, and copy it to `out` if it is not there yet. Raises CorruptError."""
    at = 0
    for number in range(run.first, run.first + run.extents):
        extent = run.file.extents[number]
        end = at + extent.raw_bytes
        if end > landed.got:
            raise CorruptError(
                run.file.path, "file is cut", tensor=name, extent=number, offset=extent.place,
                expected=extent.stored_bytes, found=max(landed.got - at, 0),
            )  # fmt: skip
        data = landed.memory[at:end]
        if verify:
            run.file.check_hash(number, data, name, raw=True)
        if landed.lent is not None and out is not None:
            out[at:end] = data
        at = end


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A host tensor whose memory begins at a page, so that direct reads need no copy; small ones as usual."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
    size = tensor.numel() * tensor.element_size()
    if size < EXTENT_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(_pages(size), dtype=dtype, count=tensor.numel()).view(tuple(shape))


def aligned(size: int) -> Bytes:
    """Page-aligned scratch of `size` bytes."""
    return np.frombuffer(_pages(size), np.uint8, size)


def _pages(size: int) -> mmap.mmap:
    """Private memory of this process, of huge pages where there are any."""
    memory = mmap.mmap(-1, align(size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _joins(run: Run, file: OpenFile, at: int, stored: Extent) -> bool:
    """Whether an extent continues a run: the next one of the same file, and no padding between."""
    return (
        run.file is file
        and at == run.first + run.extents
        and run.nbytes % ALIGN == 0
        and run.nbytes + stored.raw_bytes <= RUN_BYTES
    )


def _why_cached(files: Iterable[OpenFile]) -> str:
    """Why the page cache is the better source, or ""; looked at in a few places of each file."""
    for file in files:
        if not isinstance(file.files, FileLayer):
            continue
        places = [extent.place for extent in file.extents if extent.stored_bytes]
        places = places[:: max(len(places) // _SAMPLES, 1)]
        hits = sum(file.files.cached(file.fd, place) for place in places)
        if 2 * hits > len(places):
            name = os.path.basename(file.path)
            return f"buffered, {hits} of {len(places)} places of {name} are in the page cache"
    return ""


def _lend() -> Bytes:
    """Aligned memory of RUN_BYTES, to be put back into `_bounces`. As many are kept, for the process, as were lent at
    once: fresh pages cost more than what is copied through them."""
    try:
        return _bounces.get_nowait()
    except queue.Empty:
        return np.frombuffer(_pages(RUN_BYTES), np.uint8)


@contextlib.contextmanager
def _bounce() -> Iterator[Bytes]:
    memory = _lend()
    try:
        yield memory
    finally:
        _bounces.put(memory)
