"""The plan: which records a step reads."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf_iouring import Plan, PlanError, StateError

EDGES = (4, 8, 16)


def make(counts, global_batch, seed=7, **arguments):
    """A plan over records in random bucket order; returns it with each record's bucket."""
    bucket_of = np.repeat(np.arange(len(counts)), counts)
    np.random.default_rng(1).shuffle(bucket_of)
    lengths = np.array(EDGES)[bucket_of]
    return Plan(lengths, bucket_of, EDGES[: len(counts)], global_batch, seed, **arguments), bucket_of


plans = st.tuples(
    st.lists(st.integers(0, 60), min_size=1, max_size=3).filter(any), st.integers(1, 40), st.booleans()
)


@given(plans)
@settings(max_examples=150, deadline=None)
def test_every_record_appears_exactly_once_an_epoch(case):
    counts, global_batch, shuffle = case
    plan, bucket_of = make(counts, global_batch, shuffle=shuffle)
    for epoch in range(2):
        specs = [plan.batch(epoch * plan.steps_per_epoch + i) for i in range(plan.steps_per_epoch)]
        ids = np.concatenate([spec.ids for spec in specs])
        assert sorted(ids[ids >= 0].tolist()) == list(range(len(bucket_of)))
        assert all(spec.epoch == epoch for spec in specs)


@given(plans)
@settings(max_examples=150, deadline=None)
def test_a_batch_has_the_edge_of_its_largest_record(case):
    counts, global_batch, shuffle = case
    plan, bucket_of = make(counts, global_batch, shuffle=shuffle)
    partial = 0
    for step in range(plan.steps_per_epoch):
        spec = plan.batch(step)
        filled = spec.ids[spec.ids >= 0]
        assert spec.bucket_edge == EDGES[bucket_of[filled].max()]
        partial += len(filled) < global_batch
    assert partial <= 1
    assert plan.steps_per_epoch == -(-len(bucket_of) // global_batch)


@given(plans, st.integers(0, 200), st.integers(0, 30))
@settings(max_examples=80, deadline=None)
def test_a_window_equals_its_batches_one_by_one(case, first, count):
    counts, global_batch, shuffle = case
    plan, _ = make(counts, global_batch, shuffle=shuffle)
    window = plan.window(first, count)
    rows = slice(global_batch // 3, global_batch)
    part = plan.window(first, count, rows)
    assert np.array_equal(part.ids, window.ids[:, rows])
    assert np.array_equal(part.edge, window.edge)
    for i in range(count):
        spec = plan.batch(first + i)
        assert np.array_equal(spec.ids, window.ids[i])
        assert (spec.epoch, spec.bucket_edge) == (window.epoch[i], window.edge[i])


def test_leftovers_roll_into_the_next_larger_bucket():
    plan, bucket_of = make([5, 5, 2], 4, shuffle=False)
    batches = {plan.batch(step).bucket_edge: [] for step in range(plan.steps_per_epoch)}
    for step in range(plan.steps_per_epoch):
        spec = plan.batch(step)
        batches[spec.bucket_edge].append([int(bucket_of[i]) if i >= 0 else -1 for i in spec.ids])
    assert batches == {4: [[0, 0, 0, 0]], 8: [[1, 1, 1, 1]], 16: [[0, 1, 2, 2]]}


def test_ranks_take_contiguous_rows_that_add_up():
    plan, _ = make([50, 30, 20], 24)
    spec = plan.batch(1)
    for world in (1, 2, 3, 4, 6, 8, 12, 24):
        parts = [plan.rank_slice(spec, rank, world) for rank in range(world)]
        assert np.array_equal(np.concatenate(parts), spec.ids)


@pytest.mark.parametrize(("rank", "world"), [(0, 5), (0, 7), (4, 4), (-1, 4), (0, 0)])
def test_a_world_that_does_not_fit_is_refused(rank, world):
    plan, _ = make([50], 24)
    with pytest.raises(PlanError):
        plan.rank_slice(plan.batch(0), rank, world)


def test_without_shuffling_the_order_is_that_of_the_ids():
    plan = Plan(None, None, (8,), 4, 0, shuffle=False, records=10)
    assert [plan.batch(i).ids.tolist() for i in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1]]


def test_epochs_and_seeds_differ():
    plan, _ = make([600], 24)
    other, _ = make([600], 24, seed=8)
    assert not np.array_equal(plan.batch(0).ids, plan.batch(plan.steps_per_epoch).ids)
    assert not np.array_equal(plan.batch(0).ids, other.batch(0).ids)


def test_a_billion_records_need_no_table():
    plan = Plan(None, None, (2048,), 512, 3, records=10**9)
    spec = plan.batch(1_000_000_007)
    assert spec.epoch == 1_000_000_007 // plan.steps_per_epoch
    assert len(set(spec.ids.tolist())) == 512
    assert spec.ids.max() < 10**9


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((None, None, (8,), 4, 0, True, "", 0), "empty"),
        ((None, None, (), 4, 0, True, "", 5), "ascending"),
        ((None, None, (8, 8), 4, 0, True, "", 5), "ascending"),
        ((None, None, (8, 4), 4, 0, True, "", 5), "ascending"),
        ((None, None, (4, 8), 4, 0, True, "", 5), "bucket_of"),
        ((None, None, (8,), 0, 0, True, "", 5), "global_batch"),
        ((None, None, (8,), 4, 0), "unknown"),
        (([1, 2], [0], (8,), 4, 0), "contradictory"),
        (([1, 2], [0, 2], (4, 8), 4, 0), "bucket_of must lie"),
        (([1, 9], [0, 0], (8,), 4, 0), "record 1 has 9 tokens"),
        (([5, 5], [1, 0], (4, 8), 4, 0), "record 1 has 5 tokens"),
    ],
)
def test_arguments_that_fit_no_order_are_refused(arguments, match):
    with pytest.raises(PlanError, match=match):
        Plan(*arguments)


def test_a_negative_step_is_refused():
    with pytest.raises(PlanError):
        make([5], 2)[0].batch(-1)


def test_the_state_is_small_json_and_comes_back():
    plan, _ = make([600, 5, 7], 24, fingerprint="f" * 64)
    text = json.dumps(plan.state(10**15))
    assert len(text) < 1024
    assert plan.check_state(json.loads(text)) == 10**15


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 8}, "seed"),
        ({"global_batch": 48}, "global_batch"),
        ({"fingerprint": "other"}, "fingerprint"),
        ({"version": 2}, "version"),
        ({"epoch": 99}, "epoch"),
        ({"params": {}}, "params"),
    ],
)
def test_a_state_of_another_plan_is_refused_by_name(change, name):
    plan, _ = make([600], 24, fingerprint="one")
    with pytest.raises(StateError, match=name) as caught:
        plan.check_state(plan.state(30) | change)
    assert list(caught.value.differs) == [name]


@pytest.mark.parametrize("state", [{}, {"step": "3"}, {"step": -1}, {"step": True}, None, [1]])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(StateError, match="not a loader state"):
        make([5], 2)[0].check_state(state)
