"""Batches in flight, in the order of the plan: what padded and packed rows have in common."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from lf_memory import HostPool

from ._depth import Depth
from .engine import Engine


class Flight(Protocol):
    """One batch that is being read."""

    @property
    def tickets(self) -> Sequence[int]:
        """Of the engine, for all its parts."""


F = TypeVar("F", bound=Flight)
B = TypeVar("B")


class InFlight(ABC, Generic[F, B]):
    """Reads ahead in plan order and hands out finished batches.

    Not thread-safe; the loader locks. Everything here belongs to one process.

    Attributes:
        batches, tokens, overflow, wait_s, plan_s: see LoaderStats.
    """

    def __init__(self, pool: HostPool, engine: Engine, depth: Depth) -> None:
        self.pool, self.engine = pool, engine
        self.batches = self.tokens = self.overflow = 0
        self.wait_s = self.plan_s = 0.0
        self._depth = depth
        self._flying: deque[F] = deque()
        self._next = 0
        self._unsure = False  # whether fetch was left, by an error or an interrupt, before it was done

    def fetch(self, step: int, end: int | None) -> B:
        """The batch of `step`; reads ahead of it, but not to `end` or beyond.

        DataError if one of its records is not as written; asking again tries again.
        """
        try:
            if self._unsure or self._next - len(self._flying) != step:
                self.drain()
                self._next = step
            self._unsure = True
            while len(self._flying) <= self._depth.value and self._start(end):
                self._next += 1
            flight = self._flying[0]
            began = time.perf_counter()
            for ticket in flight.tickets:
                self.engine.wait(ticket)
            waited = time.perf_counter() - began
            self.wait_s += waited
            self._depth.observe(waited)
            self._flying.popleft()
            batch = self._deliver(flight)
            self._unsure = False
            return batch
        except BaseException:
            # Also on KeyboardInterrupt: what is in flight no longer matches the caller's position.
            self.drain()
            raise

    def drain(self) -> None:
        """Let everything in flight land and drop it."""
        self.engine.settle()
        self._flying.clear()

    def abandon(self) -> None:
        """In a forked child: forget the parent's engine and what it reads."""
        self._flying.clear()
        self.engine.abandon()

    def close(self) -> None:
        """Stop the engine and give the pool's memory up; arrays of delivered batches stay valid."""
        self.engine.close()
        self._flying.clear()
        self.pool.close(force=True)

    @abstractmethod
    def _start(self, end: int | None) -> bool:
        """Append the flight of batch `_next`; False where that lies behind the end, or has to wait."""

    @abstractmethod
    def _deliver(self, flight: F) -> B:
        """The batch of a flight that has landed."""
