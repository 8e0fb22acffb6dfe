"""Cells and the threads that fill them."""

import gc
import threading

import pytest

from lf_iouring import EngineError
from lf_iouring._cell import Cell
from lf_iouring._threads import Threads


def test_a_cell_gives_the_value_or_raises_the_error_of_another_thread():
    threads = Threads(2, "t-cell")
    good, bad = Cell(), Cell()
    threads.submit(lambda: good.compute(pow, 2, 5))
    threads.submit(lambda: bad.compute(int, "x"))
    assert good.wait() == good.wait() == 32
    with pytest.raises(ValueError, match="'x'"):
        bad.wait()
    threads.close()


def test_closing_finishes_what_is_done_drops_the_rest_and_refuses_more():
    threads, begun, gate, ran = Threads(1, "t-close"), threading.Event(), threading.Event(), []
    threads.submit(lambda: (begun.set(), gate.wait(), ran.append(1)))
    threads.submit(lambda: ran.append(2))
    begun.wait()
    threading.Timer(0.05, gate.set).start()
    threads.close()
    threads.close()
    assert ran == [1]
    with pytest.raises(EngineError, match="closed"):
        threads.submit(lambda: None)


def test_the_threads_end_with_their_object():
    threads = Threads(2, "t-garbage")
    made = threads._threads
    del threads
    gc.collect()
    for thread in made:
        thread.join(10)
        assert not thread.is_alive()


def test_threads_that_cannot_be_started_are_an_error_only_when_none_can(monkeypatch):
    start, allowed = threading.Thread.start, [1]

    def limited(self):
        if not allowed:
            raise RuntimeError("can't start new thread")
        allowed.pop()
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    threads, cell = Threads(3, "t-few"), Cell()
    threads.submit(lambda: cell.compute(len, "abc"))
    assert cell.wait() == 3
    threads.close()
    with pytest.raises(EngineError, match="can't start new thread"):
        Threads(1, "t-none")
