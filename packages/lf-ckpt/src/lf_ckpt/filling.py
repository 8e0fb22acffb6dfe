"""The extents of one load, read and decoded by threads into tensors of any stride and device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TypeAlias

import numpy as np
import torch

from .boxes import Box, relative
from .codec import Bytes
from .dtypes import dtype_of
from .fetch import Fetch, Landed, ReadIo, Run, aligned, land, runs, settle
from .format import EXTENT_BYTES, Extent
from .local import Window
from .manifest import BlobEntry, TensorEntry
from .reader import OpenFile, StepReader
from .ring import Ring, describe_ring, lane_for
from .staging import copy_range
from .windows import Needed, needed, part_of, scatter

Found: TypeAlias = tuple[OpenFile, int, Extent]
Put: TypeAlias = Callable[[torch.Tensor, int], None]
Out: TypeAlias = Bytes | None
_AHEAD = 8  # parts waiting per thread: enough to keep all busy, few enough to hold for a state of any size
_local = threading.local()


class Filler:
    """Reads for one load; a context manager, at whose end all copies to devices have arrived."""

    def __init__(self, reader: StepReader, threads: int, verify: bool, io: ReadIo = "auto") -> None:
        self.reader, self.verify = reader, verify
        self._fetch = Fetch(reader, io)
        self.bytes_read = 0
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lf-ckpt-load")
        # Threads that only read keep the disk busy while others hash and copy: a quarter of the time of a cold load.
        self._reads = ThreadPoolExecutor(threads, thread_name_prefix="lf-ckpt-read")
        # Runs read and not settled: what bounds the lent memory.
        self._room = threading.Semaphore(2 * threads)
        self._pending: deque[Future[Future[None] | None]] = deque()
        self._gathering = False
        self._rings: dict[torch.device, Ring] = {}

    def __enter__(self) -> Filler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The threads go first: after an error some may still be queueing copies. Who reads may wait for who settles.
        self._reads.shutdown(wait=True, cancel_futures=True)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._fetch.close()
        for ring in self._rings.values():
            ring.lane.finish()

    @property
    def io(self) -> str:
        """How the files are read, and why."""
        return self._fetch.note

    @property
    def devices(self) -> tuple[str, ...]:
        """How each device was reached."""
        return tuple(describe_ring(device, ring) for device, ring in self._rings.items())

    @contextmanager
    def together(self) -> Iterator[None]:
        """Calls in here return before their bytes have arrived; all have at its end, and after an error none will.

        Else the threads run dry at the end of every tensor: a third of the time of a cold load of 26 tensors.
        """
        self._gathering = True
        try:
            yield
            self._arrive()
        except BaseException:
            self._drop()
            raise
        finally:
            self._gathering = False

    def fill_window(self, entry: TensorEntry, window: Window) -> None:
        """Decode what a part of a tensor holds, converted when the dtypes differ."""
        dtype = dtype_of(entry.dtype)
        ring = self._ring_for(window.local.device)
        for part in needed(self.reader, entry, window.box):
            if part.shared == part.shard.box:
                place = part_of(window.local, relative(part.shared, window.box.offsets))
                self._fill_shard(entry.name, part, place, dtype, ring)
            else:
                self._decode(entry.name, part, dtype, partial(scatter, part.shard.box, window), ring)

    def blob(self, entry: BlobEntry) -> bytes:
        """A bytes item."""
        out = np.empty(entry.nbytes, np.uint8)
        self._fill(entry.name, self.reader.extents_of(entry.placed), out)
        self._arrive()  # also among others: what is returned is a copy
        return out.tobytes()

    def check_window(self, entry: TensorEntry, box: Box) -> None:
        """Hash the stored bytes that a part of a tensor needs."""
        for part in needed(self.reader, entry, box):
            self.check(entry.name, part.extents)

    def check(self, name: str, extents: Iterable[Found]) -> None:
        """Hash the stored bytes of these extents."""

        def single(file: OpenFile, number: int, _: Extent) -> None:
            self.reader.check(file, number, _scratch()[0], name)

        self._each(extents, lambda run: (run, None, name, True), single)

    def _ring_for(self, device: torch.device) -> Ring | None:
        if device.type == "cpu":
            return None
        if device not in self._rings:
            # Two slots per thread: one is filled while the other is copied.
            self._rings[device] = Ring(lane_for(device), 2 * self._threads)
        ring = self._rings[device]
        ring.lane.follow()
        return ring

    def _each(
        self,
        extents: Iterable[Found],
        whole: Callable[[Run], tuple[Run, Out, str, bool]] | None,
        single: Callable[[OpenFile, int, Extent], None],
    ) -> None:
        """Run `single` for every extent; raw ones side by side go to `_read` as `whole` says, where it is given."""
        found = list(extents)
        self.bytes_read += sum(extent.raw_bytes for _, _, extent in found)
        for part in found if whole is None else runs(self.reader, found):
            self._arrive(_AHEAD * self._threads - 1)
            if not isinstance(part, Run):
                job: Future[Future[None] | None] = self._pool.submit(single, *part)
            elif whole is not None:
                pool = self._pool if part.file.direct is None else self._reads
                job = pool.submit(self._read, *whole(part))
            self._pending.append(job)
        if not self._gathering:
            self._arrive()

    def _read(self, run: Run, out: Out, name: str, verify: bool) -> Future[None] | None:
        """Read a run; what is left to do with it, when the reading was the disk's work and not a copy."""
        self._room.acquire()
        try:
            landed = land(run, out)
        except BaseException:
            self._room.release()
            raise
        if run.file.direct is None:
            self._settle(run, landed, out, name, verify)
            return None
        return self._pool.submit(self._settle, run, landed, out, name, verify)

    def _settle(self, run: Run, landed: Landed, out: Out, name: str, verify: bool) -> None:
        """What is left of `_read`."""
        try:
            settle(run, landed, out, name, verify=verify)
        finally:
            landed.give_back()
            self._room.release()

    def _arrive(self, left: int = 0) -> None:
        """Wait until `left` parts are pending; the first error is raised once nothing is being filled any more."""
        try:
            while len(self._pending) > left:
                rest = self._pending[0].result()
                if rest is not None:
                    rest.result()
                self._pending.popleft()
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        """Begin nothing that still waits, and wait for what has begun."""
        for future in self._pending:
            future.cancel()
        begun = [
            future for future in wait(self._pending).done if not (future.cancelled() or future.exception())
        ]
        wait([rest for future in begun if (rest := future.result()) is not None])
        self._pending.clear()

    def _fill(self, name: str, extents: Iterable[Found], out: Bytes) -> None:
        """Decode a whole stream into `out`, (nbytes,) uint8."""

        def single(file: OpenFile, number: int, extent: Extent) -> None:
            view = out[extent.start : extent.start + extent.raw_bytes]
            self.reader.read(file, number, view, _scratch()[0], name, verify=self.verify)

        def whole(run: Run) -> tuple[Run, Out, str, bool]:
            return run, out[run.start : run.start + run.nbytes], name, self.verify

        self._each(extents, whole, single)

    def _fill_shard(
        self, name: str, part: Needed, place: torch.Tensor, dtype: torch.dtype, ring: Ring | None
    ) -> None:
        """Decode a whole shard into `place`."""
        plain = ring is None and not (place.is_conj() or place.is_neg())
        if plain and place.is_contiguous() and place.dtype == dtype:
            self._fill(name, part.extents, flat_bytes(place))
        else:
            self._decode(name, part, dtype, partial(_copy_back, place), ring)

    def _decode(self, name: str, part: Needed, dtype: torch.dtype, put: Put, ring: Ring | None) -> None:
        """Decode extents and `put` the elements of each with the number of the first in its shard."""

        def job(file: OpenFile, number: int, extent: Extent) -> None:
            scratch, decoded = _scratch()
            begin = extent.start // dtype.itemsize
            if ring is None:
                view = decoded[: extent.raw_bytes]
                self.reader.read(file, number, view, scratch, name, verify=self.verify)
                put(torch.from_numpy(view).view(dtype), begin)
                return
            with ring.slot() as slot:
                memory = slot.memory[: extent.raw_bytes]
                self.reader.read(file, number, memory.numpy(), scratch, name, verify=self.verify)
                ring.send(slot, lambda: put(memory.view(dtype), begin))

        self._each(part.extents, None, job)


def flat_bytes(tensor: torch.Tensor) -> Bytes:
    """Bytes of a contiguous host tensor, shared with it."""
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    # A contiguous tensor of one element may have any stride, and view(uint8) insists on 1.
    flat: Bytes = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


def _copy_back(place: torch.Tensor, flat: torch.Tensor, begin: int) -> None:
    copy_range(flat, place, begin, back=True)


def _scratch() -> tuple[Bytes, Bytes]:
    if not hasattr(_local, "buffers"):
        _local.buffers = (aligned(EXTENT_BYTES), aligned(EXTENT_BYTES))
    buffers: tuple[Bytes, Bytes] = _local.buffers
    return buffers
