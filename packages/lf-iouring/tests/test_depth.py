"""The prefetch depth: bounded whatever happens, deep where reads are uneven, shallow where they are not."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf_iouring import LoaderError
from lf_iouring._depth import WINDOW, AutoDepth, Decision


def simulate(latencies, step_s, start=4, low=2, high=32, parallel=None):
    """Depths and waits of a consumer that takes `step_s` a batch; read i takes latencies[i].

    A read begins when the batch `depth` before it is taken, and not before one of `parallel` readers is free.
    """
    decision, now, begun, ready = Decision(start, low, high), 0.0, 0, []
    free = [0.0] * (parallel or len(latencies))
    depths, waits = [], []
    for number in range(len(latencies)):
        while begun <= min(number + decision.depth, len(latencies) - 1):
            reader = int(np.argmin(free)) if parallel else begun
            free[reader] = max(now, free[reader]) + latencies[begun]
            ready.append(free[reader])
            begun += 1
        wait = max(0.0, ready[number] - now)
        now += wait + step_s
        decision = decision.after(wait, wait + step_s)
        depths.append(decision.depth)
        waits.append(wait)
    return np.array(depths), np.array(waits)


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=2000),
    st.integers(1, 9),
    st.integers(0, 30),
    st.integers(0, 30),
)
@settings(max_examples=100, deadline=None)
def test_the_depth_stays_between_its_bounds_and_changes_once_a_window(steps, low, more, start):
    decision = Decision(min(low + start, low + more), low, low + more)
    for number, (wait, rest) in enumerate(steps, 1):
        after = decision.after(wait, wait + rest)
        assert low <= after.depth <= low + more
        assert after.depth == decision.depth or number % WINDOW == 0
        decision = after


@given(st.floats(0, 1e-4), st.integers(2, 32))
@settings(max_examples=20, deadline=None)
def test_even_reads_end_at_the_lower_bound(latency, start):
    depths, waits = simulate([latency] * (WINDOW * 16 * 31), 0.02, start=start)
    assert depths[-1] == 2
    assert not waits[1:].any()


def test_uneven_reads_make_it_deep_enough_to_hide_them():
    latencies = np.full(40_000, 0.004)
    latencies[::50] = 0.150  # 7.5 steps
    depths, waits = simulate(latencies, 0.020)
    late = slice(-10_000, None)
    assert 7 <= depths[late].max() <= 16
    assert np.percentile(waits[late], 99) == 0


def test_it_does_not_swing_between_two_depths_for_ever():
    latencies = np.full(200_000, 0.004)
    latencies[::50] = 0.150
    depths, _ = simulate(latencies, 0.020)
    changes = np.flatnonzero(np.diff(depths))
    assert len(changes[changes > 100_000]) <= len(changes[changes <= 100_000])
    assert len(changes) < 60


def test_a_disk_that_is_too_slow_is_not_asked_for_more_and_more():
    depths, waits = simulate([0.05] * 20_000, 0.020, parallel=2)
    assert (waits[100:] > 0).mean() > 0.4  # no depth can help: 25 ms a batch for a step of 20
    assert np.median(depths) <= 6  # the first window, which begins with an empty pipeline, is no measure
    assert len(np.flatnonzero(np.diff(depths))) < 20


def test_more_reads_in_flight_are_kept_where_they_help():
    depths, waits = simulate([0.150] * 5_000, 0.020)
    assert depths[-1] >= 8
    assert not waits[-1000:].any()


def test_changes_are_counted_and_logged(caplog):
    depth = AutoDepth(4, 2, 32)
    with caplog.at_level(logging.INFO, "lf_iouring"):
        for _ in range(WINDOW + 1):
            depth.observe(1.0)
    assert (depth.value, depth.changes) == (6, 1)
    assert "prefetch depth 4 -> 6: 32 of 32 steps waited" in caplog.text


@pytest.mark.parametrize("pack", [None, 256])
def test_a_loader_with_automatic_depth_delivers_the_same_and_reports_it(loader_of, ids_of, pack):
    expected = ids_of(loader_of(epochs=3, pack=pack))
    for asked in (0, "auto"):
        loader = loader_of(epochs=3, pack=pack, prefetch_factor=asked)
        assert ids_of(loader) == expected
        info, stats = loader.info(), loader.stats()
        low, high = info.prefetch_bounds
        assert low <= stats.prefetch <= high
        assert info.slots > high
        assert f"{low} to {high}" in info.prefetch_reason
        assert stats.prefetch_changes >= 0


def test_a_fixed_depth_is_reported_as_asked_for(loader_of):
    loader = loader_of(prefetch_factor=7)
    assert loader.info().prefetch_bounds == (7, 7)
    assert loader.info().prefetch_reason == "prefetch_factor"
    assert (loader.stats().prefetch, loader.stats().prefetch_changes) == (7, 0)


def test_a_depth_that_was_cut_is_reported_with_the_reason(loader_of):
    loader = loader_of(prefetch_factor=59, pack=256)
    depth = loader.stats().prefetch
    assert depth < 59
    assert f"prefetch_factor=59, cut to {depth}" in loader.info().prefetch_reason


@pytest.mark.parametrize("asked", [-1, 60, "many", 2.5, None, True])
def test_other_depths_are_refused(loader_of, asked):
    with pytest.raises(LoaderError, match="prefetch_factor"):
        loader_of(prefetch_factor=asked)
