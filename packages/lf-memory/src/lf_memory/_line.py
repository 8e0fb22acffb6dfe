"""Threads that wait, first come first served.

Ctrl-C may end a wait at any point, so nobody is removed by others' bookkeeping alone: a waiter marks itself gone,
in one store, and whoever looks at the front of the line drops those that are.
"""

import threading
from collections import deque


class Waiter:
    """One thread's place in a line."""

    __slots__ = ("_turn", "gone")

    def __init__(self) -> None:
        self.gone = False
        self._turn = threading.Event()

    def sleep(self, timeout: float) -> None:
        """Until this may be the first in line, for `timeout` seconds at most."""
        self._turn.wait(timeout)

    def wake(self) -> None:
        """End `sleep`."""
        self._turn.set()


class Line(deque[Waiter]):
    """Waiters in the order they came; false when certainly nobody waits."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__()
        self._lock = lock

    def first(self) -> Waiter | None:
        """Whose turn it is, woken; None when nobody waits."""
        with self._lock:
            while self and self[0].gone:
                self.popleft()
            found = self[0] if self else None
        if found is not None:
            found.wake()
        return found

    def waiting(self) -> int:
        """How many wait."""
        return sum(not waiter.gone for waiter in tuple(self))
