"""Waiting for memory: order, timeouts, and who is named."""

import threading
import time

import pytest

from lf_memory import Holder, HostPool, PoolError, PoolTimeout, VariablePool

PAGE = 4096


def until(condition):
    """Wait for what another thread does; the test's own time limit ends a wait in vain."""
    while not condition():
        time.sleep(0.001)


def start(pool, order, name, *args):
    """A thread that waits for memory and notes when it got it; returns once it stands in line."""
    before = pool.stats().waiting

    def work():
        lease = pool.acquire(*args, timeout=30)
        order.append(name)
        lease.release()

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: pool.stats().waiting > before)
    return thread


def test_slots_go_to_those_who_came_first():
    pool, order = HostPool(64, 1), []
    lease = pool.acquire()
    threads = [start(pool, order, i) for i in range(8)]
    lease.release()
    for thread in threads:
        thread.join()
    assert order == list(range(8))
    assert pool.stats().waits == 8
    assert pool.stats().waiting == 0


def test_a_large_request_is_not_overtaken_by_small_ones():
    pool, order = VariablePool(4 * PAGE), []
    first, second = pool.acquire(2 * PAGE), pool.acquire(PAGE)
    large = start(pool, order, "large", 4 * PAGE)
    small = start(pool, order, "small", PAGE)
    assert pool.try_acquire(PAGE) is None  # one page is free, and others are before us
    with pytest.raises(PoolTimeout, match="2 others waiting"):
        pool.acquire(PAGE, timeout=0)
    first.release()
    assert pool.stats().waiting == 2
    second.release()
    for thread in (large, small):
        thread.join()
    assert order == ["large", "small"]


def test_who_gives_up_does_not_hold_up_the_others():
    pool, order = HostPool(64, 1), []
    lease = pool.acquire()

    def give_up():
        with pytest.raises(PoolTimeout):
            pool.acquire(timeout=0.05)

    quitter = threading.Thread(target=give_up)
    quitter.start()
    until(lambda: pool.stats().waiting == 1)
    patient = threading.Thread(target=lambda: order.append(pool.acquire(timeout=30).index))
    patient.start()
    quitter.join()
    until(lambda: pool.stats().waiting == 1)
    lease.release()
    patient.join()
    assert order == [0]
    assert pool.stats().timeouts == 1
    assert pool.try_acquire() is not None


def test_a_collected_slot_wakes_who_waits():
    pool, order = HostPool(64, 1), []
    lease = pool.acquire()
    thread = start(pool, order, "waiter")
    del lease
    thread.join()
    assert order == ["waiter"]


def test_closing_ends_every_wait():
    pool, raised = HostPool(64, 1), []
    lease = pool.acquire()

    def work():
        with pytest.raises(PoolError, match="closed"):
            pool.acquire()
        raised.append(True)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: pool.stats().waiting == 3)
    pool.close(force=True)
    for thread in threads:
        thread.join()
    assert len(raised) == 3
    assert lease.array.size == 64


def test_a_timeout_names_the_holders():
    pool = VariablePool(4 * PAGE)
    leases = [pool.acquire(PAGE), pool.acquire(5)]
    with pytest.raises(PoolTimeout, match=r"held: ranges \[0, 1\]") as caught:
        pool.acquire(3 * PAGE, timeout=0)
    assert caught.value.holders == (Holder(0, PAGE, ""), Holder(1, 5, ""))
    for lease in leases:
        lease.release()


def test_a_timeout_in_safety_mode_says_where_they_were_acquired():
    pool = HostPool(64, 1, safety=True)
    lease = pool.acquire()
    with pytest.raises(PoolTimeout, match=r"held: slots \[0 \(64 bytes\) at .*test_waiting.py:\d+") as caught:
        pool.acquire(timeout=0)
    assert "test_waiting.py" in caught.value.holders[0].site
    lease.release()


def test_many_holders_are_counted_rather_than_listed():
    pool = HostPool(64, 20)
    leases = [pool.acquire() for _ in range(20)]
    with pytest.raises(PoolTimeout, match=r"7\] and 12 more") as caught:
        pool.acquire(timeout=0)
    assert len(caught.value.holders) == len(leases) == 20
