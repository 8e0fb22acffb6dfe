"""The huge page ladder; the parts that need root restore what they change."""

import gc
from pathlib import Path

import numpy as np
import pytest

from lf_memory import HostPool, PoolError, VariablePool

MIB = 1 << 20
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
SHMEM_POLICY = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def fill_and_check(pool):
    leases = [pool.acquire() for _ in range(pool.slots)]
    for lease in leases:
        lease.array[:] = lease.index + 1
    assert all((lease.array == lease.index + 1).all() for lease in leases)


def test_hugetlb_pages_are_used_when_reserved(setting):
    with setting(NR_HUGEPAGES, "4\n"):
        if int(NR_HUGEPAGES.read_text()) < 4:
            pytest.skip("the kernel could not reserve four huge pages")
        for choice in ("hugetlb", "auto"):
            pool = HostPool(3 << 20, 2, choice)
            assert pool.pages == "hugetlb"
            assert pool.stats().waste_bytes == 0
            fill_and_check(pool)
            view = HostPool.attach(pool.fd, pool.slot_bytes)
            assert (view.slot(1) == 2).all()
            del pool, view


def test_hugetlb_wastes_less_than_one_page(setting):
    with setting(NR_HUGEPAGES, "3\n"):
        if int(NR_HUGEPAGES.read_text()) < 3:
            pytest.skip("the kernel could not reserve three huge pages")
        pool = HostPool((4 << 20) + 4096, 1, "hugetlb")
        assert pool.stats().waste_bytes < 2 << 20


@pytest.mark.parametrize("kind", [lambda n: HostPool(n, 1, "hugetlb"), lambda n: VariablePool(n, "hugetlb")])
def test_an_odd_size_wastes_less_than_one_reserved_page(setting, kind):
    """129.5 MiB: power-of-two pools take 256 MiB."""
    nbytes = int(129.5 * MIB)
    with setting(NR_HUGEPAGES, "65\n"):
        if int(NR_HUGEPAGES.read_text()) < 65:
            pytest.skip("the kernel could not reserve 65 huge pages")
        pool = kind(nbytes)
        assert pool.pages == "hugetlb"
        assert pool.stats().bytes - nbytes < 2 * MIB
        del pool
        gc.collect()


def test_auto_falls_back_and_says_why(setting):
    with setting(NR_HUGEPAGES, "0\n"), setting(SHMEM_POLICY, "never\n"):
        pool = HostPool(1 << 20, 4, "auto")
    assert pool.pages == "normal"
    assert "hugetlb" in pool.stats().reason
    assert "shmem_enabled is never" in pool.stats().reason
    fill_and_check(pool)


def test_hugetlb_by_name_without_pages_names_the_fix(setting):
    with setting(NR_HUGEPAGES, "0\n"), pytest.raises(PoolError, match="nr_hugepages"):
        HostPool(1 << 20, 4, "hugetlb")


def test_thp_is_used_where_the_kernel_allows_it(setting):
    with setting(SHMEM_POLICY, "advise\n"):
        try:
            pool = HostPool(1 << 20, 4, "thp")
        except PoolError as error:
            pytest.skip(str(error))  # memory is fragmented, or the kernel is older than 5.14
        assert pool.pages == "thp"
        fill_and_check(pool)


def test_thp_by_name_without_permission_names_the_fix(setting):
    with setting(SHMEM_POLICY, "never\n"), pytest.raises(PoolError, match="shmem_enabled"):
        HostPool(1 << 20, 4, "thp")


def test_a_small_pool_takes_normal_pages():
    pool = HostPool(4096, 2, "auto")
    assert pool.pages == "normal"
    assert "smaller" in pool.stats().reason


def test_off_takes_normal_pages():
    assert HostPool(1 << 20, 4, "off").pages == "normal"


def test_an_unknown_choice_is_refused():
    with pytest.raises(PoolError, match="choose one of"):
        HostPool(4096, 1, "yes")


def test_an_odd_size_wastes_less_than_two_mebibytes():
    pool = HostPool(int(129.5 * (1 << 20)), 1)
    assert pool.stats().waste_bytes < 2 << 20
    lease = pool.acquire()
    lease.array[-1] = 1
    assert np.flatnonzero(lease.array[-10:]).tolist() == [9]
