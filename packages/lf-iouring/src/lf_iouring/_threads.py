"""Threads that take jobs from one queue, in order."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable

from ._errors import EngineError

Job = Callable[[], None]
_Jobs = queue.SimpleQueue[Job | None]


class Threads:
    """As ThreadPoolExecutor, for a submitting thread that Ctrl-C may strike at any moment; see Cell.

    They inherit the cores of the thread that makes them, and end with this object. A job must not raise.

    Raises EngineError if not even one can be started.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stop = weakref.finalize(self, _end, self._jobs, count)
        for number in range(count):
            thread = threading.Thread(target=_run, args=(self._jobs,), name=f"{name}-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._threads:
                    raise EngineError(f"no thread could be started: {error}") from error
                break
            self._threads.append(thread)

    def submit(self, job: Job) -> None:
        """Have a job done; EngineError when closed."""
        if not self._stop.alive:
            raise EngineError("the engine is closed")
        self._jobs.put(job)

    def close(self) -> None:
        """Finish the jobs that are being done, drop the others, wait for the threads. Harmless when repeated."""
        self._stop()
        for thread in self._threads:
            thread.join()


def _run(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # an idle thread holds no memory of the last batch


def _end(jobs: _Jobs, count: int) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            jobs.get_nowait()
    for _ in range(count):
        jobs.put(None)
