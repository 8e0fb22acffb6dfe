"""Several processes: attach, fork and spawn."""

import fcntl
import multiprocessing
import multiprocessing.reduction
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from lf_memory import HostPool, PoolError


def make(slots=4, slot_bytes=10_000, **kw):
    return HostPool(slot_bytes, slots, **kw)


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


def test_attach_refuses_what_is_no_pool(tmp_path):
    with open(tmp_path / "f", "wb+") as file, pytest.raises(PoolError, match="not the memory of a pool"):
        HostPool.attach(file.fileno(), 4096)


def test_another_holder_of_the_descriptor_cannot_truncate_the_pool():
    pool = make()
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, 4096)


def test_a_forked_child_may_read_but_not_acquire(in_fork):
    pool = make()
    lease = pool.acquire()
    lease.array[:] = 5

    def child():
        assert (lease.array == 5).all()
        with pytest.raises(PoolError, match="belongs to process"):
            pool.acquire()
        assert (HostPool.attach(pool.fd, pool.slot_bytes).slot(lease.index) == 5).all()
        assert HostPool(100, 1).acquire().array.shape == (100,)

    assert in_fork(child) == 0
    assert pool.stats().live == 1


def test_the_descriptor_is_not_inherited_by_exec():
    pool = make()
    assert not os.get_inheritable(pool.fd)


def test_attach_refuses_other_slots():
    pool = make()
    with pytest.raises(PoolError, match="slots of 10000 bytes, not of 9999"):
        HostPool.attach(pool.fd, 9999)


def test_attach_finds_the_slots_by_itself_also_in_safety_mode():
    pool = make(safety=True)
    lease = pool.acquire()
    other = pool.acquire()
    lease.array[:], other.array[:] = 3, 4
    view = HostPool.attach(pool.fd)
    assert (view.slot_bytes, view.slots) == (10_000, 4)
    assert (view.slot(lease.index) == 3).all()
    assert (view.slot(other.index) == 4).all()
    assert (view.part(other.offset, 10_000) == 4).all()


def test_a_writable_attachment_shares_both_ways():
    pool = make()
    lease = pool.acquire()
    HostPool.attach(pool.fd, writable=True).slot(lease.index)[:] = 9
    assert (lease.array == 9).all()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 0), (0, 4 * 12_288 + 1), (1 << 62, 1 << 62)])
def test_parts_beyond_the_memory_are_refused(offset, nbytes):
    pool = make()
    with pytest.raises(PoolError, match="the pool has"):
        HostPool.attach(pool.fd).part(offset, nbytes)


@pytest.mark.parametrize("name", ["lf-memory-8192-4096", "lf-memory-0-4096", "lf-memory-1-4097", "lf-memory-1-1000000",
                                  "lf-memory-1", "something"])  # fmt: skip
def test_a_memfd_whose_name_does_not_describe_it_is_refused(name):
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 8192)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(PoolError, match=r"do not fit|not the memory of a pool"):
            HostPool.attach(fd)
    finally:
        os.close(fd)


def test_memory_that_its_owner_could_truncate_is_refused():
    fd = os.memfd_create("lf-memory-4096-4096", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 8192)
        with pytest.raises(PoolError, match="not sealed"):
            HostPool.attach(fd)
    finally:
        os.close(fd)


def test_a_closed_descriptor_is_refused():
    with pytest.raises(PoolError, match="Bad file descriptor"):
        HostPool.attach(1_000_000)


def test_a_child_forked_while_a_thread_holds_the_pool_does_not_hang(in_fork):
    pool, stop = make(slots=2, slot_bytes=64), threading.Event()

    def churn():
        while not stop.is_set():
            pool.acquire().release()

    thread = threading.Thread(target=churn)
    thread.start()
    lease = pool.acquire()

    def child():
        lease.release()
        pool.close()
        with pytest.raises(PoolError, match="belongs to process"):
            pool.try_acquire()
        assert pool.stats().slots == 2

    try:
        assert [in_fork(child) for _ in range(20)] == [0] * 20
    finally:
        stop.set()
        thread.join()
    assert pool.stats().live == 1
    lease.release()


def _fill(fd, index):
    """What a spawned worker does; it gets no more than numbers."""
    HostPool.attach(fd, writable=True).slot(index)[:] = 77


def test_a_child_started_by_exec_gets_the_descriptor_by_pass_fds():
    pool = make()
    lease = pool.acquire()
    code = f"from lf_memory import HostPool; HostPool.attach({pool.fd}, writable=True).slot({lease.index})[:] = 77"
    subprocess.run([sys.executable, "-c", code], pass_fds=[pool.fd], check=True)
    assert (lease.array == 77).all()


def test_a_forked_multiprocessing_worker_writes_into_a_slot():
    pool = make()
    lease = pool.acquire()
    worker = multiprocessing.get_context("fork").Process(target=_fill, args=(pool.fd, lease.index))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert (lease.array == 77).all()


def test_a_pool_cannot_be_pickled_to_a_spawned_worker():
    with pytest.raises(TypeError, match="cannot pickle"):
        multiprocessing.reduction.ForkingPickler.dumps(make())
