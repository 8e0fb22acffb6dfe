"""Fences: a slot is not handed out while a device still uses it."""

import gc
import threading
import time

import pytest

from lf_memory import HostPool, PoolError, PoolTimeout


def make(slots=4, slot_bytes=10_000, **kw):
    return HostPool(slot_bytes, slots, **kw)


def test_a_fenced_slot_is_not_handed_out_before_its_fence_passes(fence):
    pool = make(slots=2)
    event = fence()
    lease = pool.acquire()
    lease.fence(event)
    lease.release()
    assert pool.stats().fenced == 1
    other = pool.acquire()
    assert other.index != lease.index
    with pytest.raises(PoolTimeout, match="1 fenced"):
        pool.acquire(timeout=0.01)
    threading.Timer(0.02, event.passed.set).start()
    assert pool.acquire(timeout=5).index == lease.index
    assert pool.stats().fence_wait_s > 0


def test_every_fence_of_a_lease_must_pass(fence):
    pool = make(slots=1)
    first, second = fence(), fence()
    lease = pool.acquire()
    lease.fence(first)
    lease.fence(second)
    lease.release()
    first.passed.set()
    assert pool.try_acquire() is None
    second.passed.set()
    assert pool.try_acquire() is not None


def test_a_collected_lease_keeps_its_fence(fence):
    pool = make(slots=1)
    event = fence()
    pool.acquire().fence(event)
    gc.collect()
    assert pool.try_acquire() is None
    event.passed.set()
    assert pool.try_acquire() is not None


def test_a_fence_that_is_none_is_refused():
    with pytest.raises(PoolError, match="query"):
        make().acquire().fence(object())


def test_a_failing_fence_raises_and_keeps_the_slot(fence):
    class Broken(fence):
        def query(self):
            raise RuntimeError("device lost")

    pool = make(slots=1)
    lease = pool.acquire()
    lease.fence(Broken())
    lease.release()
    with pytest.raises(RuntimeError, match="device lost"):
        pool.acquire(timeout=0.1)
    assert pool.stats().fenced == 1


def test_close_refuses_while_leases_are_live_and_waits_for_fences(fence):
    pool = make()
    lease = pool.acquire()
    with pytest.raises(PoolError, match="leased"):
        pool.close()
    event = fence()
    lease.fence(event)
    lease.release()
    threading.Timer(0.02, event.passed.set).start()
    pool.close()
    assert event.waited == 1
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        pool.acquire()


def test_a_pool_that_waits_for_fences_in_close_is_closed_to_others(fence):
    pool, event = make(), fence()
    lease = pool.acquire()
    lease.fence(event)
    lease.release()
    closing = threading.Thread(target=pool.close)
    closing.start()
    while not event.waited:
        time.sleep(0.001)
    with pytest.raises(PoolError, match="the pool is closed"):
        pool.acquire()
    event.passed.set()
    closing.join()
