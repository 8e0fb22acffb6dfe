"""shared=False: memory of this process alone, with every promise but the descriptor."""

import gc
import socket
from pathlib import Path

import pytest

from lf_memory import HostPool, PoolError, VariablePool, send_pool

MIB = 1 << 20
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
THP_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def resident(pool):
    """Bytes of the pool that have memory, from /proc/self/smaps."""
    start = f"{pool.buffer.ctypes.data:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(start) for line in lines)
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def test_every_page_is_there_from_the_start(open_fds):
    before = open_fds()
    pool = HostPool(3 * MIB, 3, "off", shared=False)
    assert open_fds() == before
    assert resident(pool) == 9 * MIB
    assert pool.pages == "normal"
    lease = pool.acquire()
    assert lease.address % (2 * MIB) == 0
    lease.array[:] = 4
    array = lease.array
    del pool, lease
    gc.collect()
    assert (array == 4).all()


def test_there_is_no_descriptor():
    pool = HostPool(64, 1, shared=False)
    with pytest.raises(PoolError, match="not shared"):
        _ = pool.fd
    one, two = socket.socketpair()
    with one, two, pytest.raises(PoolError, match="not shared"):
        send_pool(one, pool)


def test_a_forked_child_sees_a_copy(in_fork):
    pool = HostPool(64, 1, shared=False)
    lease = pool.acquire()
    lease.array[:] = 1

    def child():
        assert (lease.array == 1).all()
        lease.array[:] = 2

    assert in_fork(child) == 0
    assert (lease.array == 1).all()


def test_transparent_huge_pages_are_asked_of_another_setting(setting):
    with setting(THP_POLICY, "madvise\n"):
        pool = HostPool(MIB, 4, "auto", shared=False)
        assert pool.pages == "thp" or "memory is fragmented" in pool.stats().reason
    with setting(THP_POLICY, "never\n"), pytest.raises(PoolError, match=r"enabled is never; .*echo madvise"):
        HostPool(MIB, 4, "thp", shared=False)


def test_reserved_huge_pages_are_taken(setting):
    with setting(NR_HUGEPAGES, "2\n"):
        if int(NR_HUGEPAGES.read_text()) < 2:
            pytest.skip("the kernel could not reserve two huge pages")
        pool = HostPool(MIB, 4, "hugetlb", shared=False)
        for lease in [pool.acquire() for _ in range(4)]:
            lease.array[:] = 1
        with pytest.raises(PoolError, match="0 free"):
            HostPool(MIB, 2, "hugetlb", shared=False)
        del pool, lease
        gc.collect()


def test_it_grows_and_trims_too(recorder):
    device = recorder()
    pool = VariablePool(4 * MIB, "off", shared=False, initial_bytes=0, grow_bytes=MIB, pin=device)
    lease = pool.acquire(2 * MIB)
    view = lease.array
    view[:] = 5
    assert list(device.ranges.values()) == [2 * MIB]
    lease.release()
    assert pool.trim() == 2 * MIB
    assert device.ranges == {}
    assert not view.any()
