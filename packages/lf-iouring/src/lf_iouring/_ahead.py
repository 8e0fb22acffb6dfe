"""Values computed in a thread of their own, ahead of need."""

import os
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from ._cell import Cell

V = TypeVar("V")


class Ahead(Generic[V]):
    """`compute(n)` for the numbers asked for, and for those that follow them; the latest are kept.

    The caller waits, which signals interrupt, and never computes. The thread starts at the first
    question and ends when this object is closed or garbage, so `compute` must not refer to it. A forked child
    starts over with a thread of its own. Threads may share it.

    Args:
        compute: a pure function of its number.
        keep: values kept, those being computed included.
        ahead: how many numbers after the one asked for are computed unasked.
    """

    def __init__(self, compute: Callable[[int], V], keep: int, ahead: int = 0) -> None:
        self._compute, self._keep, self._ahead = compute, keep, ahead
        self._begin()

    def get(self, number: int) -> V:
        """The value; raises what `compute` raised for it. Asking again then computes again."""
        cell = self._ask(number)
        for later in range(number + 1, number + 1 + self._ahead):
            self._ask(later)
        try:
            return cell.wait()
        except BaseException:
            with self._lock:
                if cell.done and self._known.get(number) is cell:
                    del self._known[number]
            raise

    def __len__(self) -> int:
        """Values kept."""
        return len(self._known)

    def close(self) -> None:
        """End the thread after what it computes now; harmless when repeated."""
        if os.getpid() == self._pid:
            self._stop()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._known: OrderedDict[int, Cell[V]] = OrderedDict()
        self._jobs: queue.SimpleQueue[tuple[int, Cell[V]] | None] = queue.SimpleQueue()
        self._started = False
        self._stop = weakref.finalize(self, self._jobs.put, None)

    def _ask(self, number: int) -> "Cell[V]":
        if os.getpid() != self._pid:
            self._stop.detach()
            self._begin()
        with self._lock:
            cell = self._known.get(number)
            if cell is None:
                cell = Cell()
                self._jobs.put((number, cell))  # first: a known cell must be one that will be filled
                self._known[number] = cell
            self._known.move_to_end(number)
            while len(self._known) > self._keep:
                self._known.popitem(last=False)
            if not self._started:
                name = f"lf-{getattr(self._compute, '__name__', 'ahead').strip('_')}"
                threading.Thread(
                    target=_run, args=(self._compute, self._jobs), name=name, daemon=True
                ).start()
                self._started = True
            return cell


def _run(compute: Callable[[int], V], jobs: "queue.SimpleQueue[tuple[int, Cell[V]] | None]") -> None:
    while (job := jobs.get()) is not None:
        number, cell = job
        cell.compute(compute, number)
        del job, cell  # an idle thread must not hold a value that nobody else keeps
