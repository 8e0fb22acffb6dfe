"""The three states of a save as the caller sees them: staged, written, durable."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from .errors import CkptError
from .progress import Progress
from .report import SaveReport


class SaveHandle:
    """One save in progress. Thread-safe.

    staged: the tensors may change again. written: all bytes are with the kernel. durable: the step survives power loss
    and is what `load` returns. predicted_stall: seconds that the caller will probably wait for the disk because the
    slab is smaller than the state; 0.0 when it is not, None when nothing has been measured yet.
    """

    def __init__(self, step: int, on_delivered: Callable[[SaveHandle], None]) -> None:
        self.step = step
        self.predicted_stall: float | None = 0.0
        self._progress = Progress()
        self._began = time.perf_counter()
        self._staging_over = threading.Event()
        self._at: dict[str, float] = {}
        self._over = threading.Event()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._on_delivered = on_delivered
        self._pid = os.getpid()
        self._claims = threading.Lock()

    @property
    def staged(self) -> bool:
        """Whether the caller's tensors may change again."""
        return "staged" in self._at

    @property
    def written(self) -> bool:
        """Whether every byte has been handed to the kernel."""
        return "written" in self._at

    @property
    def durable(self) -> bool:
        """Whether the step is committed."""
        return "durable" in self._at

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._over.is_set()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Block until the tensors may change. Raises the save's error, or TimeoutError after `timeout` seconds."""
        self._check_process(self._staging_over)
        if not self._staging_over.wait(timeout):
            raise TimeoutError(f"step {self.step} is not staged after {timeout} s")
        if not self.staged:
            self.wait(timeout)

    def fence(self) -> None:
        """Let what the calling thread does from here on come after the copies; for steps that fire no optimizer hook.

        Host memory has been copied when this returns. For a device only the copies are queued, and the current stream
        of this thread is made to wait for them, so call it before replaying a captured optimizer step. Never raises the
        save's error.
        """
        self._progress.fence()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Block until durable. Raises the save's error (CkptError, DiskFullError, OSError) or TimeoutError."""
        self._check_process(self._over)
        if not self._over.wait(timeout):
            raise TimeoutError(f"step {self.step} is not durable after {timeout} s")
        self._on_delivered(self)
        if self._report is None:
            assert self._error is not None
            raise self._error
        return self._report

    def _check_process(self, event: threading.Event) -> None:
        """CkptError instead of waiting for ever: the threads that save are not in a forked child."""
        if os.getpid() != self._pid and not event.is_set():
            raise CkptError(
                f"step {self.step} is being saved by process {self._pid}; a forked child cannot wait"
            )

    def _claim(self) -> bool:
        """Whether the caller is the first to ask, and so the one who ends this save."""
        return self._claims.acquire(blocking=False)

    def _mark(self, state: str) -> None:
        self._at[state] = time.perf_counter() - self._began
        if state == "staged":
            self._staging_over.set()

    def _seconds(self, state: str) -> float:
        return self._at.get(state, float("nan"))

    def _finish(self, report: SaveReport | None, error: BaseException | None) -> None:
        """End the save; waiters on any state wake."""
        self._report, self._error = report, error
        self._progress.finish()
        self._over.set()
        self._staging_over.set()
