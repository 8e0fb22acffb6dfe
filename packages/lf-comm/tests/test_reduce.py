"""Sums in 16 bits on the wire and 32 in the adder: one rounding, one order."""

from __future__ import annotations

import comm_reduce_jobs as jobs
import pytest
import torch
from comm_ranks import Ranks
from hypothesis import given
from hypothesis import strategies as st

from lf_comm.reduce import sum_in_order


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        (torch.float16, None),
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
    ],
)
def test_the_result_is_the_float32_sum_rounded_once(
    ranks: Ranks, dtype: torch.dtype, out_dtype: torch.dtype | None, op: str
) -> None:
    answers = ranks.call(jobs.accurate, 4, dtype=dtype, out_dtype=out_dtype, count=10_001, op=op)
    assert len(set.union(*(answer["bits"] for answer in answers))) == 1
    for answer in answers:
        assert answer["dtype"] == (out_dtype or dtype)
        assert answer["off"] <= answer["step"]  # a sum near the middle of two numbers may round to either


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5])
def test_tensors_smaller_than_the_group(ranks: Ranks, count: int) -> None:
    for world in (1, 4):
        for answer in ranks.call(
            jobs.accurate, world, dtype=torch.bfloat16, out_dtype=None, count=count, op="sum"
        ):
            assert len(answer["bits"]) == 1
            assert answer["off"] <= answer["step"]


def test_a_float32_result_keeps_what_bfloat16_loses(ranks: Ranks) -> None:
    assert ranks.call(jobs.accurate_ends, 2) == [[1 + 2.0**-9, 1.0]] * 2


def test_64_ranks_lose_no_more_than_one_rounding() -> None:
    parts = (torch.randn(64, 50_000, generator=torch.Generator().manual_seed(1)) + 0.05).bfloat16()
    exact = parts.double().sum(0)
    ours = sum_in_order(parts).bfloat16().double()
    ring = parts[0]
    for part in parts[1:]:
        ring = ring + part
    once = exact.float().bfloat16().double()

    def off(found: torch.Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    assert off(ours) <= 1.001 * off(once)
    assert off(ring.double()) > 4 * off(ours)  # research: 9.4e-3 against 1.7e-3


@given(st.integers(1, 9), st.integers(1, 40), st.randoms(use_true_random=False))
def test_sums_are_made_in_the_order_of_ranks(ranks_: int, count: int, random: object) -> None:
    parts = torch.randn(ranks_, count, generator=torch.Generator().manual_seed(random.getrandbits(31)))  # type: ignore[attr-defined]
    wanted = parts[0].clone()
    for part in parts[1:]:
        wanted = wanted + part
    assert torch.equal(sum_in_order(parts), wanted)


def test_bytes_are_those_of_a_16_bit_ring(ranks: Ranks) -> None:
    assert ranks.call(jobs.accurate_bytes, 4, count=1 << 16) == [2 * 3 * (1 << 16) * 2 // 4] * 4
    assert ranks.call(jobs.accurate_bytes, 1, count=1 << 16) == [0]


def test_as_a_hook_all_ranks_stay_together_and_near_ddp(ranks: Ranks) -> None:
    answers = ranks.call(jobs.trained_accurately, 3)
    assert all(weights == answers[0][0] for weights, _ in answers)
    assert 0 < max(apart for _, apart in answers) < 1e-4


def test_what_cannot_be_summed_is_named(ranks: Ranks) -> None:
    (said,) = ranks.call(jobs.accurate_refusals, 1)
    for words, text in zip(("int64", "sparse_coo", "int8", "max", "float64"), said, strict=True):
        assert words in text
