"""Packed batches in flight: whole records are read and checked in staging memory, then laid into rows."""

import functools
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lf_memory import HostPool, Lease

from ._ahead import Ahead
from ._batch import Convert, Layout, PackedBatch
from ._depth import Depth
from ._in_flight import InFlight
from ._lay import lay, mask_of
from ._layout import HeapSlot, SlotLayout
from ._staging import MAX_GROUPS, Group, Staged, stage
from ._stats import LoaderStats
from .engine import MAX_FLYING, Array, Engine, Target
from .pack_plan import PackPlan
from .packing import Borders

MAX_PREFETCH = MAX_FLYING // MAX_GROUPS - 1
_KEPT = 3  # staged windows: the one delivered from, and those of the batches read ahead


@dataclass(frozen=True, kw_only=True)
class PackedStats(LoaderStats):
    """LoaderStats of a loader that packs.

    Attributes:
        pack_s: seconds spent packing windows, in a thread of its own.
        stage_s: seconds the caller waited for a window to be packed and its extents to be looked up.
        fill: tokens over the places in all rows delivered, 0..1.
        segments: pieces of documents delivered.
        gather_s: seconds spent laying records into rows, in the caller's thread.
    """

    pack_s: float
    stage_s: float
    fill: float
    segments: int
    gather_s: float


@dataclass(frozen=True, eq=False)
class _Read:
    ticket: int
    target: Target
    memory: Array


@dataclass(frozen=True, eq=False)
class _Flight:
    staged: Staged
    at: int
    step: int
    reads: list[_Read | None]  # one a group, None where the batch has none of its records

    @property
    def tickets(self) -> list[int]:
        return [read.ticket for read in self.reads if read is not None]


class PackedPipeline(InFlight[_Flight, PackedBatch]):
    """Rows of whole documents."""

    def __init__(
        self, dataset: Any, plan: PackPlan, rows: slice, layout: Layout, pool: HostPool, engine: Engine,
        convert: Convert, *, verify: bool, depth: Depth, epochs: int | None,
    ) -> None:  # fmt: skip
        super().__init__(pool, engine, depth)
        self.segments, self.gather_s, self.stage_s = 0, 0.0, 0.0
        self._plan, self._layout, self._convert = plan, layout, convert
        self._masked = "loss_mask" in [field.name for field in dataset.fields]
        staging = functools.partial(_stage, dataset, SlotLayout(dataset), plan, rows, verify=verify)
        self._staged = Ahead(staging, _KEPT, ahead=1)
        self._epochs = epochs
        self._spare: list[Array] = []  # staging memory, largest last

    def abandon(self) -> None:
        """See InFlight."""
        self._staged.close()
        super().abandon()

    def close(self) -> None:
        """See InFlight."""
        self._staged.close()
        super().close()

    def stats(self, base: LoaderStats) -> PackedStats:
        """`base` with what only packing has."""
        places = self.batches * self._layout.rows * self._plan.capacity
        return PackedStats(
            **asdict(base),
            pack_s=self._plan.pack_s,
            stage_s=self.stage_s,
            fill=self.tokens / max(1, places),
            segments=self.segments,
            gather_s=self.gather_s,
        )

    def _past_end(self, end: int | None) -> bool:
        if end is not None and self._next >= end:
            return True
        # the batch of `step` itself is always read; only those ahead of it need the test
        return (
            bool(self._flying) and self._epochs is not None and self._plan.epoch(self._next) >= self._epochs
        )

    def _start(self, end: int | None) -> bool:
        if self._past_end(end):
            return False
        began = time.perf_counter()
        window, at = self._plan.locate(self._next)
        staged = self._staged.get(window)
        self.stage_s += time.perf_counter() - began
        began = time.perf_counter()
        flight = _Flight(staged, at, self._next, [])
        self._flying.append(flight)
        for group in staged.groups:
            flight.reads.append(self._submit(group, at) if group.used[at] else None)
        self.plan_s += time.perf_counter() - began
        return True

    def _submit(self, group: Group, at: int) -> _Read:
        layout = Layout(group.reads.rows, self._layout.dtype, self._masked)
        memory = self._take(layout.slot_bytes(group.edge))
        slot = HeapSlot(memory)
        return _Read(self.engine.submit(group.reads, at, slot), layout.target(slot, group.edge), memory)

    def _take(self, nbytes: int) -> Array:
        """Staging memory: the smallest spare piece that fits, else a new one."""
        for at, memory in enumerate(self._spare):
            if memory.size >= nbytes:
                return self._spare.pop(at)
        return np.empty(nbytes, np.uint8)

    def _give(self, memory: Array) -> None:
        self._spare.append(memory)
        self._spare.sort(key=len)
        if len(self._spare) > MAX_GROUPS * (self._depth.value + 1):
            del self._spare[0]

    def _deliver(self, flight: _Flight) -> PackedBatch:
        began = time.perf_counter()
        lease = self.pool.try_acquire()
        if lease is None:
            self.overflow += 1
        edge = self._plan.capacity
        target = self._layout.on_heap(edge) if lease is None else self._layout.target(lease, edge)
        sources = [None if read is None else read.target for read in flight.reads]
        borders = lay(flight.staged, flight.at, sources, target)
        for read in flight.reads:
            if read is not None:
                self._give(read.memory)
        self.gather_s += time.perf_counter() - began
        return self._batch(flight, borders, target, lease)

    def _batch(self, flight: _Flight, borders: Borders, target: Target, lease: Lease | None) -> PackedBatch:
        staged, at = flight.staged, flight.at
        ids = staged.ids[int(staged.cuts[at]) : int(staged.cuts[at + 1])]
        self.batches += 1
        self.segments += len(ids)
        self.tokens += int(staged.tokens[at])
        return PackedBatch(
            self._convert(target.tokens), self._convert(mask_of(target)), borders, ids,
            flight.step, staged.epoch, lease, self._convert,
        )  # fmt: skip


def _stage(
    dataset: Any, layout: SlotLayout, plan: PackPlan, rows: slice, window: int, *, verify: bool
) -> Staged:
    packed, epoch = plan.packed(window), plan.epoch_of(window)
    return stage(dataset, layout, packed, epoch, rows, plan.global_batch, verify=verify)
