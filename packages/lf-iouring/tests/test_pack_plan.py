"""The plan of packed rows: every draw once, any step alone, positions that hold."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf_iouring import Mixture, PackPlan, PlanError

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=50).filter(any)
CASES = st.tuples(
    st.lists(LENGTHS, min_size=1, max_size=3),
    st.integers(1, 16),
    st.integers(1, 6),
    st.integers(1, 40),
    st.booleans(),
)


def make(case):
    sets, capacity, rows, window, shuffle = case
    lengths = [np.array(sizes, np.uint32) for sizes in sets]
    return PackPlan(lengths, Mixture(range(1, len(sets) + 1)), capacity, rows, 7, shuffle, "f", window)


@given(LENGTHS, st.integers(1, 16), st.integers(1, 6), st.integers(1, 40), st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_token_comes_once_an_epoch_and_in_order(sizes, capacity, rows, window, shuffle):
    plan = make(([sizes], capacity, rows, window, shuffle))
    step = 0
    for epoch in range(2):
        seen = {}
        while plan.epoch(step) == epoch:
            spec = plan.batch(step)
            columns = (spec.ids, spec.segments.start, spec.segments.length)
            for record, start, length in zip(*(column.tolist() for column in columns), strict=True):
                assert start == seen.get(record, 0)
                seen[record] = start + length
            step += 1
        assert seen == {record: length for record, length in enumerate(sizes) if length}


@given(CASES)
@settings(max_examples=50, deadline=None)
def test_an_epoch_draws_every_source_by_its_exact_share(case):
    plan = make(case)
    sizes = [len(lengths) for lengths in case[0]]
    ends, weights = np.cumsum(sizes), np.arange(1, len(sizes) + 1)
    drawn = np.zeros(len(sizes), np.int64)
    for window in range(2 * plan.windows_per_epoch):
        drawn += np.bincount(
            np.searchsorted(ends, plan._packer.draws(window)[0], side="right"), minlength=len(sizes)
        )
    assert drawn.sum() == 2 * plan.records
    assert (np.abs(drawn * weights.sum() - drawn.sum() * weights) < weights.sum()).all()


@given(CASES, st.lists(st.integers(0, 60), min_size=1, max_size=10))
@settings(max_examples=100, deadline=None)
def test_any_step_alone_equals_the_step_on_the_way(case, steps):
    plan, other = make(case), make(case)
    on_the_way = [plan.batch(step) for step in range(61)]
    for step in steps:
        spec = other.batch(step)
        expected = on_the_way[step]
        assert (spec.epoch, spec.ids.tolist()) == (expected.epoch, expected.ids.tolist())
        for name in ("row", "place", "start", "length"):
            assert np.array_equal(getattr(spec.segments, name), getattr(expected.segments, name))
        assert other.state(step) == plan.state(step)


@given(CASES, st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_a_fresh_plan_goes_on_from_a_state(case, step):
    plan, fresh = make(case), make(case)
    text = json.dumps(plan.state(step))
    assert len(text) < 1024
    assert fresh.check_state(json.loads(text)) == step
    for at in range(step, step + 5):
        assert fresh.batch(at).ids.tolist() == plan.batch(at).ids.tolist()
        assert fresh.epoch(at) == plan.epoch(at)


@given(CASES, st.integers(0, 20))
@settings(max_examples=50, deadline=None)
def test_the_rows_of_ranks_add_up(case, step):
    plan = make(case)
    whole = plan.batch(step)
    parts = [plan.batch(step, plan.rank_rows(rank, plan.global_batch)) for rank in range(plan.global_batch)]
    assert np.concatenate([part.ids for part in parts]).tolist() == whole.ids.tolist()
    rows = np.concatenate([part.segments.row + rank for rank, part in enumerate(parts)])
    assert np.array_equal(rows, whole.segments.row)


def test_a_state_stays_small_however_far():
    plan = make(([[5] * 50], 16, 4, 40, True))
    window = 10**15
    state = plan.state(0) | {"window": window, "step": 10**17, "batch": 0}
    assert plan.check_state(state) == 10**17
    assert len(json.dumps(plan.state(10**17 + 1))) < 1024
    assert plan.state(10**17 + plan.packed(window).batches)["window"] == window + 1


@pytest.mark.parametrize("lengths", [[[0, 0]], [[1], [0]], [[1]] * 3])
def test_sources_that_cannot_be_packed_are_refused(lengths):
    with pytest.raises(PlanError):
        PackPlan(
            [np.array(sizes, np.uint32) for sizes in lengths], Mixture([1] * min(2, len(lengths))), 8, 1, 0
        )


def test_a_negative_step_is_refused():
    with pytest.raises(PlanError):
        make(([[1]], 8, 1, 1, True)).batch(-1)


def test_the_order_is_that_of_the_first_release():
    """What a state names must be the same batch for ever; a change needs a new STATE_VERSION."""
    rng = np.random.default_rng(5)
    lengths = [rng.integers(0, 700, n).astype(np.uint32) for n in (400, 300)]
    total = hashlib.sha256()
    for shuffle in (True, False):
        plan = PackPlan(lengths, Mixture([2, 1]), 256, 4, 7, shuffle, "f", 150)
        for step in range(120):
            spec = plan.batch(step, slice(1, 4))
            cut = spec.segments
            for array in (spec.ids, cut.row, cut.place, cut.start, cut.length):
                total.update(np.asarray(array, np.int64).tobytes())
            total.update(repr((spec.step, spec.epoch, sorted(plan.state(step).items(), key=str))).encode())
    assert total.hexdigest() == "fd819db0edb34f58ab8e1f9e2bc1ba218aad45e3c5a59653c537f35240d8b76d"


def test_windows_without_tokens_are_passed_over():
    plan = make(([[0] * 20 + [3] * 5], 8, 1, 5, False))
    assert [plan.locate(step) for step in range(4)] == [(4, 0), (4, 1), (4, 2), (9, 0)]
    assert [plan.locate(step) for step in (0, 2, 1)] == [(4, 0), (4, 2), (4, 1)]
