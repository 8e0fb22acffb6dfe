"""A value that another thread computes."""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

V = TypeVar("V")
_SIGNALS_S = 0.1  # how often a wait looks for signals that the kernel gave to another thread


class Cell(Generic[V]):
    """As concurrent.futures.Future, for a waiting thread that Ctrl-C may strike at any moment.

    A Future takes its Condition in Python code; an exception that strikes inside leaves that locked for ever, and
    the computing thread with it. This one holds no lock that anybody else waits for without a limit.

    Attributes:
        done: whether there is a value or an error.
    """

    __slots__ = ("_error", "_ready", "_value", "done")

    _value: V

    def __init__(self) -> None:
        self.done = False
        self._error: BaseException | None = None
        self._ready = threading.Lock()
        self._ready.acquire()

    def compute(self, function: Callable[..., V], *arguments: Any) -> None:
        """Fill the cell, once, in the computing thread."""
        try:
            self._value = function(*arguments)
        except BaseException as error:
            self._error = error
        self.done = True
        self._ready.release()

    def wait(self) -> V:
        """The value, or raises the error."""
        while not self.done:
            if self._ready.acquire(timeout=_SIGNALS_S):
                self._ready.release()
        if self._error is not None:
            raise self._error
        return self._value
