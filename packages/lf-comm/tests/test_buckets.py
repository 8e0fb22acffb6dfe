"""Bucket cuts and orders against all that are possible, and DDP's own way of making buckets."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lf_comm._buckets import _SLACK, Gradient, Profile, Wire, assign, cut, ddp_buckets, exposed, run_stream
from lf_comm._order import Job, order_by_deadline, stall
from lf_comm.cost import Rates

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

seconds = st.integers(0, 1000).map(lambda n: n / 1000)
wires = st.builds(Wire, seconds.map(lambda s: s / 10), st.sampled_from([0.0, 1e-5, 1e-4, 1e-3]))
gradients = st.lists(st.tuples(st.integers(0, 1000), seconds), min_size=1, max_size=8)


def end_of(arrived: list[tuple[int, float]], sizes: list[int], wire: Wire) -> float:
    """When the sums of buckets of so many bytes end, by the simulator."""
    buckets, at, left, late = [], 0, 0, 0.0
    for nbytes, ready in arrived:
        left, late = left + nbytes, max(late, ready)
        if at < len(sizes) and left == sizes[at] and left:
            buckets.append((left, late))
            at, left = at + 1, 0
    assert left == 0
    assert at == len(sizes)
    return run_stream(buckets, wire)[-1].end_s


@patient
@given(gradients, wires)
def test_no_other_cut_ends_earlier_than_a_thousandth_before(
    arrived: list[tuple[int, float]], wire: Wire
) -> None:
    some = [one for one in arrived if one[0]]
    found = cut(arrived, wire)
    if not some:
        assert found == []
        return
    ends = {}
    for chosen in itertools.product([False, True], repeat=len(some) - 1):
        places = [0, *(i + 1 for i, yes in enumerate(chosen) if yes), len(some)]
        sizes = [sum(b for b, _ in some[lo:hi]) for lo, hi in itertools.pairwise(places)]
        ends[tuple(sizes)] = end_of(some, sizes, wire)
    best = min(ends.values())
    assert ends[tuple(found)] <= best * (1 + _SLACK) + 1e-12
    assert len(found) == min(len(sizes) for sizes, end in ends.items() if end <= best * (1 + _SLACK) + 1e-12)


def test_a_long_model_is_cut_in_its_bytes_and_near_the_best() -> None:
    count, wire = 5000, Wire(1e-3, 1e-9)
    arrived = [(4000, i * 1e-4) for i in range(count)]
    sizes = cut(arrived, wire)
    assert sum(sizes) == 4000 * count
    # backward 0.5 s, sums of 20 MB 0.02 s: what is exposed is a small last bucket
    assert end_of(arrived, sizes, wire) - 0.5 < 1e-3 + 0.005 * 0.51 + 1e-3
    assert len(sizes) < 40


def test_the_stream_is_never_interrupted_and_waits_for_gradients() -> None:
    slots = run_stream([(100, 0.5), (100, 0.0), (0, 9.0)], Wire(0.1, 0.01))
    assert [s.begin_s for s in slots] == pytest.approx([0.5, 1.6, 9.0])
    assert [s.end_s for s in slots] == pytest.approx([1.6, 2.7, 9.1])


@patient
@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.booleans()
        ),
        min_size=1,
        max_size=12,
    ),
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
)
def test_buckets_are_those_of_torch(made: list[tuple[int, torch.dtype, bool]], limits: list[int]) -> None:
    tensors = [torch.empty(count, dtype=dtype) for count, dtype, _ in made]
    sparse = [s for _, _, s in made]
    ours = assign(
        [
            Gradient(str(i), t.nbytes, 0.0, kind=str(t.dtype), sparse=s)
            for i, (t, s) in enumerate(zip(tensors, sparse, strict=True))
        ],
        limits,
    )
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, limits, sparse)
    assert sorted(ours, key=min) == theirs


def test_without_a_rebuild_buckets_are_cut_from_the_front_and_summed_from_the_back() -> None:
    profile = Profile(
        tuple(Gradient(name, 10, ready) for name, ready in (("a", 3.0), ("b", 2.0), ("c", 1.0))),
        (2, 1, 0),
        1.0,
        3.0,
    )
    assert ddp_buckets(profile, [10, 20], rebuilt=True) == [[2], [1, 0]]
    assert ddp_buckets(profile, [10, 20], rebuilt=False) == [[1, 2], [0]]
    assert exposed(profile, [[2], [1, 0]], Wire(0.5, 0.0)) == pytest.approx(0.5)
    assert exposed(profile, [[0, 1, 2]], Wire(0.0, 0.1)) == pytest.approx(3.0)


@patient
@given(st.lists(st.builds(Job, st.integers(0, 1000), seconds, seconds), max_size=6), wires, seconds)
def test_no_other_order_stalls_the_forward_less(jobs: list[Job], wire: Wire, backward_s: float) -> None:
    order = order_by_deadline(jobs, wire, backward_s)
    assert sorted(order) == list(range(len(jobs)))
    least = min(stall(jobs, o, wire, backward_s) for o in itertools.permutations(range(len(jobs))))
    assert stall(jobs, order, wire, backward_s) == least


@patient
@given(st.lists(st.builds(Job, st.integers(0, 1000), seconds, seconds), min_size=8, max_size=30), wires)
def test_of_many_buckets_the_order_is_never_worse_than_arrival(jobs: list[Job], wire: Wire) -> None:
    order = order_by_deadline(jobs, wire, 1.0)
    arrival = sorted(range(len(jobs)), key=lambda i: (jobs[i].ready_s, i))
    assert sorted(order) == list(range(len(jobs)))
    assert stall(jobs, order, wire, 1.0) <= stall(jobs, arrival, wire, 1.0)


def test_the_layer_that_is_used_first_overtakes_those_that_came_before() -> None:
    jobs = [Job(10, 0.0, 3.0), Job(10, 0.0, 2.0), Job(10, 1.0, 0.0)]
    wire = Wire(0.0, 0.1)
    assert stall(jobs, (0, 1, 2), wire, 1.0) == pytest.approx(2.0)
    assert stall(jobs, order_by_deadline(jobs, wire, 1.0), wire, 1.0) == pytest.approx(1.0)


def test_rates_become_seconds_of_a_bucket() -> None:
    rates = Rates(1e-3, 1e-9, 0, 0, 0, 0, 0)
    assert Wire.of(rates, 4).seconds(1000) == pytest.approx(1e-3 + 1.5e-6)
    assert Wire.of(rates, 1).seconds(1000) == 0.0


def test_a_profile_needs_each_gradient_once() -> None:
    with pytest.raises(ValueError, match="arrival"):
        Profile((Gradient("a", 1, 0.0),), (0, 0), 1.0, 1.0)
