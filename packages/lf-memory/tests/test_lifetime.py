"""How long slots and memory live: garbage, closing, leaks."""

import ctypes
import faulthandler
import gc
import itertools
import signal

import numpy as np
import pytest

from lf_memory import HostPool, PoolError, _region


def make(slots=4, slot_bytes=10_000, **kw):
    return HostPool(slot_bytes, slots, **kw)


def test_arrays_stay_valid_after_a_forced_close():
    pool = make()
    array = pool.acquire().array
    array[:] = 7
    pool.close(force=True)
    del pool
    gc.collect()
    assert (array == 7).all()
    array[:] = 8


def test_close_gives_the_memory_up_even_if_the_pool_object_stays(open_fds):
    before = open_fds()
    pool = make()
    pool.acquire()
    assert open_fds() == before + 1
    pool.close(force=True)
    gc.collect()
    assert open_fds() == before
    assert pool.stats().bytes == 4 * 12_288


def test_leaving_the_pool_by_an_exception_closes_it():
    pool = make()
    lease = pool.acquire()
    with pytest.raises(ZeroDivisionError), pool:
        lease.index / 0
    with pytest.raises(PoolError, match="closed"):
        pool.acquire()


def test_no_descriptor_and_no_mapping_is_leaked(open_fds):
    before = open_fds()
    for _ in range(50):
        pool = make()
        keep = pool.acquire().array
        attached = HostPool.attach(pool.fd, pool.slot_bytes)
        del pool, keep, attached
    gc.collect()
    assert open_fds() == before
    with open("/proc/self/maps") as maps:
        assert "lf-memory" not in maps.read()


def test_a_view_keeps_the_slot_leased_until_it_is_garbage():
    pool = make()
    lease = pool.acquire()
    view = lease.view((10, 100), np.uint16)[2:, ::3]
    del lease
    gc.collect()
    assert pool.stats().live == 1
    del view
    gc.collect()
    stats = pool.stats()
    assert (stats.live, stats.free, stats.collected) == (0, 4, 1)


def test_release_then_garbage_returns_the_slot_once():
    pool = make()
    lease = pool.acquire()
    view = lease.array
    lease.release()
    del lease, view
    gc.collect()
    stats = pool.stats()
    assert (stats.free, stats.collected) == (4, 0)


def test_reclaim_inside_a_cycle_does_not_deadlock():
    pool = make(slots=2, slot_bytes=64)
    gc.set_threshold(1)
    try:
        for _ in range(300):
            ring = [pool.acquire(timeout=5)]
            ring.append(ring)
            del ring
    finally:
        gc.set_threshold(700, 10, 10)
    gc.collect()
    assert pool.stats().free == 2


def test_a_slot_released_without_arrays_shares_nothing_with_its_next_lease():
    """The pool reuses what it can of such a lease; the old one must stay dead."""
    pool = make(slots=1)
    old = pool.acquire()
    old.release()
    new = pool.acquire()
    assert new.index == old.index
    for use in (old.release, lambda: old.array, lambda: old.view((1,), np.uint8), lambda: old.address):
        with pytest.raises(PoolError):
            use()
    assert pool.stats().live == 1
    old = None
    gc.collect()
    assert pool.stats().live == 1
    new.release()
    assert pool.stats().free == 1


def test_an_array_that_outlives_its_release_does_not_keep_or_free_the_next_lease():
    pool = make(slots=1)
    lease = pool.acquire()
    array = lease.view((5,), np.uint8)[1:]
    lease.release()
    new = pool.acquire()
    del lease, array
    gc.collect()
    assert pool.stats().live == 1
    kept = new.view((5,), np.uint8)
    del new
    gc.collect()
    assert pool.stats().live == 1
    del kept
    gc.collect()
    assert pool.stats().free == 1


def test_a_garbage_pool_keeps_the_memory_of_live_arrays_only(open_fds):
    before = open_fds()
    pool = make()
    array = pool.acquire().array
    array[:] = 6
    for _ in range(3):
        pool.acquire().release()
    del pool
    gc.collect()
    assert open_fds() == before + 1
    assert (array == 6).all()
    del array
    gc.collect()
    assert open_fds() == before


def test_closing_with_a_live_lease_still_lets_it_be_released():
    pool = make()
    lease = pool.acquire()
    lease.array[:] = 1
    pool.close(force=True)
    assert (lease.array == 1).all()
    lease.release()
    with pytest.raises(PoolError, match="twice"):
        lease.release()
    assert pool.stats().live == 0
    assert pool.trace() == ()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("where", [-1, 4 * 12_288])
def test_reaching_out_of_the_pool_is_a_fault_and_no_silent_damage(in_fork, shared, where):
    pool = make(hugepages="off", shared=shared)
    address = pool.buffer.ctypes.data + where

    def child():
        faulthandler.disable()
        ctypes.memset(address, 1, 1)

    assert in_fork(child) == -signal.SIGSEGV


@pytest.mark.parametrize("size", [4096, 3 * 4096 + 1, 2 << 20, (4 << 20) + 4096])
def test_each_byte_is_unmapped_once(monkeypatch, size):
    """What one call has freed may be another thread's memory by the next call."""
    libc, freed = _region._libc, []

    class Spy:
        def __getattr__(self, name):
            return getattr(libc, name)

        def munmap(self, start, nbytes):
            freed.append((start, start + nbytes))
            return libc.munmap(start, nbytes)

    monkeypatch.setattr(_region, "_libc", Spy())
    region = _region.Region(None, size)
    start, end = region.address, region.address + size
    del region
    gc.collect()

    freed.sort()
    assert all(before[1] == behind[0] for before, behind in itertools.pairwise(freed))
    assert freed[0][0] < start
    assert freed[-1][1] > end
