"""Batches in flight: the plan's windows, the engine and the pool, for one process."""

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from lf_memory import HostPool, Lease

from ._batch import Batch, Convert, Layout
from ._errors import LoaderError
from ._reads import Reads, locate
from .engine import Engine, Target
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
    reads: Reads
    tokens: list[int]


@dataclass(slots=True, eq=False)
class _Flight:
    window: _Window
    at: int
    target: Target
    lease: Lease | None
    ticket: int


class Pipeline:
    """Reads ahead in plan order and hands out finished batches.

    Not thread-safe; the loader locks. Everything here belongs to one process.
    """

    def __init__(
        self, dataset: Any, plan: Plan | MixPlan, rows: slice, layout: Layout, pool: HostPool, engine: Engine,
        convert: Convert, *, raw: bool, verify: bool, prefetch: int,
    ) -> None:  # fmt: skip
        self.pool = pool
        self.engine = engine
        self.batches = self.tokens = self.overflow = 0
        self.wait_s = self.plan_s = 0.0
        self._dataset = dataset
        self._plan = plan
        self._rows = rows
        self._layout = layout
        self._convert = convert
        self._raw = raw
        self._verify = verify
        self._prefetch = prefetch
        self._flying: deque[_Flight] = deque()
        self._next = 0
        self._window: _Window | None = None

    def fetch(self, step: int, end: int | None) -> Batch:
        """The batch of `step`; reads ahead of it, but not to `end` or beyond.

        DataError if one of its records is not as written; asking again tries again.
        """
        try:
            if self._next - len(self._flying) != step:
                self.drain()
                self._next = step
            self._top_up(end)
            flight = self._flying[0]
            began = time.perf_counter()
            self.engine.wait(flight.ticket)
            self.wait_s += time.perf_counter() - began
            self._flying.popleft()
            return self._deliver(flight)
        except BaseException:
            # Also on KeyboardInterrupt: what is in flight no longer matches the caller's position.
            self.drain()
            raise

    def drain(self) -> None:
        """Let everything in flight land and drop it."""
        while self._flying:
            flight = self._flying.popleft()
            try:
                self.engine.wait(flight.ticket)
            except (LoaderError, KeyError):
                continue  # a batch nobody asked for; or the one whose fault is being raised
        self._next = -1

    def abandon(self) -> None:
        """In a forked child: forget the parent's engine and what it reads."""
        self._flying.clear()
        self.engine.abandon()

    def close(self) -> None:
        """Stop the engine and give the pool's memory up; arrays of delivered batches stay valid."""
        self.engine.close()
        self._flying.clear()
        self.pool.close(force=True)

    def _top_up(self, end: int | None) -> None:
        while len(self._flying) <= self._prefetch and (end is None or self._next < end):
            lease = self.pool.try_acquire()
            if lease is None and self._flying:
                return
            self._start(lease)

    def _start(self, lease: Lease | None) -> None:
        window = self._window_at(self._next)
        at = self._next - window.first
        edge = window.edges[at]
        target = self._layout.on_heap(edge) if lease is None else self._layout.in_slot(lease, edge)
        if lease is None:
            self._note_overflow()
        ticket = self.engine.submit(window.reads, at, target)
        self._flying.append(_Flight(window, at, target, lease, ticket))
        self._next += 1

    def _deliver(self, flight: _Flight) -> Batch:
        window, at, target = flight.window, flight.at, flight.target
        self.batches += 1
        self.tokens += window.tokens[at]
        convert = self._convert
        return Batch(
            convert(target.tokens),
            None if target.mask is None else convert(target.mask),
            window.reads.lengths[at],
            window.reads.ids[at],
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
        count = max(1, min(_WINDOW_STEPS, _WINDOW_ROWS // self._layout.rows))
        window = self._plan.window(step, count, self._rows)
        reads = locate(
            self._dataset, window.ids, raw=self._raw, masked=self._layout.masked, verify=self._verify
        )
        planned = _Window(
            first=step,
            epochs=window.epoch.tolist(),
            edges=window.edge.tolist(),
            reads=reads,
            tokens=reads.lengths.sum(axis=1).tolist(),
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
