"""The hook of DDP: the weights of DDP's own averaging, whatever rows a step touches."""

from __future__ import annotations

from typing import Any

import comm_jobs as jobs
import pytest
from comm_ranks import Ranks

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sparse embedding": {"sparse": True},
    "accumulation": {"accumulate": 3},
    "an expert for each rank": {"expert": jobs.own_expert},
    "small buckets": {"ddp": {"bucket_cap_mb": 0.01}},
    "gradients are views": {"ddp": {"gradient_as_bucket_view": True}},
    "static graph": {"ddp": {"find_unused_parameters": False, "static_graph": True}},
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_get_the_weights_of_ddp_bit_for_bit(ranks: Ranks, case: str) -> None:
    options = CASES[case]
    stock = ranks.call(jobs.trained, 2, how="stock", **options)
    ours = ranks.call(jobs.trained, 2, how="ours", **options)
    assert [weights for weights, _ in ours] == [weights for weights, _ in stock]
    assert all(paths["table.weight"] in ("gather", "union", "split") for _, paths in ours)
    assert all("head.weight" not in paths or paths["head.weight"] == "dense" for _, paths in ours)


def test_four_ranks_have_the_same_weights(ranks: Ranks) -> None:
    answers = ranks.call(jobs.trained, 4, how="ours", expert=jobs.own_expert)
    assert all(answer == answers[0] for answer in answers)


def test_one_rank_trains_as_without_a_hook(ranks: Ranks) -> None:
    (stock,) = ranks.call(jobs.trained, 1, how="stock")
    (ours,) = ranks.call(jobs.trained, 1, how="ours")
    assert ours[0] == stock[0]


def test_a_rank_that_has_joined_takes_part_with_zeros(ranks: Ranks) -> None:
    first, second = ranks.call(jobs.joined, 2)
    assert first == second


def test_an_error_in_the_hook_is_raised_by_backward_and_a_second_hook_is_refused(ranks: Ranks) -> None:
    for said in ranks.call(jobs.hook_errors, 2):
        assert "register_comm_hook" in said[0]
        assert "broken on purpose" in said[1]


def test_names_that_the_module_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="no parameter tabel"):
        jobs.SparseGradReducer(jobs.made(), only=["tabel.weight"])
    with pytest.raises(ValueError, match=r"no parameter tabel\.weight"):
        jobs.SparseGradReducer(jobs.made(), only="tabel.weight")
