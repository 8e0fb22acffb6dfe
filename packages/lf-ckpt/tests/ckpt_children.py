"""Forked children of tests: run to their end, or kept alive for a while."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def wait_status(work: Callable[[], object]) -> int:
    """Run `work` in a forked child to its end; what waitpid says of it (exit code 1 where it raised)."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


@contextmanager
def living(work: Callable[[], object]) -> Iterator[int]:
    """A forked child that has done `work`, keeps what it returned, and sleeps; killed at the end."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kept = work()
            os.write(done, b"x")
            signal.pause()
            del kept
        finally:
            os._exit(1)
    os.close(done)
    try:
        assert os.read(ready, 1) == b"x", "the child failed"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
