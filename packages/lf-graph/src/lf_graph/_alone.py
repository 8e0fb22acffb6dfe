"""One thread at a time: inputs are copied to one place, so two calls at once would read each other's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lf_graph._errors import GraphError
from lf_graph._modes import require_no_capture


class Alone:
    """``with alone(name):`` refuses a second thread; the same thread may enter again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Enter.

        Raises:
            GraphError: another thread is inside (it does not wait: a backward runs in a thread of autograd), or a
                capture is going on.
        """
        require_no_capture(name)
        if not self._lock.acquire(blocking=False):
            raise GraphError(
                f"{name} was called by a second thread while it runs, and both would use the same memory: take turns "
                "with a lock, or capture one instance, with a pool of its own, for each thread"
            )
        try:
            yield
        finally:
            self._lock.release()
