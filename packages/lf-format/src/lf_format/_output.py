"""Standard output of the commands."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell reports of programs that leave the signal alone


def printing(run: Callable[[], int | None]) -> int:
    """Exit code of `run` (None = 0), its output flushed; BROKEN_PIPE in silence when it is not read, as with | head -1.

    File names that are not UTF-8 are printed with escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return BROKEN_PIPE
    return code or 0
