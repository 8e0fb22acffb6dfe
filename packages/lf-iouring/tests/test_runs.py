"""Bucket runs: the same order as an array of bucket numbers, in memory for the runs alone."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf_iouring import BucketRuns, Plan, PlanError, plan_of

EDGES = (4, 8, 16)
RUN_LISTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), min_size=1, max_size=30)


@given(RUN_LISTS.filter(lambda runs: any(count for count, _ in runs)), st.integers(1, 40), st.booleans())
@settings(max_examples=150, deadline=None)
def test_runs_and_an_array_of_buckets_give_one_order(runs, global_batch, shuffle):
    counts, buckets = np.array(runs).T
    bucket_of = np.repeat(buckets, counts)
    by_array = Plan(None, bucket_of, EDGES, global_batch, 7, shuffle)
    by_runs = Plan(None, BucketRuns(counts, buckets), EDGES, global_batch, 7, shuffle)
    a, b = (plan.window(0, 2 * plan.steps_per_epoch) for plan in (by_array, by_runs))
    assert np.array_equal(a.ids, b.ids)
    assert np.array_equal(a.edge, b.edge)
    assert by_runs.state(5) == by_array.state(5)


@given(RUN_LISTS)
@settings(max_examples=150, deadline=None)
def test_places_of_a_bucket_are_its_ids_in_order(runs):
    counts, buckets = np.array(runs).T
    bucket_of = np.repeat(buckets, counts)
    table = BucketRuns(counts, buckets)
    again = BucketRuns.of(bucket_of)
    assert table.sizes(3).tolist() == again.sizes(3).tolist() == np.bincount(bucket_of, minlength=3).tolist()
    for bucket in range(table.highest + 1):
        members = np.flatnonzero(bucket_of == bucket)
        places = np.arange(len(members))
        if len(places):
            assert np.array_equal(table.ids(bucket, places), members)
            assert np.array_equal(again.ids(bucket, places), members)


@given(
    RUN_LISTS.filter(lambda runs: any(count for count, _ in runs)),
    st.integers(0, 2**32),
    st.sampled_from([0, 0.03]),
)
@settings(max_examples=150, deadline=None)
def test_the_first_record_over_its_edge_is_named(runs, seed, share):
    counts, buckets = np.array(runs).T
    rng, edges = np.random.default_rng(seed), np.array(EDGES)[np.repeat(buckets, counts)]
    lengths = np.where(rng.random(edges.size) < 1 / 3, 1, edges + (rng.random(edges.size) < share))
    over = np.flatnonzero(lengths > edges)
    expected = int(over[0]) if over.size else None
    assert BucketRuns(counts, buckets).over(lengths, EDGES) == expected


def test_a_billion_records_resume_in_memory_for_the_blocks():
    """10^9 records in 10^5 blocks: a table of the records alone would take 8 GB."""
    blocks = 100_000
    buckets = np.random.default_rng(0).integers(0, 3, blocks)
    tracemalloc.start()
    runs = BucketRuns(np.full(blocks, 10_000), buckets)
    first = Plan(None, runs, EDGES, 512, 3, fingerprint="f")
    state = json.loads(json.dumps(first.state(10**12)))
    plan = Plan(None, runs, EDGES, 512, 3, fingerprint="f")
    spec = plan.batch(plan.check_state(state))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * blocks
    assert plan.records == 10**9
    assert len(set(spec.ids.tolist())) == 512
    assert np.array(EDGES)[buckets[spec.ids // 10_000]].max() == spec.bucket_edge


def test_the_plan_of_a_data_set_is_that_of_its_columns(masked):
    by_columns = Plan(masked.lengths, masked.bucket_of, masked.buckets, 24, 7, fingerprint=masked.fingerprint)
    plan = plan_of(masked, global_batch=24, seed=7)
    assert np.array_equal(plan.window(0, 90).ids, by_columns.window(0, 90).ids)
    assert plan.state(3) == by_columns.state(3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BucketRuns([1, 2], [0]),
        lambda: BucketRuns([[1]], [[0]]),
        lambda: BucketRuns([1, -1], [0, 0]),
        lambda: BucketRuns([1], [-1]),
        lambda: BucketRuns.of([[0]]),
        lambda: BucketRuns.of([0, -1]),
        lambda: Plan(None, BucketRuns([3], [2]), (4, 8), 1, 0),
        lambda: Plan(None, BucketRuns([], []), (4,), 1, 0),
        lambda: Plan(None, BucketRuns([3], [0]), (4,), 1, 0, records=4),
    ],
)
def test_runs_that_do_not_fit_are_refused(make):
    with pytest.raises(PlanError):
        make()
