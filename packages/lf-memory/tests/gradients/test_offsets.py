"""Placement and peaks against plain loops over every moment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lf_memory.gradients import PlanError
from lf_memory.gradients._json import _check_placements
from lf_memory.gradients._layout import lay_out
from lf_memory.gradients._offsets import Span, aligned, peak_bytes, place
from lf_memory.gradients._policy import Policy, last_steps

span = st.builds(
    lambda nbytes, born, life: Span(nbytes, born, born + life),
    st.integers(0, 3000),
    *[st.integers(1, 30)] * 2,
)
spans = st.lists(span, max_size=40)


def test_aligned_rounds_up():
    assert [aligned(n, 128) for n in (0, 1, 128, 129)] == [0, 128, 128, 256]


@given(spans)
def test_the_peak_is_the_fullest_moment(spans):
    levels = [sum(s.nbytes for s in spans if s.born <= at < s.died) for at in range(70)]
    assert peak_bytes(spans) == max(levels)


@given(spans, st.sampled_from([1, 64, 128]))
def test_what_lives_at_one_time_never_overlaps(spans, alignment):
    offsets, size = place(spans, alignment)
    ranges = list(zip(offsets, spans, strict=True))
    for at, (low, one) in enumerate(ranges):
        assert low % alignment == 0
        assert low + one.nbytes <= size
        for other_low, other in ranges[:at]:
            if one.born < other.died and other.born < one.died and one.nbytes and other.nbytes:
                assert low + one.nbytes <= other_low or other_low + other.nbytes <= low
    assert size >= peak_bytes(spans)


@given(spans)
def test_a_storage_is_never_larger_than_all_spans_together(spans):
    assert place(spans)[1] <= sum(aligned(s.nbytes) for s in spans)


def test_spans_of_one_size_and_length_take_what_is_live():
    """A training step in mode "bucket" looks like this."""
    line = [Span(1000, at, at + 3) for at in range(50)]
    assert place(line, 1)[1] == peak_bytes(line) == 3000


def test_nothing_takes_nothing():
    assert place([]) == ([], 0)
    assert peak_bytes([]) == 0


sizes = st.lists(st.integers(1, 100), max_size=30)


@given(sizes)
def test_buckets_hold_every_gradient_once_in_order(sizes):
    for mode in ("fused", "bucket", "all-alive"):
        buckets = Policy(mode, bucket_bytes=120).buckets(sizes)
        assert [at for bucket in buckets for at in bucket] == list(range(len(sizes)))


@given(sizes)
def test_a_gradient_lives_until_its_bucket_is_full(sizes):
    steps = [3 * at for at in range(len(sizes))]
    ends = last_steps(Policy("bucket", bucket_bytes=120), steps, sizes, 1000)
    held = 0
    for at, size in enumerate(sizes):
        held += size
        full = held >= 120
        waiting = [e for s, e in zip(steps, ends, strict=True) if s <= steps[at] < e]
        assert bool(waiting) == (not full)
        held = 0 if full else held


@given(sizes, st.sampled_from(["fused", "bucket", "all-alive"]), st.integers(1, 2), st.integers(1, 300))
def test_gradients_of_any_pass_are_laid_out_apart_and_close_together(sizes, mode, accumulation, bucket_bytes):
    policy = Policy(mode, bucket_bytes, accumulation)
    completed = {str(at): (2 * at, size) for at, size in enumerate(sizes)}
    placements = lay_out(completed, policy, 100)
    _check_placements(placements, 100)  # raises if two that live at one time overlap
    assert [one.name for one in placements] == list(completed)
    for bucket in policy.buckets(sizes):
        for at in bucket[1:]:
            assert placements[at].offset == aligned(placements[at - 1].offset + placements[at - 1].nbytes)


def test_modes_end_lives_where_they_say():
    steps, sizes = [1, 4, 6], [10, 10, 10]
    assert last_steps(Policy("all-alive"), steps, sizes, 9) == [9, 9, 9]
    assert last_steps(Policy("fused"), steps, sizes, 9) == [1, 4, 6]
    assert last_steps(Policy("bucket", bucket_bytes=20), steps, sizes, 9) == [4, 4, 9]
    assert last_steps(Policy("fused", accumulation=2), steps, sizes, 9) == [9, 9, 9]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"mode": "eager"}, "all-alive, fused, bucket"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0"),
        ({"bucket_bytes": 1.5}, "bucket_bytes is 1.5"),
        ({"accumulation": 0}, "accumulation is 0"),
        ({"accumulation": True}, "accumulation is True"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(arguments, word):
    with pytest.raises(PlanError, match=word):
        Policy(**arguments)
