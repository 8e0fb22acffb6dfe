"""Safety mode: poison, red zones, traces, and the checks for writes where nobody may write."""

import ctypes
import gc

import pytest

from lf_memory import HostPool, PoolError, VariablePool


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
    with pytest.raises(
        PoolError, match=r"used after its release, at .*test_debug.py:\d+; .*acquired at .*test_debug"
    ):
        _ = lease.array


def deep(pool, depth):
    return deep(pool, depth - 1) if depth else pool.acquire()


def test_the_trace_has_the_stack_nearest_first(pool):
    lease = deep(pool, 2)
    stack = pool.trace()[0].stack
    assert 3 < len(stack) <= 6
    assert all("test_debug.py" in site for site in stack[:4])
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


def test_safety_is_an_argument_too(monkeypatch):
    monkeypatch.delenv("LOONGFORGE_DEBUG_MEMORY", raising=False)
    assert HostPool(4096, 1, safety=True).safety
    assert VariablePool(4096, safety=True).safety
    monkeypatch.setenv("LOONGFORGE_DEBUG_MEMORY", "1")
    assert not HostPool(4096, 1, safety=False).safety
    assert HostPool(4096, 1).safety


@pytest.mark.parametrize("past", [0, 95, 96, 4191])
def test_a_write_past_the_end_is_found_at_the_release(past):
    """Slots of 4000 bytes: 96 bytes to the page and one page behind it are watched."""
    pool = HostPool(4000, 2, safety=True)
    lease = pool.acquire()
    ctypes.memset(lease.address + 4000 + past, 1, 1)
    with pytest.raises(
        PoolError, match=rf"4000 bytes was written at byte {4000 + past}, past its end.*test_debug"
    ):
        lease.release()
    assert (pool.stats().live, pool.stats().free) == (0, 2)
    pool.acquire().release()


def test_a_collected_lease_that_wrote_past_its_end_is_reported_at_the_next_acquire():
    pool = HostPool(4000, 1, safety=True)
    lease = pool.acquire()
    ctypes.memset(lease.address + 4000, 1, 1)
    del lease
    gc.collect()
    with pytest.raises(PoolError, match="past its end"):
        pool.acquire()
    assert pool.acquire().index == 0


def test_a_range_is_watched_to_the_end_of_its_page():
    pool = VariablePool(8192, safety=True)
    lease = pool.acquire(5000)
    ctypes.memset(lease.address + 5000, 1, 1)
    with pytest.raises(PoolError, match="range 0 of 5000 bytes was written at byte 5000, past its end"):
        lease.release()
    assert pool.stats().largest_free == 8192


def test_a_slot_is_poisoned_when_its_fence_passes(pool, fence):
    event = fence()
    lease = pool.acquire()
    view = lease.array
    view[:] = 1
    lease.fence(event)
    lease.release()
    assert (view == 1).all()
    event.passed.set()
    assert pool.acquire().index != lease.index or (view == 0xDB).all()
    assert (view == 0xDB).all()
