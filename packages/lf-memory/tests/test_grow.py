"""VariablePool that grows to its bound and gives memory back."""

import itertools
import os
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf_memory import PoolError, PoolTimeout, VariablePool

MIB = 1 << 20
PAGE = 4096


def resident(pool):
    """Bytes of the pool's memfd that have memory."""
    return os.fstat(pool.fd).st_blocks * 512


def test_a_pool_starts_with_nothing_and_grows_by_steps():
    pool = VariablePool(8 * MIB, initial_bytes=0, grow_bytes=2 * MIB)
    assert (pool.stats().bytes, pool.stats().max_bytes, resident(pool)) == (0, 8 * MIB, 0)
    small = pool.acquire(5)
    assert pool.stats().bytes == resident(pool) == 2 * MIB
    large = pool.acquire(3 * MIB + 1)
    stats = pool.stats()
    assert (stats.extents, stats.grown, stats.bytes) == (2, 2, 5 * MIB + PAGE)
    assert large.offset == 2 * MIB
    small.array[:], large.array[:] = 1, 2
    assert small.array.sum() == 5


def test_growing_stops_at_the_bound():
    pool = VariablePool(4 * MIB, initial_bytes=MIB, grow_bytes=2 * MIB)
    leases = [pool.acquire(MIB) for _ in range(4)]
    assert pool.stats().bytes == 4 * MIB
    with pytest.raises(PoolTimeout, match="4 leased"):
        pool.acquire(1, timeout=0)
    leases[2].release()
    assert pool.acquire(MIB, timeout=0).offset == 2 * MIB


def test_trim_returns_unused_memory_and_keeps_what_is_leased():
    pool = VariablePool(8 * MIB, initial_bytes=2 * MIB, grow_bytes=2 * MIB)
    kept, gone = pool.acquire(MIB), pool.acquire(2 * MIB)
    kept.array[:] = 7
    gone.release()
    assert pool.trim() == 2 * MIB
    assert resident(pool) == pool.stats().bytes == 2 * MIB
    assert pool.stats().trimmed == 2 * MIB
    assert (kept.array == 7).all()
    assert pool.trim() == 0
    kept.release()
    assert pool.trim() == 2 * MIB
    assert (resident(pool), pool.stats().extents) == (0, 0)
    assert pool.acquire(8 * MIB, timeout=0).array.size == 8 * MIB


def test_extents_that_are_too_small_make_room_for_a_large_request():
    pool = VariablePool(4 * MIB, initial_bytes=0, grow_bytes=MIB)
    for lease in [pool.acquire(MIB) for _ in range(4)]:
        lease.release()
    assert pool.stats().largest_free == MIB
    assert pool.acquire(4 * MIB, timeout=0).array.size == 4 * MIB


def test_fenced_memory_is_not_trimmed(fence):
    pool, event = VariablePool(2 * MIB), fence()
    lease = pool.acquire(PAGE)
    lease.fence(event)
    lease.release()
    assert pool.trim() == 0
    event.passed.set()
    assert pool.trim() == 2 * MIB


def test_each_step_is_page_locked_and_unlocked_with_its_memory(recorder):
    device = recorder()
    pool = VariablePool(4 * MIB, initial_bytes=MIB, grow_bytes=MIB, pin=device)
    lease = pool.acquire(2 * MIB)
    assert sorted(device.ranges.values()) == [MIB, 2 * MIB]
    assert device.ranges[lease.address] == 2 * MIB
    pool.trim()
    assert list(device.ranges.values()) == [2 * MIB]


def test_a_refused_step_leaves_the_pool_as_it_was(recorder):
    pool = VariablePool(4 * MIB, initial_bytes=MIB, grow_bytes=MIB, pin=recorder(room=2 * MIB))
    pool.acquire(MIB).release()
    with pytest.raises(PoolError, match="out of page-locked memory"):
        pool.acquire(2 * MIB)
    assert resident(pool) == pool.stats().bytes == MIB
    assert pool.acquire(MIB, timeout=0).array.size == MIB


def test_the_whole_can_be_registered_only_when_it_is_all_there():
    assert VariablePool(MIB).buffer.nbytes == MIB
    with pytest.raises(PoolError, match="may still grow"):
        _ = VariablePool(MIB, initial_bytes=0).buffer


@pytest.mark.parametrize("kw", [{"initial_bytes": -1}, {"initial_bytes": MIB + 1}, {"grow_bytes": 0}])
def test_impossible_sizes_are_refused(kw):
    with pytest.raises(PoolError, match="between 0 and max_bytes"):
        VariablePool(MIB, **kw)


steps = st.one_of(st.integers(1, 40 * PAGE), st.integers(-40, -1), st.just(0))


@settings(deadline=None, max_examples=60)
@given(st.lists(steps, max_size=60), st.sampled_from([0, 8, 32]))
def test_any_history_agrees_with_a_model(history, initial):
    """Positive: bytes to lease; negative: release one; 0: trim. The model knows only what is out."""
    bound = 32 * PAGE
    pool = VariablePool(bound, initial_bytes=initial * PAGE, grow_bytes=4 * PAGE)
    live = []
    for serial, step in enumerate(history):
        if step > 0:
            try:
                lease = pool.acquire(step, timeout=0)
            except PoolTimeout:
                assert pool.stats().largest_free < step
                assert live, "an empty pool refused what it may hold"
                continue
            except PoolError:
                assert step > bound
                continue
            lease.array[:] = serial % 251
            live.append((lease, serial % 251))
        elif step < 0 and live:
            lease, mark = live.pop(step % len(live))
            assert (lease.array == mark).all()
            lease.release()
        else:
            pool.trim()
        stats, out = pool.stats(), [lease.array.nbytes for lease, _ in live]
        taken = sum(-(-n // PAGE) * PAGE for n in out)
        assert (stats.live, stats.live_bytes) == (len(out), sum(out))
        assert stats.waste_bytes == taken - sum(out)
        assert stats.free_bytes == stats.bytes - taken
        assert taken <= stats.bytes <= bound
        assert resident(pool) == stats.bytes
        ends = sorted((lease.offset, lease.array.nbytes) for lease, _ in live)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ends))
    assert all((lease.array == mark).all() for lease, mark in live)


def test_threads_may_grow_trim_and_lease_at_once():
    pool, errors = VariablePool(64 * PAGE, initial_bytes=0, grow_bytes=4 * PAGE), []

    def work(me):
        rng = random.Random(me)
        for i in range(200):
            lease = pool.acquire(rng.randrange(1, 12 * PAGE), timeout=30)
            lease.array[:] = me
            if rng.random() < 0.2:
                pool.trim()
            if not (lease.array == me).all():
                errors.append((me, i))
            lease.release()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    pool.trim()
    assert resident(pool) == 0
