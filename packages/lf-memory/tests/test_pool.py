"""HostPool: construction, leases, fences, threads, processes."""

import gc
import os
import random
import resource
import signal
import threading
import time

import numpy as np
import pytest

from lf_memory import HostPool, PoolError, PoolTimeout


def make(slots=4, slot_bytes=10_000, **kw):
    return HostPool(slot_bytes, slots, **kw)


def open_fds():
    return len(os.listdir("/proc/self/fd"))


class Event:
    """A fence that passes when told to."""

    def __init__(self):
        self.passed = threading.Event()
        self.waited = 0

    def query(self):
        return self.passed.is_set()

    def wait(self):
        self.waited += 1
        self.passed.wait()


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


@pytest.mark.parametrize(("shape", "offset"), [((10_001,), 0), ((10_000,), 1), ((2, 10_000), 0)])
def test_a_view_beyond_the_slot_is_refused(shape, offset):
    lease = make().acquire()
    with pytest.raises(PoolError, match="does not fit"):
        lease.view(shape, np.uint8, offset)


def test_a_fenced_slot_is_not_handed_out_before_its_fence_passes():
    pool = make(slots=2)
    event = Event()
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


def test_every_fence_of_a_lease_must_pass():
    pool = make(slots=1)
    first, second = Event(), Event()
    lease = pool.acquire()
    lease.fence(first)
    lease.fence(second)
    lease.release()
    first.passed.set()
    assert pool.try_acquire() is None
    second.passed.set()
    assert pool.try_acquire() is not None


def test_a_collected_lease_keeps_its_fence():
    pool = make(slots=1)
    event = Event()
    pool.acquire().fence(event)
    gc.collect()
    assert pool.try_acquire() is None
    event.passed.set()
    assert pool.try_acquire() is not None


def test_a_fence_that_is_none_is_refused():
    with pytest.raises(PoolError, match="query"):
        make().acquire().fence(object())


def test_a_failing_fence_raises_and_keeps_the_slot():
    class Broken(Event):
        def query(self):
            raise RuntimeError("device lost")

    pool = make(slots=1)
    lease = pool.acquire()
    lease.fence(Broken())
    lease.release()
    with pytest.raises(RuntimeError, match="device lost"):
        pool.acquire(timeout=0.1)
    assert pool.stats().fenced == 1


def test_close_refuses_while_leases_are_live_and_waits_for_fences():
    pool = make()
    lease = pool.acquire()
    with pytest.raises(PoolError, match="leased"):
        pool.close()
    event = Event()
    lease.fence(event)
    lease.release()
    threading.Timer(0.02, event.passed.set).start()
    pool.close()
    assert event.waited == 1
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        pool.acquire()


def test_arrays_stay_valid_after_a_forced_close():
    pool = make()
    array = pool.acquire().array
    array[:] = 7
    pool.close(force=True)
    del pool
    gc.collect()
    assert (array == 7).all()
    array[:] = 8


def test_close_gives_the_memory_up_even_if_the_pool_object_stays():
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


def test_no_descriptor_and_no_mapping_is_leaked():
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


def test_threads_never_share_a_slot():
    pool = make(slots=3, slot_bytes=64)
    errors = []

    def work(me):
        rng = random.Random(me)
        for _ in range(2000):
            lease = pool.acquire(timeout=30)
            array = lease.array
            array[:] = me
            if rng.random() < 0.1:
                time.sleep(0)
            if not (array == me).all():
                errors.append(me)
            if rng.random() < 0.5:
                lease.release()
            del lease, array  # who holds a slot while waiting for another can starve everyone

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    gc.collect()
    stats = pool.stats()
    assert not errors
    assert (stats.live, stats.free) == (0, 3)
    assert stats.peak == 3


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


@pytest.fixture
def interrupts():
    """A switch: while interrupts[0] is true the next tick of CPU time raises KeyboardInterrupt once."""
    armed = [False]

    def tick(*_):
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, tick)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005, 0.0005)
    yield armed
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


def test_ctrl_c_at_any_moment_loses_no_slot(interrupts):
    """Interrupts arrive between any two lines, also while arrays are being collected."""
    pool = make(slots=3, slot_bytes=64)
    for _ in range(300):
        array = lease = None
        try:
            interrupts[0] = True
            while True:
                array = pool.acquire(timeout=5).array
                lease = pool.acquire(timeout=5)
                lease.release()
                del array, lease
        except KeyboardInterrupt:
            pass
        finally:
            interrupts[0] = False
    array = lease = None
    leases = [pool.acquire(timeout=1) for _ in range(3)]
    assert sorted(lease.index for lease in leases) == [0, 1, 2]


def test_attach_shows_the_same_bytes_read_only():
    pool = make()
    lease = pool.acquire()
    lease.array[:] = np.arange(10_000) % 251
    view = HostPool.attach(pool.fd, pool.slot_bytes)
    assert view.slots == 4
    seen = view.slot(lease.index)
    assert (seen == lease.array).all()
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1
    lease.array[0] = 99
    assert seen[0] == 99
    with pytest.raises(PoolError, match="slot 4"):
        view.slot(4)


def test_attach_refuses_what_is_too_small(tmp_path):
    with open(tmp_path / "f", "wb+") as file, pytest.raises(PoolError, match="not even one slot"):
        HostPool.attach(file.fileno(), 4096)


def test_another_holder_of_the_descriptor_cannot_truncate_the_pool():
    pool = make()
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, 4096)


def run_in_fork(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_may_read_but_not_acquire():
    pool = make()
    lease = pool.acquire()
    lease.array[:] = 5

    def child():
        assert (lease.array == 5).all()
        with pytest.raises(PoolError, match="belongs to process"):
            pool.acquire()
        assert (HostPool.attach(pool.fd, pool.slot_bytes).slot(lease.index) == 5).all()
        assert HostPool(100, 1).acquire().array.shape == (100,)

    assert run_in_fork(child) == 0
    assert pool.stats().live == 1


def test_the_descriptor_is_not_inherited_by_exec():
    pool = make()
    assert not os.get_inheritable(pool.fd)


@pytest.mark.parametrize("args", [(0, 1), (1, 0), (-5, 3)])
def test_sizes_below_one_are_refused(args):
    with pytest.raises(PoolError, match="at least 1"):
        HostPool(*args)


def test_a_pool_larger_than_memory_names_the_bytes_needed():
    with pytest.raises(PoolError, match="available") as caught:
        HostPool(1 << 40, 2)
    assert caught.value.needed == 2 << 40
    with pytest.raises(PoolError, match="not possible"):
        HostPool(1 << 60, 4)


def test_a_refusing_kernel_is_reported_with_the_bytes_needed():
    def child():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(PoolError, match="RLIMIT_FSIZE") as caught:
            HostPool(1 << 20, 4)
        assert caught.value.needed == 4 << 20

    assert run_in_fork(child) == 0


def test_running_out_of_descriptors_is_reported():
    def child():
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        with pytest.raises((PoolError, OSError)):
            HostPool(4096, 1)

    assert run_in_fork(child) == 0


def test_stats_report_waste_and_counts():
    stats = make(slots=4, slot_bytes=10_000).stats()
    assert stats.bytes == 4 * 12_288
    assert stats.waste_bytes == 4 * 2_288
    assert (stats.slots, stats.slot_bytes, stats.live, stats.free) == (4, 10_000, 0, 4)
    assert stats.reason
