"""HostPool: construction, slots, leases, stats."""

import threading

import numpy as np
import pytest

from lf_memory import HostPool, PoolError, PoolTimeout


def make(slots=4, slot_bytes=10_000, **kw):
    return HostPool(slot_bytes, slots, **kw)


def test_slots_are_disjoint_page_aligned_and_of_the_asked_size():
    pool = make()
    leases = [pool.acquire() for _ in range(4)]
    for lease in leases:
        assert lease.array.shape == (10_000,)
        assert lease.array.dtype == np.uint8
        assert lease.address % 4096 == 0
        lease.array[:] = lease.index
    assert all((lease.array == lease.index).all() for lease in leases)
    assert min(lease.address for lease in leases) % (2 << 20) == 0


def test_the_last_freed_slot_comes_first():
    pool = make()
    a, b = pool.acquire(), pool.acquire()
    b.release()
    a.release()
    assert pool.acquire().index == a.index


def test_acquire_times_out_when_all_slots_are_out():
    pool = make(slots=1)
    lease = pool.acquire()
    with pytest.raises(PoolTimeout, match="1 leased"):
        pool.acquire(timeout=0.01)
    with pytest.raises(PoolTimeout):
        pool.acquire(timeout=0)
    assert pool.try_acquire() is None
    lease.release()
    assert pool.try_acquire() is not None


def test_acquire_wakes_when_another_thread_releases():
    pool = make(slots=1)
    lease = pool.acquire()
    threading.Timer(0.02, lease.release).start()
    again = pool.acquire(timeout=5)
    assert again.index == lease.index
    assert pool.stats().wait_s > 0


def test_double_release_and_use_after_release_are_errors():
    pool = make()
    lease = pool.acquire()
    lease.release()
    with pytest.raises(PoolError, match="released twice"):
        lease.release()
    for use in (lambda: lease.array, lambda: lease.address, lambda: lease.view((1,), np.uint8)):
        with pytest.raises(PoolError, match="after its release"):
            use()
    assert pool.stats().free == 4


def test_a_lease_is_a_context_manager():
    pool = make()
    with pool.acquire() as lease:
        assert pool.stats().live == 1
    assert lease.released
    assert pool.stats().live == 0
    with pool.acquire() as lease:
        lease.release()


@pytest.mark.parametrize(("shape", "offset"), [((10_001,), 0), ((10_000,), 1), ((2, 10_000), 0)])
def test_a_view_beyond_the_slot_is_refused(shape, offset):
    lease = make().acquire()
    with pytest.raises(PoolError, match="does not fit"):
        lease.view(shape, np.uint8, offset)


@pytest.mark.parametrize("offset", [-1, -10_000, -(1 << 40)])
def test_a_view_in_front_of_the_slot_is_refused(offset):
    lease = make().acquire()
    with pytest.raises(PoolError, match=f"from byte {offset} on"):
        lease.view((1,), np.uint8, offset)


@pytest.mark.parametrize("args", [(0, 1), (1, 0), (-5, 3)])
def test_sizes_below_one_are_refused(args):
    with pytest.raises(PoolError, match="at least 1"):
        HostPool(*args)


def test_stats_report_waste_and_counts():
    stats = make(slots=4, slot_bytes=10_000).stats()
    assert stats.bytes == 4 * 12_288
    assert stats.waste_bytes == 4 * 2_288
    assert (stats.slots, stats.slot_bytes, stats.live, stats.free) == (4, 10_000, 0, 4)
    assert stats.reason
