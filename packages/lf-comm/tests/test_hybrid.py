"""Buckets routed by size: the border is measured, agreed, and costs no step."""

from __future__ import annotations

from typing import Any

import comm_hybrid_jobs as jobs
import pytest
from comm_ranks import Ranks
from hypothesis import given
from hypothesis import strategies as st

from lf_comm._cut import SizeTimes, Timed, best_cut, by_size

SECONDS = st.integers(0, 50).map(float)
TIMES = st.dictionaries(st.integers(1, 1 << 40), st.tuples(SECONDS, SECONDS), max_size=8)


@given(TIMES)
def test_no_other_border_takes_less_time(times: dict[int, tuple[float, float]]) -> None:
    def cost(cut: int) -> float:
        return sum(small if nbytes < cut else large for nbytes, (small, large) in times.items())

    cut = best_cut(SizeTimes(nbytes, *both) for nbytes, both in times.items())
    assert all(cost(cut) <= cost(other + more) for other in [0, *times] for more in (0, 1))
    assert all(cost(lower) > cost(cut) for lower in [0, *times, *(n + 1 for n in times)] if lower < cut)


def test_sizes_that_only_one_way_took_say_nothing() -> None:
    samples = [
        Timed(8, True, 3.0),
        Timed(8, True, 1.0),
        Timed(8, True, 2.0),
        Timed(8, False, 5.0),
        Timed(9, True, 1.0),
    ]
    assert by_size(samples) == (SizeTimes(8, 2.0, 5.0),)
    assert best_cut(()) == 0


@pytest.mark.parametrize(
    "ways", [("dense", "rows", "measured"), ("rows", "dense", 1 << 16), ("rows", "rows", 0)]
)
def test_exact_ways_give_the_weights_of_ddp_while_they_are_tried_and_after(ranks: Ranks, ways: Any) -> None:
    stock = ranks.call(jobs.trained, 2, steps=12, ways=None)
    ours = ranks.call(jobs.trained, 2, steps=12, ways=ways)
    assert [answer["weights"] for answer in ours] == [answer["weights"] for answer in stock]
    assert ours[0]["early"] == ([True] * 9 + [False] * 3 if ways[2] == "measured" else [False] * 12)


def test_a_given_cut_routes_by_bytes(ranks: Ranks) -> None:
    for answer in ranks.call(jobs.trained, 2, steps=3, ways=(jobs.once, jobs.many_times, 1 << 18)):
        small, large = answer["seen"]
        assert small
        assert max(small) < 1 << 18
        assert large == [4096 * 64 * 4] * 3
        assert (answer["decision"].reason, answer["decision"].small) == ("as asked", "once")


@pytest.mark.parametrize("slow_is_large", [True, False])
def test_the_measured_cut_leaves_out_the_way_that_takes_longer(ranks: Ranks, slow_is_large: bool) -> None:
    ways = (jobs.once, jobs.many_times) if slow_is_large else (jobs.many_times, jobs.once)
    answers = ranks.call(jobs.trained, 3, steps=12, ways=(*ways, "measured"))
    decision = answers[0]["decision"]
    assert all(answer["decision"] == decision for answer in answers)
    largest = 4096 * 64 * 4
    assert decision.cut == (largest + 1 if slow_is_large else 0)
    assert [one.nbytes for one in decision.measured][-1] == largest
    assert "3 ranks" in decision.reason
    slow = answers[0]["seen"][1 if slow_is_large else 0]
    assert slow.count(largest) == 5  # of ten steps that try, every second; none of the two after


def test_lossy_and_accurate_ways_keep_ranks_together(ranks: Ranks) -> None:
    answers = ranks.call(jobs.trained, 4, steps=4, ways=("accurate", "topk", 1 << 18), accumulate=2)
    assert all(answer["weights"] == answers[0]["weights"] for answer in answers)


def test_sparse_gradients_go_by_rows(ranks: Ranks) -> None:
    stock = ranks.call(jobs.trained, 2, steps=12, ways=None, sparse=True)
    ours = ranks.call(jobs.trained, 2, steps=12, ways=("rows", "rows", "measured"), sparse=True)
    assert [answer["weights"] for answer in ours] == [answer["weights"] for answer in stock]


def test_one_shot_pads_to_whole_loads_and_leaves_other_dtypes_to_the_backend(ranks: Ranks) -> None:
    for right, shown in ranks.call(jobs.one_shot, 2):
        assert right == [True] * 6
        assert shown == [32, 48, 16]  # 5 float32 and the next 3 fit in one piece, 9 need more; 7 bfloat16


def test_one_shot_without_gpus_is_dense_and_says_why(ranks: Ranks) -> None:
    stock = ranks.call(jobs.trained, 2, steps=3, ways=None)
    ours = ranks.call(jobs.trained, 2, steps=3, ways=("oneshot", "dense", 1 << 18))
    assert [answer["weights"] for answer in ours] == [answer["weights"] for answer in stock]
    assert all(answer["decision"].small == "dense (oneshot: parameters are on cpu)" for answer in ours)


def test_one_rank_measures_nothing(ranks: Ranks) -> None:
    (stock,) = ranks.call(jobs.trained, 1, steps=2, ways=None)
    (ours,) = ranks.call(jobs.trained, 1, steps=2, ways=("accurate", "topk", "measured"))
    assert ours["decision"].reason == "one rank"
    assert ours["weights"] == stock["weights"]


def test_what_cannot_be_meant_is_refused(ranks: Ranks) -> None:
    (said,) = ranks.call(jobs.refused, 1)
    for words, text in zip(
        (
            "small='ring'",
            "large='top-k'",
            "cut=-1",
            "cut='guessed'",
            "register_comm_hook",
            "'rows' sums sparse",
        ),
        said,
        strict=True,
    ):
        assert words in text
