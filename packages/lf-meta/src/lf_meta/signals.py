"""SIGTERM, SIGINT and SIGHUP: the first asks for a checkpoint and an orderly stop, the second ends at once.

The signal number arrives through Python's wake-up descriptor and is read by a thread, because a handler runs
only between two bytecodes of the main thread: while that thread waits inside a collective or a write, a second
signal would otherwise go unheard.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import weakref
from types import FrameType, TracebackType

# Whoever stops a whole job (Slurm, systemd, kill -- -PGID) reaches a rank on several ways within milliseconds:
# directly, through the launcher, through torchrun. Within this time they count as one request.
ONE_REQUEST_S = 1.0
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def not_ignored() -> list[signal.Signals]:
    """The stop signals that the parent did not switch off (nohup ignores SIGHUP, a shell's ``&`` SIGINT)."""
    return [s for s in HANDLED if signal.getsignal(s) is not signal.SIG_IGN]


def exit_code(signum: int) -> int:
    """Shell convention: 128 + signal, so 143 for SIGTERM, 130 for SIGINT, 129 for SIGHUP."""
    return 128 + signum


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Stands in for a handler: the wake-up descriptor does the work."""


class StopSignal:
    """Records the first stop signal; use as a context manager on the main thread.

    Attributes:
        signum: the first signal received, or 0.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)

    def __enter__(self) -> StopSignal:
        _open.add(self)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._old = {s: signal.signal(s, _ignore) for s in not_ignored()}
        self._thread = threading.Thread(target=self._watch, name="lf-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        _open.discard(self)
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._write.close()
        self._thread.join()
        self._read.close()

    def _watch(self) -> None:
        first = 0.0
        while data := self._read.recv(1):
            if data[0] not in HANDLED:
                continue
            if not self.signum:
                self.signum, first = data[0], time.monotonic()
            elif time.monotonic() - first > ONE_REQUEST_S:
                os._exit(exit_code(data[0]))


_open: weakref.WeakSet[StopSignal] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked worker shares the wake-up descriptor: its signals must not look like the parent's."""
    if len(_open):
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


os.register_at_fork(after_in_child=_let_go_in_child)
