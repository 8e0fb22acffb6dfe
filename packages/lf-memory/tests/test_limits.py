"""Limits of the machine and of the process: every refusal is a PoolError that says what was needed."""

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lf_memory import HostPool, PoolError, VariablePool

NOBODY = 65534
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")


class Mlock:
    """A registrar that locks through mlock(2), so that RLIMIT_MEMLOCK really refuses."""

    def __init__(self):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._locked = {}

    def register(self, address, nbytes):
        if self._libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)):
            raise PoolError(f"mlock: {os.strerror(ctypes.get_errno())}")
        self._locked[address] = nbytes

    def unregister(self, address):
        self._libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(self._locked.pop(address)))


def without_memlock(nbytes=0):
    """For a forked child: an ordinary user with a limit of page-locked bytes."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, nbytes))
    if os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def test_a_pool_larger_than_memory_names_the_bytes_needed():
    with pytest.raises(PoolError, match="available") as caught:
        HostPool(1 << 40, 2)
    assert caught.value.needed == 2 << 40
    with pytest.raises(PoolError, match="not possible"):
        HostPool(1 << 60, 4)


def test_a_refusing_kernel_is_reported_with_the_bytes_needed(in_fork):
    def child():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(PoolError, match="RLIMIT_FSIZE") as caught:
            HostPool(1 << 20, 4)
        assert caught.value.needed == 4 << 20

    assert in_fork(child) == 0


def test_running_out_of_descriptors_is_reported(in_fork):
    def child():
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        with pytest.raises((PoolError, OSError)):
            HostPool(4096, 1)

    assert in_fork(child) == 0


@pytest.mark.parametrize("hugepages", ["auto", "off"])
def test_an_ordinary_user_without_memlock_gets_every_kind_of_pool(in_fork, hugepages):
    def child():
        without_memlock()
        pool = HostPool(1 << 20, 4, hugepages)
        pool.acquire().array[:] = 1
        growing = VariablePool(4 << 20, hugepages, initial_bytes=0)
        growing.acquire(3 << 20).release()
        assert growing.trim() > 0

    assert in_fork(child) == 0


def test_an_ordinary_user_without_memlock_gets_reserved_huge_pages(in_fork, setting):
    with setting(NR_HUGEPAGES, "2\n"):
        if int(NR_HUGEPAGES.read_text()) < 2:
            pytest.skip("the kernel could not reserve two huge pages")

        def child():
            without_memlock()
            pool = HostPool(1 << 20, 4, "hugetlb")
            pool.acquire().array[:] = 1

        assert in_fork(child) == 0


def test_page_locking_beyond_memlock_is_refused_and_undone(in_fork):
    def child():
        without_memlock(64 << 10)
        with pytest.raises(PoolError, match="1048576 bytes could not be page-locked: mlock: Cannot allocate"):
            HostPool(1 << 18, 4, "off", pin=Mlock())
        assert HostPool(16 << 10, 4, "off", pin=Mlock()).pinned

    assert in_fork(child) == 0


def test_a_limited_address_space_is_reported_with_the_bytes_needed(in_fork):
    def child():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        with pytest.raises(PoolError, match=r"ENOMEM.*ulimit -v") as caught:
            HostPool(1 << 20, 256)
        assert caught.value.needed == 256 << 20
        assert HostPool(1 << 20, 4).acquire().array.size == 1 << 20

    assert in_fork(child) == 0


def test_a_small_dev_shm_is_no_limit():
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting another /dev/shm needs root and unshare(1)")
    code = """
import errno, os
from lf_memory import HostPool
pool = HostPool(1 << 20, 16)
for lease in [pool.acquire() for _ in range(16)]:
    lease.array[:] = 1
with open("/dev/shm/file", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
assert os.listdir("/dev/shm") == ["file"]
"""
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "sh", "-c", mount, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unshare failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr


def test_a_killed_owner_leaves_nothing_behind():
    """The descriptor a second process holds is the only thing that keeps the memory."""
    code = """
import os, signal
from lf_memory import HostPool
pool = HostPool(1 << 20, 4)
print(os.readlink(f"/proc/self/fd/{pool.fd}"), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -9
    assert done.stdout == "/memfd:lf-memory-1048576-1048576 (deleted)\n"
    assert not [name for name in os.listdir("/dev/shm") if "lf-memory" in name]
