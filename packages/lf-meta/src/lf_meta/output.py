"""Standard output that may go away: a closed pipe or a full disk must not cost a run its checkpoint."""

from __future__ import annotations

import io
import os
import sys


class _Lenient(io.TextIOBase):
    """Writes to a stream until it fails; from then on to nowhere."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            _to_nowhere(self._stream)
        return len(text)

    def flush(self) -> None:
        """Every write is flushed already."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding


def _to_nowhere(stream: io.TextIOWrapper) -> None:
    """Point the descriptor at /dev/null, so that also the interpreter's last flush succeeds."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def make_lenient() -> None:
    """Let stdout and stderr survive a reader that leaves, a full disk, and characters they cannot encode."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
            setattr(sys, name, _Lenient(stream))
