"""Micro-batches of a step: every sample once, and sums that start as early as they can."""

from __future__ import annotations

from collections.abc import Iterator

import comm_schedule_jobs as jobs
import pytest
import torch
from comm_ranks import Ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lf_comm
from lf_comm._buckets import ddp_buckets
from lf_comm.accumulate import accumulated_step_s, micro_batches

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@patient
@given(st.integers(1, 500), st.integers(1, 60))
def test_every_sample_is_in_one_micro_batch_and_the_last_is_largest(samples: int, most: int) -> None:
    parts = micro_batches(samples, most)
    assert [i for part in parts for i in range(part.begin, part.end)] == list(range(samples))
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    sizes = [part.end - part.begin for part in parts]
    assert len(sizes) == -(-samples // most)
    assert sizes[-1] == min(samples, most) == max(sizes)
    assert sum(part.share for part in parts) == pytest.approx(1)


def compositions(samples: int, most: int) -> Iterator[list[int]]:
    """All sizes of micro-batches in order."""
    if not samples:
        yield []
    for first in range(1, min(samples, most) + 1):
        for rest in compositions(samples - first, most):
            yield [first, *rest]


@patient
@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.lists(st.integers(1, 50), min_size=1, max_size=5),
    st.sampled_from([0.0, 1e-3, 1e-2]),
    st.sampled_from([1e-4, 1e-3, 1e-2]),
)
def test_no_other_micro_batches_make_a_shorter_step(
    samples: int, most: int, layers: list[int], latency: float, per_byte: float
) -> None:
    count, wire = len(layers), lf_comm.Wire(latency, per_byte)
    gradients = tuple(
        lf_comm.Gradient(f"w{i}", nbytes, 0.01 * (count - i)) for i, nbytes in enumerate(layers)
    )
    profile = lf_comm.Profile(gradients, tuple(reversed(range(count))), 0.005 * count, 0.01 * count)
    buckets = ddp_buckets(profile, [30], rebuilt=True)
    ours = [part.end - part.begin for part in micro_batches(samples, most)]
    took = accumulated_step_s(ours, profile, 1, buckets, wire, 1e-3)
    for other in compositions(samples, most):
        assert took <= accumulated_step_s(other, profile, 1, buckets, wire, 1e-3) + 1e-12


def test_the_gradient_is_that_of_the_whole_batch_and_summed_once(ranks: Ranks) -> None:
    for found in ranks.call(jobs.accumulated, 2):
        assert found["apart"] < 1e-6
        assert found["sums"] == 1
        assert "static_graph" in found["said"]


@pytest.mark.parametrize(("samples", "most"), [(0, 1), (1, 0), (-1, 3)])
def test_no_samples_are_refused(samples: int, most: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        micro_batches(samples, most)


def test_weights_are_those_of_a_mean() -> None:
    x = torch.arange(7.0)
    mean = sum(float(x[part.begin : part.end].mean()) * part.share for part in micro_batches(7, 3))
    assert mean == pytest.approx(float(x.mean()))
