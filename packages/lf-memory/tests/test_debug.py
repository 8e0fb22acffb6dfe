"""LOONGFORGE_DEBUG_MEMORY=1: poison, trace and the check for writes after release."""

import gc

import pytest

from lf_memory import HostPool, PoolError


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setenv("LOONGFORGE_DEBUG_MEMORY", "1")
    return HostPool(4096, 2)


def test_a_released_slot_is_poisoned(pool):
    lease = pool.acquire()
    view = lease.array
    view[:] = 1
    lease.release()
    assert (view == 0xDB).all()


def test_the_trace_has_the_call_sites(pool):
    pool.acquire().release()
    events = pool.trace()
    assert [(e.action, e.index) for e in events] == [("acquire", 0), ("release", 0)]
    assert all("test_debug.py:" in e.site for e in events)


def test_a_collected_lease_is_traced(pool):
    lease = pool.acquire()
    del lease
    gc.collect()
    assert [e.action for e in pool.trace()] == ["acquire", "collect"]


def test_a_double_release_names_both_places(pool):
    lease = pool.acquire()
    lease.release()
    with pytest.raises(PoolError, match=r"twice, at .*test_debug.py:\d+; released at .*test_debug.py:\d+"):
        lease.release()


def test_a_write_after_release_is_found_at_the_next_acquire(pool):
    lease = pool.acquire()
    view = lease.array
    lease.release()
    view[17] = 0
    with pytest.raises(PoolError, match=r"slot 0 was written at byte 17 after its release at .*test_debug"):
        pool.acquire()
    assert pool.stats().free == 2


def test_nothing_is_traced_by_default(monkeypatch):
    monkeypatch.delenv("LOONGFORGE_DEBUG_MEMORY", raising=False)
    pool = HostPool(4096, 1)
    lease = pool.acquire()
    view = lease.array
    view[:] = 3
    lease.release()
    assert pool.trace() == ()
    assert (view == 3).all()
