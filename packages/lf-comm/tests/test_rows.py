"""Every path gives the dense sum, bit for bit where it promises to; all ranks take the same."""

from __future__ import annotations

import random

import comm_jobs as jobs
import pytest
import torch
from comm_ranks import Ranks

import lf_comm

SHAPES = [(16, 4), (1000, 8), (37, 3, 5), (9,), (), (0, 5), (1, 64), (8, 0)]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.complex64,
]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_paths_give_the_dense_sum(ranks: Ranks, world: int) -> None:
    choose = random.Random(world)
    cases = [(kind, choose.choice(SHAPES), choose.choice(DTYPES)) for kind in jobs.KINDS for _ in range(4)]
    cases += [("random", (1000, 8), dtype) for dtype in DTYPES]
    cases += [(kind, (1000, 8), torch.float32) for kind in jobs.KINDS]
    assert ranks.call(jobs.sums, world, cases=cases, seed=world) == [[]] * world


def test_tensors_of_any_strides_are_summed_in_place(ranks: Ranks) -> None:
    assert ranks.call(jobs.strided, 2) == [[], []]


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_in_the_order_of_ranks(ranks: Ranks, op: str, dtype: torch.dtype) -> None:
    answers = ranks.call(jobs.in_rank_order, 4, op=op, dtype=dtype)
    assert all(equal for answer in answers for _, equal, _ in answer)
    assert len({found for answer in answers for _, _, found in answer}) == 1


@pytest.mark.parametrize("plan", jobs.PLANS)
def test_signs_of_zero_and_what_is_no_number_travel(ranks: Ranks, plan: str) -> None:
    for found in ranks.call(jobs.odd_bits, 3, plan=plan):
        assert torch.signbit(found[0]).all()
        assert not torch.signbit(found[1]).any()
        assert found[2].isnan().all()
        assert found[3].isinf().all()
        assert not found[4].any()


@pytest.mark.parametrize("plan", jobs.PLANS)
def test_known_rows_are_not_searched(ranks: Ranks, plan: str) -> None:
    assert ranks.call(jobs.known_rows, 3, plan=plan) == [(True, plan)] * 3


@pytest.mark.parametrize(
    ("kind", "path"), [("none", "gather"), ("same", "union"), ("first rank only", "dense"), ("all", "dense")]
)
def test_all_ranks_take_the_cheapest_path_and_send_what_was_predicted(
    ranks: Ranks, kind: str, path: str
) -> None:
    answers = [found[0] for found in ranks.call(jobs.auto, 4, kind=kind, rates=jobs.SLOW_LINK)]
    assert {found[0] for found in answers} == {path} or (kind == "none" and answers[0][0] != "dense")
    assert all(right for *_, right in answers)
    assert max(sent for _, sent, _, _ in answers) <= 1.03 * answers[0][2]


def test_paths_stay_right_while_the_rows_change_from_step_to_step(ranks: Ranks) -> None:
    answers = ranks.call(jobs.auto, 3, kind="random", rates=jobs.SLOW_LINK, times=6)
    assert all(right for found in answers for *_, right in found)
    assert len({tuple(path for path, *_ in found) for found in answers}) == 1


def test_small_tensors_cost_one_collective_and_one_rank_none(ranks: Ranks) -> None:
    shapes = [(100, 100), (), (0, 3), (2048, 256)]
    assert ranks.call(jobs.collectives, 1, shapes=shapes) == [[0, 0, 0, 0]]
    assert ranks.call(jobs.collectives, 2, shapes=shapes) == [[1, 1, 0, 2]] * 2


def test_many_tensors_ask_in_one_collective(ranks: Ranks) -> None:
    for right, calls in ranks.call(jobs.many, 2):
        assert right == [True] * 3
        assert calls == 1 + 2 + 1  # who has what; a union each; the small one dense


def test_sparse_layouts_of_torch(ranks: Ranks) -> None:
    assert ranks.call(jobs.coo, 2) == [[True] * 4] * 2
    assert ranks.call(jobs.coo, 3) == [[True] * 4] * 3
    (said,) = ranks.call(jobs.layout_errors, 1)
    assert len(said) == 2
    assert "table.weight" in said[0]
    assert "sparse_csr" in said[0]
    assert "2 sparse dimensions" in said[1]


@pytest.mark.parametrize("wrong", [{"plan": "ring"}, {"op": "max"}])
def test_unknown_words_are_refused_before_anything_is_sent(ranks: Ranks, wrong: dict[str, str]) -> None:
    with pytest.raises(RuntimeError, match="choose"):
        ranks.call(_call, 1, wrong=wrong)


def _call(rank: int, wrong: dict[str, str]) -> None:
    lf_comm.all_reduce_rows(torch.ones(3), **wrong)  # type: ignore[arg-type]


def test_measured_rates_are_those_of_all_ranks(ranks: Ranks) -> None:
    first, second = ranks.call(jobs.measured, 2)
    assert first == second
    assert first.latency > 0
    assert first.scan > 0
    (alone,) = ranks.call(jobs.measured, 1)
    assert alone.add > 0


def test_ranks_that_differ_hear_of_it_all_at_once(ranks: Ranks) -> None:
    zero, one, two = ranks.call(jobs.disagreements, 3)
    assert zero == two
    assert "DisagreementError: rank 1 and rank 0 differ" in zero[0] == one[0]
    assert "rank 1 failed before its sum" in zero[1] == zero[2]
    assert one[1].startswith("IndexError")
    assert one[2].startswith("TypeError: rows: torch.float32")
    assert "differ" in zero[3] == one[3]
    assert zero[4] == one[4] != "dense"


def test_without_a_process_group_it_says_what_to_call() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        lf_comm.all_reduce_rows(torch.ones(3))


def test_calls_that_cannot_be_meant_say_so_on_every_rank(ranks: Ranks) -> None:
    words = [
        "plan='ring'",
        "op='max'",
        "t: torch.sparse_coo",
        "key 'a'",
        "steps: op='avg'",
        "ids -1 to -1 of a tensor of 600",
    ]
    words += ["patience_s=nan", "interval_s=0"]
    for said in ranks.call(jobs.misuse, 2):
        assert len(said) == len(words)
        for word, text in zip(words, said, strict=True):
            assert word in text


def test_reducers_of_destroyed_groups_are_let_go(ranks: Ranks) -> None:
    assert ranks.call(jobs.groups_that_end, 2) == [1, 1]
