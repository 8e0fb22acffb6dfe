"""Embeddings of which a rank hits no row, and parameters that a rank leaves out."""

from __future__ import annotations

import pickle

import comm_unused_jobs as jobs
import pytest
from comm_ranks import Ranks

import lf_comm


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_rows_some_rows_and_all_rows_are_the_dense_sum(ranks: Ranks, world: int, sparse: bool) -> None:
    assert ranks.call(jobs.embeddings, world, sparse=sparse) == [[]] * world


@pytest.mark.parametrize("hook", ["rows", "accurate"])
def test_parameters_left_out_without_the_flag_are_named_on_every_rank(ranks: Ranks, hook: str) -> None:
    for rank, found in enumerate(ranks.call(jobs.left_out, 2, hook=hook)):
        other = 1 - rank
        assert found["names"] == [f"experts.{other}.bias", f"experts.{other}.weight"]
        assert "find_unused_parameters=True" in found["text"]


def test_frozen_parameters_and_passes_that_are_not_summed_are_left_alone(ranks: Ranks) -> None:
    assert ranks.call(jobs.all_used, 2) == [3, 3]


def test_the_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(lf_comm.UnusedParametersError([f"p{n}" for n in range(20)])))
    assert len(error.names) == 20
    assert "and 12 more" in str(error)
