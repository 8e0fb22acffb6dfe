"""Ahead: values are computed once, in another thread, and faults reach whoever asks."""

import gc
import signal
import threading
import time

import pytest

from lf_iouring._ahead import Ahead


class Recorder:
    """compute(n) = n * n, remembering who asked for what."""

    def __init__(self):
        self.calls, self.threads = [], set()
        self.gate = threading.Event()
        self.gate.set()
        self.fault = None

    def __call__(self, number):
        self.calls.append(number)
        self.threads.add(threading.get_ident())
        self.gate.wait()
        if self.fault:
            raise self.fault
        return number * number


def joined(name="lf-ahead"):
    """Wait until no thread of that name is left."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(10)
            assert not thread.is_alive()


def test_values_are_computed_once_and_never_by_the_caller():
    work = Recorder()
    ahead = Ahead(work, keep=3)
    assert [ahead.get(n) for n in (2, 2, 3, 2)] == [4, 4, 9, 4]
    assert work.calls == [2, 3]
    assert threading.get_ident() not in work.threads
    ahead.close()


def test_the_next_number_is_computed_unasked():
    work = Recorder()
    ahead = Ahead(work, keep=2, ahead=1)
    assert ahead.get(5) == 25
    ahead.close()
    joined()
    assert work.calls == [5, 6]


def test_the_least_recently_asked_is_forgotten():
    work = Recorder()
    ahead = Ahead(work, keep=2)
    for number in (1, 2, 1, 3, 1, 2):
        ahead.get(number)
    assert work.calls == [1, 2, 3, 2]
    assert len(ahead) == 2
    ahead.close()


def test_a_fault_is_raised_once_and_asking_again_tries_again():
    work = Recorder()
    ahead = Ahead(work, keep=2)
    work.fault = OSError("disk")
    with pytest.raises(OSError, match="disk"):
        ahead.get(1)
    work.fault = None
    assert ahead.get(1) == 1
    ahead.close()


def test_a_fault_ahead_of_need_waits_until_that_number_is_asked_for():
    def compute(number):
        if number == 1:
            raise ValueError("one")
        return number

    ahead = Ahead(compute, keep=3, ahead=1)
    assert ahead.get(0) == 0
    with pytest.raises(ValueError, match="one"):
        ahead.get(1)
    assert ahead.get(2) == 2
    ahead.close()


def test_a_signal_ends_the_wait_while_the_value_is_being_computed():
    work = Recorder()
    work.gate.clear()
    ahead = Ahead(work, keep=2)

    def interrupt():
        while not work.calls:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        ahead.get(4)
    work.gate.set()
    assert ahead.get(4) == 16
    assert work.calls == [4]
    ahead.close()


def test_the_thread_ends_with_its_object():
    ahead = Ahead(lambda number: number, keep=1)
    ahead.get(1)
    assert "lf-<lambda>" in {thread.name for thread in threading.enumerate()}
    del ahead
    gc.collect()
    joined("lf-<lambda>")
    assert "lf-<lambda>" not in {thread.name for thread in threading.enumerate()}


def test_a_forked_child_computes_with_a_thread_of_its_own(in_fork):
    work = Recorder()
    ahead = Ahead(work, keep=2)
    work.gate.clear()
    threading.Timer(0.2, work.gate.set).start()
    ahead._ask(1)  # unfinished when the child is made

    def child():
        work.gate.set()
        assert ahead.get(1) == 1
        assert ahead.get(3) == 9
        ahead.close()

    assert in_fork(child) == 0
    assert ahead.get(1) == 1
    ahead.close()
