"""Batches in flight: the plan's windows, the engine and the pool, for one process."""

import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from lf_memory import HostPool, Lease

from ._batch import Batch, Convert
from ._depth import Depth
from ._in_flight import InFlight
from ._layout import HeapSlot, Slot, SlotLayout
from ._permute import Ids
from ._reads import Reads, locate
from ._samples import SampleBatch
from .engine import Engine
from .mix_plan import MixPlan
from .plan import Plan

_log = logging.getLogger("lf_iouring")

# Planning is vectorised; at this many rows a window the cost of numpy calls is spread thin, and a window
# still takes milliseconds.
_WINDOW_ROWS = 4096
_WINDOW_STEPS = 1024


@dataclass(eq=False)
class _Window:
    first: int
    epochs: list[int]
    edges: list[int]
    ids: Ids
    lengths: Ids
    tokens: list[int]
    starts: list[list[int]]
    reads: Reads


@dataclass(slots=True, eq=False)
class _Flight:
    window: _Window
    at: int
    slot: Slot
    lease: Lease | None
    tickets: tuple[int]


class Pipeline(InFlight[_Flight, Batch]):
    """Rows padded to the edge of their bucket, or samples."""

    def __init__(
        self, dataset: Any, plan: Plan | MixPlan, rows: slice, layout: SlotLayout, pool: HostPool, engine: Engine,
        convert: Convert, *, verify: bool, depth: Depth,
    ) -> None:  # fmt: skip
        super().__init__(pool, engine, depth)
        self._dataset, self._plan, self._layout, self._convert = dataset, plan, layout, convert
        self._rows, self._row_count = rows, rows.stop - rows.start
        self._verify = verify
        self._window: _Window | None = None

    def _start(self, end: int | None) -> bool:
        if end is not None and self._next >= end:
            return False
        lease = self.pool.try_acquire()
        if lease is None and self._flying:
            return False
        window = self._window_at(self._next)
        at = self._next - window.first
        slot: Slot
        if lease is None:
            slot = HeapSlot(int(window.reads.places.used[at]))
            self._note_overflow()
        else:
            slot = lease
        self._flying.append(_Flight(window, at, slot, lease, (self.engine.submit(window.reads, at, slot),)))
        return True

    def _deliver(self, flight: _Flight) -> Batch:
        window, at = flight.window, flight.at
        self.batches += 1
        self.tokens += window.tokens[at]
        if self._layout.token_rows:
            return self._token_batch(flight)
        offsets = {name: ends[at] for name, ends in window.reads.places.offsets.items()}
        used = int(window.reads.places.used[at])
        return SampleBatch(
            self._layout, flight.slot, window.starts[at], offsets, window.edges[at], used,
            window.lengths[at], window.ids[at], window.first + at, window.epochs[at], flight.lease, self._convert,
        )  # fmt: skip

    def _token_batch(self, flight: _Flight) -> Batch:
        """Tokens, which begin the slot, and the loss mask where there is one."""
        window, at, slot, convert = flight.window, flight.at, flight.slot, self._convert
        shape, starts = (self._row_count, window.edges[at]), window.starts[at]
        tokens = convert(slot.view(shape, self._layout.values[0].dtype))
        mask = convert(slot.view(shape, np.uint8, starts[1])) if len(starts) == 2 else None
        return Batch(
            tokens,
            mask,
            window.lengths[at],
            window.ids[at],
            window.first + at,
            window.epochs[at],
            flight.lease,
            convert,
        )

    def _window_at(self, step: int) -> _Window:
        window = self._window
        if window is None or not window.first <= step < window.first + len(window.edges):
            window = self._window = self._planned(step)
        return window

    def _planned(self, step: int) -> _Window:
        began = time.perf_counter()
        count = max(1, min(_WINDOW_STEPS, _WINDOW_ROWS // self._row_count))
        window = self._plan.window(step, count, self._rows)
        reads = locate(self._dataset, self._layout, window.ids, window.edge, verify=self._verify)
        lengths = _lengths(self._dataset.lengths, window.ids)
        planned = _Window(
            first=step,
            epochs=window.epoch.tolist(),
            edges=window.edge.tolist(),
            ids=window.ids,
            lengths=lengths,
            tokens=lengths.sum(axis=1).tolist(),
            starts=reads.places.start.T.tolist(),
            reads=reads,
        )
        self.plan_s += time.perf_counter() - began
        return planned

    def _note_overflow(self) -> None:
        self.overflow += 1
        if self.overflow == 1:
            _log.warning(
                "all %d slots are held by batches still in use; further batches get memory of their own. "
                "Release batches, or raise prefetch_factor",
                self.pool.slots,
            )


def _lengths(lengths: Any, ids: Ids) -> Ids:
    """Tokens of records, 0 for an id of -1; int64 like `ids`."""
    found: Ids = np.where(ids < 0, 0, lengths[np.maximum(ids, 0)]).astype(np.int64)
    return found
