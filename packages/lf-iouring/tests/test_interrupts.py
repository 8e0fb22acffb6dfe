"""Interrupts where a timer seldom strikes: while another one is cleaned up, and around the call that starts a read."""

import contextlib

import numpy as np
import pytest

from lf_iouring import _compiled


def contents(batch):
    return batch.step, np.asarray(batch.tokens).tobytes()


@pytest.mark.parametrize("pack", [None, 256])
def test_an_interrupt_while_another_is_cleaned_up_keeps_the_position(loader_of, monkeypatch, pack):
    expected = [contents(batch) for batch, _ in zip(loader_of(pack=pack), range(8), strict=False)]
    loader = loader_of(pack=pack)
    assert [contents(next(loader)) for _ in range(3)] == expected[:3]
    pipeline = loader._pipeline
    wait = pipeline.engine.wait

    def interrupted():
        monkeypatch.undo()
        raise KeyboardInterrupt

    def waited(ticket):
        wait(ticket)
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline.engine, "wait", waited)
    monkeypatch.setattr(pipeline, "drain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(loader)
    assert [contents(next(loader)) for _ in range(5)] == expected[3:]


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_a_batch_begun_when_an_interrupt_strikes_gives_its_slot_back(loader_of, monkeypatch, engine):
    loader = loader_of(engine=engine, prefetch_factor=2)
    submit = loader._pipeline.engine.submit

    def submitted(*arguments):
        submit(*arguments)
        raise KeyboardInterrupt

    for _ in range(10):
        monkeypatch.setattr(loader._pipeline.engine, "submit", submitted)
        with pytest.raises(KeyboardInterrupt):
            next(loader)
        monkeypatch.undo()
        next(loader).release()
        loader.set_step(0)
    assert loader._pipeline.pool.stats().live == loader._ahead.value
    assert loader.stats().overflow == 0


class _Interrupting:
    """The C module, with an interrupt before or after the call that starts a batch."""

    def __init__(self, begun):
        self.begun = begun

    def __getattr__(self, name):
        return getattr(_compiled.lib, name)

    def lf_submit(self, *arguments):
        if self.begun:
            _compiled.lib.lf_submit(*arguments)
        raise KeyboardInterrupt


@pytest.mark.skipif(_compiled.lib is None, reason="no C module")
@pytest.mark.parametrize("begun", [True, False])
def test_memory_that_c_threads_write_is_kept_until_they_are_done(loader_of, monkeypatch, begun):
    expected = [contents(batch) for batch, _ in zip(loader_of(), range(40), strict=False)]
    loader = loader_of()
    engine, pool = loader._pipeline.engine, loader._pipeline.pool
    monkeypatch.setattr("lf_iouring._native_engine.lib", _Interrupting(begun))
    monkeypatch.setattr(engine, "settle", lambda: None)
    with contextlib.suppress(KeyboardInterrupt):
        next(loader)
    assert pool.stats().live == 1
    monkeypatch.undo()
    engine.settle()
    assert pool.stats().live == 0
    assert [contents(next(loader)) for _ in range(40)] == expected
