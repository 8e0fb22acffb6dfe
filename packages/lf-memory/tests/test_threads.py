"""Threads and signals."""

import gc
import queue
import random
import threading
import time

import numpy as np

from lf_memory import HostPool, PoolError


def make(slots=4, slot_bytes=10_000, **kw):
    return HostPool(slot_bytes, slots, **kw)


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


def test_two_threads_that_release_the_same_lease_release_it_once():
    pool, results = make(slots=2, slot_bytes=64), []
    barrier = threading.Barrier(2)
    leases = [None]

    def work():
        for _ in range(300):
            if barrier.wait() == 0:
                leases[0] = pool.acquire()
            barrier.wait()
            try:
                leases[0].release()
                results.append(True)
            except PoolError:
                results.append(False)
            barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count(True) == results.count(False) == 300
    assert pool.stats().free == 2


def test_arrays_handed_to_other_threads_keep_their_slot():
    """Producers lease and fill, consumers check and drop: release, garbage and reuse from all sides."""
    pool, errors = make(slots=4, slot_bytes=512), []
    handed = queue.SimpleQueue()

    def produce(me):
        for i in range(400):
            lease = pool.acquire(timeout=30)
            array = lease.view((256,), np.uint16)
            array[:] = me * 1000 + i
            handed.put((array, me * 1000 + i) if i % 2 else (array.reshape(16, 16)[:, ::2], me * 1000 + i))
            del lease, array

    def consume():
        while (item := handed.get()) is not None:
            array, expected = item
            if not (array == expected).all():
                errors.append(expected)
            del item, array

    threads = [threading.Thread(target=produce, args=(i,)) for i in range(3)]
    consumers = [threading.Thread(target=consume) for _ in range(2)]
    for thread in [*threads, *consumers]:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in consumers:
        handed.put(None)
    for thread in consumers:
        thread.join()
    assert not errors
    stats = pool.stats()
    assert (stats.free, stats.acquires, stats.collected) == (4, 1200, 1200)
