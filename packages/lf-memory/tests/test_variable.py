"""VariablePool: exact sizes, joined neighbours, the leases of HostPool."""

import gc
import os
import random
import signal
import threading

import pytest

from lf_memory import HostPool, PoolError, PoolTimeout, VariablePool

MIB = 1 << 20
PAGE = 4096


def test_an_odd_size_wastes_less_than_a_page():
    """129.5 MiB and one byte: power-of-two pools take 256 MiB."""
    nbytes = 129 * MIB + MIB // 2 + 1
    pool = VariablePool(131 * MIB)
    lease = pool.acquire(nbytes)
    assert lease.array.shape == (nbytes,)
    stats = pool.stats()
    assert stats.live_bytes == nbytes
    assert stats.waste_bytes < PAGE
    assert stats.bytes < nbytes + 2 * MIB
    assert pool.acquire(MIB, timeout=0).array.size == MIB


def test_allocations_keep_their_bytes_apart():
    pool, rng = VariablePool(4 * MIB), random.Random(7)
    live = {}
    for step in range(3000):
        lease = None
        if len(live) < 40:
            nbytes = rng.choice([1, 100, 4096, 4097, 50_000, 300_000])
            try:
                lease = pool.acquire(nbytes, timeout=0)
            except PoolTimeout:
                assert pool.stats().largest_free < nbytes
        if lease is not None:
            assert lease.address % PAGE == 0
            lease.array[:] = step % 251
            live[step] = lease
        elif live:
            made = rng.choice(sorted(live))
            lease = live.pop(made)
            assert (lease.array == made % 251).all()
            lease.release()
    for made, lease in live.items():
        assert (lease.array == made % 251).all()
        lease.release()
    stats = pool.stats()
    assert (stats.live, stats.live_bytes, stats.free_bytes, stats.largest_free) == (0, 0, 4 * MIB, 4 * MIB)
    assert stats.holes == 1
    assert 0 < stats.peak_bytes <= 4 * MIB


def test_a_request_waits_for_a_hole_that_is_large_enough():
    pool = VariablePool(8 * PAGE)
    leases = [pool.acquire(2 * PAGE) for _ in range(4)]
    with pytest.raises(PoolTimeout, match=r"range of 16384 bytes.*4 leased"):
        pool.acquire(4 * PAGE, timeout=0.01)
    timers = [threading.Timer(0.02 * i, leases[i].release) for i in (1, 2)]
    for timer in timers:
        timer.start()
    assert pool.acquire(4 * PAGE, timeout=10).array.size == 4 * PAGE
    assert pool.stats().wait_s > 0


def test_garbage_comes_back_and_an_array_keeps_its_range():
    pool = VariablePool(2 * PAGE)
    array = pool.acquire(2 * PAGE).array
    gc.collect()
    with pytest.raises(PoolTimeout):
        pool.acquire(1, timeout=0)
    del array
    gc.collect()
    lease = pool.acquire(2 * PAGE, timeout=0)
    assert pool.stats().collected == 1
    lease.release()


def test_a_fence_holds_a_range_back():
    class Event:
        done = False

        def query(self):
            return self.done

        def wait(self):
            self.done = True

    pool, event = VariablePool(2 * PAGE), Event()
    lease = pool.acquire(PAGE + 1)
    lease.fence(event)
    lease.release()
    assert pool.stats().fenced == 1
    assert pool.stats().live_bytes == 0 or pool.stats().free_bytes == 0
    with pytest.raises(PoolTimeout, match="1 fenced"):
        pool.acquire(1, timeout=0)
    event.done = True
    assert pool.acquire(1, timeout=0).array.size == 1


@pytest.mark.parametrize("nbytes", [0, -1, 2 * PAGE + 1])
def test_sizes_that_can_never_be_had_are_refused_at_once(nbytes):
    with pytest.raises(PoolError, match="max_bytes") as caught:
        VariablePool(2 * PAGE).acquire(nbytes)
    assert caught.value.available == 2 * PAGE


def test_a_pool_of_nothing_and_one_of_everything_are_refused():
    with pytest.raises(PoolError, match="at least 1"):
        VariablePool(0)
    with pytest.raises(PoolError, match="not possible"):
        VariablePool(1 << 60)


def test_threads_never_share_bytes():
    pool, errors = VariablePool(16 * PAGE), []

    def work(me):
        rng = random.Random(me)
        for _ in range(500):
            lease = pool.acquire(rng.randrange(1, 6 * PAGE), timeout=30)
            lease.array[:] = me
            if not (lease.array == me).all():
                errors.append(me)
            lease.release()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert pool.stats().largest_free == 16 * PAGE


def test_ctrl_c_at_any_moment_loses_no_byte():
    pool, armed = VariablePool(8 * PAGE), [False]

    def tick(*_):
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, tick)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005, 0.0005)
    try:
        for _ in range(300):
            one = two = None
            try:
                armed[0] = True
                while True:
                    one = pool.acquire(3 * PAGE, timeout=5).array
                    two = pool.acquire(2 * PAGE, timeout=5)
                    two.release()
                    del one, two
            except KeyboardInterrupt:
                pass
            finally:
                armed[0] = False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    one = two = None
    assert pool.acquire(8 * PAGE, timeout=1).array.size == 8 * PAGE


def test_debug_mode_poisons_and_finds_writes_after_release(monkeypatch):
    monkeypatch.setenv("LOONGFORGE_DEBUG_MEMORY", "1")
    pool = VariablePool(4 * PAGE)
    lease = pool.acquire(PAGE + 5)
    view = lease.array
    lease.release()
    assert (view == 0xDB).all()
    pool.acquire(3 * PAGE).release()
    view[PAGE + 1] = 0
    with pytest.raises(PoolError, match=f"range 0 was written at byte {PAGE + 1} after its release"):
        pool.acquire(4 * PAGE)
    assert pool.stats().largest_free == 4 * PAGE
    assert pool.acquire(4 * PAGE).array.size == 4 * PAGE
    assert {event.action for event in pool.trace()} == {"acquire", "release", "collect"}


def test_closing_and_forking_are_as_for_fixed_slots():
    pool = VariablePool(2 * PAGE)
    lease = pool.acquire(10)
    lease.array[:] = 9
    assert (HostPool.attach(pool.fd).part(lease.offset, 10) == 9).all()
    pid = os.fork()
    if pid == 0:
        try:
            pool.acquire(10)
        except PoolError as error:
            os._exit(0 if "belongs to process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with pytest.raises(PoolError, match=r"ranges \[0\] are leased"):
        pool.close()
    lease.release()
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        pool.acquire(10)
