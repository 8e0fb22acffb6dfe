"""One caller at a time inside a store, and an error instead of a deadlock for one that is inside already."""

from __future__ import annotations

import threading
from types import TracebackType

from .errors import CkptError


class Turn:
    """A lock as a context manager. CkptError when the very thread that holds it comes again (a signal handler)."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._holder = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._holder == me:
            raise CkptError(
                f"{self._path}: called from inside a save of the same thread, by a signal handler or a hook; "
                "set a flag there and save from the training loop"
            )
        self._lock.acquire()
        self._holder = me

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder = 0
        self._lock.release()
