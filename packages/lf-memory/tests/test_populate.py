"""Getting pages from the kernel: in several threads, all or nothing."""

import errno
import os
import threading

import numpy as np
import pytest

from lf_memory import _populate
from lf_memory._populate import CHUNK, populate, threads_for
from lf_memory._region import PAGE, Region, create_memfd

MIB = 1 << 20


def region_of(size):
    return Region(create_memfd(size, "lf-memory-test"), size)


def resident(region):
    return os.fstat(region.fd).st_blocks * 512


@pytest.fixture
def four_threads(monkeypatch):
    monkeypatch.setattr(_populate, "threads_for", lambda nbytes: 4)


@pytest.mark.parametrize("nbytes", [PAGE, CHUNK, CHUNK + PAGE, 3 * CHUNK])
def test_exactly_the_range_gets_pages(nbytes, four_threads):
    region = region_of(4 * CHUNK)
    populate(region, PAGE, nbytes)
    assert resident(region) == nbytes


def test_threads_follow_the_size_and_the_cores():
    cores = len(os.sched_getaffinity(0))
    assert threads_for(PAGE) == 1
    assert threads_for(CHUNK + 1) == min(2, cores)
    assert threads_for(1 << 40) == min(cores, 16)


def test_a_refusal_in_one_thread_leaves_no_page(monkeypatch, four_threads):
    region, real, calls = region_of(4 * CHUNK), Region.advise, []
    lock = threading.Lock()

    def advise(self, advice, start, nbytes):
        with lock:
            calls.append(start)
        if start == 2 * CHUNK:
            raise OSError(errno.EFAULT, "no page left")
        real(self, advice, start, nbytes)

    monkeypatch.setattr(Region, "advise", advise)
    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        populate(region, 0, 4 * CHUNK)
    assert caught.value.errno == errno.ENOMEM
    assert 2 * CHUNK in calls
    assert resident(region) == 0


def test_a_kernel_without_populate_allocates_all_the_same(monkeypatch):
    def advise(self, advice, start, nbytes):
        raise OSError(errno.EINVAL, "unknown advice")

    monkeypatch.setattr(Region, "advise", advise)
    region = region_of(2 * MIB)
    populate(region, 0, MIB)
    assert resident(region) == MIB


def test_punched_memory_reads_zeros_and_takes_nothing():
    region = region_of(MIB)
    populate(region, 0, MIB)
    os.pwrite(region.fd, b"\xff" * MIB, 0)
    region.punch(0, MIB)
    assert resident(region) == 0
    assert not np.frombuffer(os.pread(region.fd, MIB, 0), np.uint8).any()
