"""Packed batches in flight: whole records are read and checked in staging memory, then laid into rows."""

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_memory import HostPool, Lease

from ._batch import Convert, Layout, PackedBatch
from ._errors import LoaderError
from ._permute import Ids
from ._reads import locate
from ._stats import LoaderStats
from .engine import MAX_FLYING, Array, Engine, Target
from .pack_plan import PackedSpec, PackPlan
from .packing import Varlen, varlen

# Records of a batch are staged in groups whose padded length differs by this factor at most.
_STEP = 4
_GROUPS = 5
MAX_PREFETCH = MAX_FLYING // _GROUPS - 1


@dataclass(frozen=True, kw_only=True)
class PackedStats(LoaderStats):
    """LoaderStats of a loader that packs.

    Attributes:
        pack_s: seconds spent packing windows, in the caller's thread; not part of `plan_s`.
        fill: tokens over the places in all rows delivered, 0..1.
        segments: pieces of documents delivered.
        gather_s: seconds spent laying records into rows, in the caller's thread.
    """

    pack_s: float
    fill: float
    segments: int
    gather_s: float


@dataclass(frozen=True, eq=False)
class _Group:
    ticket: int
    records: Ids
    target: Target
    memory: Array


@dataclass(frozen=True, eq=False)
class _Flight:
    spec: PackedSpec
    varlen: Varlen
    groups: list[_Group]


class PackedPipeline:
    """As Pipeline, for a PackPlan."""

    def __init__(
        self, dataset: Any, plan: PackPlan, rows: slice, layout: Layout, pool: HostPool, engine: Engine,
        convert: Convert, *, raw: bool, verify: bool, prefetch: int, epochs: int | None,
    ) -> None:  # fmt: skip
        self.pool, self.engine = pool, engine
        self.batches = self.tokens = self.overflow = self.segments = 0
        self.wait_s = self.plan_s = self.gather_s = 0.0
        self._dataset, self._plan, self._rows, self._layout, self._convert = (
            dataset,
            plan,
            rows,
            layout,
            convert,
        )
        self._masked = "loss_mask" in [field.name for field in dataset.fields]
        self._raw, self._verify = raw, verify
        self._prefetch, self._epochs = prefetch, epochs
        self._flying: deque[_Flight] = deque()
        self._next = 0
        self._spare: list[Array] = []  # staging memory, largest last

    def fetch(self, step: int, end: int | None) -> PackedBatch:
        """See Pipeline; where the epochs end follows from the plan."""
        try:
            if self._next - len(self._flying) != step:
                self.drain()
                self._next = step
            while len(self._flying) <= self._prefetch and not self._past_end(end):
                self._start()
            flight = self._flying[0]
            began = time.perf_counter()
            for group in flight.groups:
                self.engine.wait(group.ticket)
            self.wait_s += time.perf_counter() - began
            self._flying.popleft()
            return self._deliver(flight)
        except BaseException:
            self.drain()
            raise

    def drain(self) -> None:
        """See Pipeline."""
        while self._flying:
            for group in self._flying.popleft().groups:
                try:
                    self.engine.wait(group.ticket)
                except (LoaderError, KeyError):
                    continue  # a batch nobody asked for; or the one whose fault is being raised
        self._next = -1

    def abandon(self) -> None:
        """See Pipeline."""
        self._flying.clear()
        self.engine.abandon()

    def close(self) -> None:
        """See Pipeline."""
        self.engine.close()
        self._flying.clear()
        self.pool.close(force=True)

    def stats(self, base: LoaderStats) -> PackedStats:
        """`base` with what only packing has."""
        places = self.batches * self._layout.rows * self._plan.capacity
        return PackedStats(
            **asdict(base),
            pack_s=self._plan.pack_s,
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

    def _start(self) -> None:
        began = time.perf_counter()
        packed = self._plan.pack_s
        spec = self._plan.batch(self._next, self._rows)
        began += self._plan.pack_s - packed
        records = np.unique(spec.ids)
        flight = _Flight(spec, varlen(spec.segments, self._plan.capacity), [])
        lengths = self._dataset.lengths[records].astype(np.int64)
        edges = _edges(int(lengths.max(initial=1)))
        kind = np.searchsorted(edges, lengths)
        self.plan_s += time.perf_counter() - began
        self._flying.append(flight)
        self._next += 1
        for number in np.flatnonzero(np.bincount(kind)).tolist():
            flight.groups.append(self._submit(records[kind == number], edges[number]))

    def _submit(self, records: Ids, edge: int) -> _Group:
        reads = locate(self._dataset, records[None], raw=self._raw, masked=self._masked, verify=self._verify)
        layout = Layout(len(records), self._layout.dtype, self._masked)
        memory = self._take(layout.slot_bytes(edge))
        target = layout.in_array(memory, edge)
        return _Group(self.engine.submit(reads, 0, target), records, target, memory)

    def _take(self, nbytes: int) -> Array:
        """Staging memory: the smallest spare piece that fits, else a new one."""
        for at, memory in enumerate(self._spare):
            if memory.size >= nbytes:
                return self._spare.pop(at)
        return np.empty(nbytes, np.uint8)

    def _give(self, memory: Array) -> None:
        self._spare.append(memory)
        self._spare.sort(key=len)
        if len(self._spare) > _GROUPS * (self._prefetch + 1):
            del self._spare[0]

    def _deliver(self, flight: _Flight) -> PackedBatch:
        began = time.perf_counter()
        lease = self.pool.try_acquire()
        if lease is None:
            self.overflow += 1
        edge = self._plan.capacity
        target = self._layout.on_heap(edge) if lease is None else self._layout.in_slot(lease, edge)
        _lay(flight, target)
        for group in flight.groups:
            self._give(group.memory)
        self.gather_s += time.perf_counter() - began
        return self._batch(flight, target, lease)

    def _batch(self, flight: _Flight, target: Target, lease: Lease | None) -> PackedBatch:
        spec = flight.spec
        self.batches += 1
        self.segments += len(spec.ids)
        self.tokens += int(flight.varlen.lengths.sum())
        return PackedBatch(
            self._convert(target.tokens), self._convert(_mask(target)), flight.varlen, spec.ids,
            spec.step, spec.epoch, lease, self._convert,
        )  # fmt: skip


def _edges(longest: int) -> list[int]:
    """Ascending padded lengths of the groups."""
    edges = [longest]
    while len(edges) < _GROUPS and edges[0] > _STEP:
        edges.insert(0, -(-edges[0] // _STEP))
    return edges


def _lay(flight: _Flight, target: Target) -> None:
    """Copy every segment to its place, set the mask, zero the unused ends."""
    mask = _mask(target)
    mask[...] = flight.varlen.targets
    for row, used in enumerate(flight.varlen.lengths.tolist()):
        target.tokens[row, used:] = 0
    where = {
        record: (group.target, at)
        for group in flight.groups
        for at, record in enumerate(group.records.tolist())
    }
    segments = flight.spec.segments
    columns = (flight.spec.ids, segments.row, segments.place, segments.start, segments.length)
    for record, row, place, start, length in zip(*(column.tolist() for column in columns), strict=True):
        source, at = where[record]
        target.tokens[row, place : place + length] = source.tokens[at, start : start + length]
        if source.mask is not None:
            mask[row, place : place + length] &= source.mask[at, start : start + length]


def _mask(target: Target) -> npt.NDArray[np.uint8]:
    assert target.mask is not None, "packed rows always have a mask"
    return target.mask
