"""Background threads that still take work while the interpreter exits.

At exit `concurrent.futures` refuses new work first and joins its threads then, so a save that is in flight in one
executor could hand nothing to another. A crew has daemon threads, started ahead by the caller; the thread that waits
for their results is what the interpreter waits for.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Task: TypeAlias = tuple[Future[Any], Callable[[], Any]]


class Crew(Executor):
    """`size` threads, each of which calls `settle` once."""

    def __init__(self, size: int, name: str, settle: Callable[[], None]) -> None:
        self._size, self._name, self._settle = size, name, settle
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _dismiss, self._tasks, size)

    def start(self) -> None:
        """Start the threads that are missing; RuntimeError where the system has none left."""
        while len(self._threads) < self._size:
            name = f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=_work, args=(self._tasks, self._settle), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See Executor; `start` comes first."""
        future: Future[T] = Future()
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the work that they have."""
        _dismiss(self._tasks, len(self._threads))
        if wait:
            for thread in self._threads:
                thread.join()
        self._threads.clear()


def _dismiss(tasks: queue.SimpleQueue[Task | None], size: int) -> None:
    for _ in range(size):
        tasks.put(None)


def _work(tasks: queue.SimpleQueue[Task | None], settle: Callable[[], None]) -> None:
    settle()
    while (task := tasks.get()) is not None:
        future, call = task
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del task, future, call  # a waiting thread must not keep the last result alive
