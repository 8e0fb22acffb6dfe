"""What several test files need: fences that pass when told to, forked children, interrupts, kernel settings."""

import contextlib
import gc
import os
import signal
import sys
import threading
import traceback

import pytest

from lf_memory import PoolError


class ManualFence:
    """A fence that passes when `passed` is set."""

    def __init__(self):
        self.passed = threading.Event()
        self.waited = 0

    def query(self):
        return self.passed.is_set()

    def wait(self):
        self.waited += 1
        self.passed.wait()


class Recorder:
    """A registrar without a device: remembers what is locked, refuses what it is told to.

    `limit` is the largest piece it takes, `room` the most bytes at one time.
    """

    def __init__(self, limit=None, room=None):
        self.limit, self.room = limit, room
        self.ranges = {}
        self.calls = []

    def register(self, address, nbytes):
        over = self.room is not None and sum(self.ranges.values()) + nbytes > self.room
        if over or (self.limit is not None and nbytes > self.limit):
            raise PoolError("recorderRegister: out of page-locked memory (2)")
        if address in self.ranges:
            raise PoolError("recorderRegister: already registered (712)")
        self.ranges[address] = nbytes
        self.calls.append(("register", address, nbytes))

    def unregister(self, address):
        if self.ranges.pop(address, None) is None:
            raise PoolError("recorderUnregister: not registered (713)")
        self.calls.append(("unregister", address))


@pytest.fixture
def fence():
    """The class ManualFence."""
    return ManualFence


@pytest.fixture
def recorder():
    """The class Recorder."""
    return Recorder


@pytest.fixture
def open_fds():
    """Counts the descriptors of this process; those of other tests' garbage are gone before."""
    gc.collect()
    return lambda: len(os.listdir("/proc/self/fd"))


@pytest.fixture
def in_fork():
    """Runs a function in a forked child and returns the exit status: 0, or 1 if it raised."""

    def run(work):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    return run


@pytest.fixture
def interrupts():
    """A switch: while interrupts[0] is true the next tick of CPU time raises KeyboardInterrupt once."""
    armed = [False]

    def tick(*_):
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, tick)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005, 0.0005)
    yield armed
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.fixture
def setting():
    """setting(path, text): a kernel setting for the time of a with block; skips where that is not allowed."""

    @contextlib.contextmanager
    def change(path, value):
        try:
            before = path.read_text()
            path.write_text(value)
        except OSError as error:
            pytest.skip(f"{path}: {error}")
        if "[" in before:
            before = before[before.index("[") + 1 : before.index("]")]
        try:
            yield
        finally:
            path.write_text(before)

    return change
