"""Values computed in a thread of their own, ahead of need."""

import os
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

V = TypeVar("V")
_SIGNALS_S = 0.1  # how often a wait looks for signals that the kernel gave to another thread


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
        future = self._ask(number)
        for later in range(number + 1, number + 1 + self._ahead):
            self._ask(later)
        try:
            while not future.done():
                wait((future,), _SIGNALS_S)
            return future.result()
        except BaseException:
            with self._lock:
                if future.done() and self._known.get(number) is future:
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
        self._known: OrderedDict[int, Future[V]] = OrderedDict()
        self._jobs: queue.SimpleQueue[tuple[int, Future[V]] | None] = queue.SimpleQueue()
        self._started = False
        self._stop = weakref.finalize(self, self._jobs.put, None)

    def _ask(self, number: int) -> "Future[V]":
        if os.getpid() != self._pid:
            self._stop.detach()
            self._begin()
        with self._lock:
            future = self._known.get(number)
            if future is None:
                future = Future()
                self._jobs.put((number, future))  # first: a known future must be one that will be done
                self._known[number] = future
            self._known.move_to_end(number)
            while len(self._known) > self._keep:
                self._known.popitem(last=False)
            if not self._started:
                name = f"lf-{getattr(self._compute, '__name__', 'ahead').strip('_')}"
                threading.Thread(
                    target=_run, args=(self._compute, self._jobs), name=name, daemon=True
                ).start()
                self._started = True
            return future


def _run(compute: Callable[[int], V], jobs: "queue.SimpleQueue[tuple[int, Future[V]] | None]") -> None:
    while (job := jobs.get()) is not None:
        number, future = job
        try:
            future.set_result(compute(number))
        except BaseException as error:
            future.set_exception(error)
        del job, future  # an idle thread must not hold a value that nobody else keeps
