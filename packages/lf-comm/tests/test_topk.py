"""Block top-k: the strongest blocks are averaged, the rest is kept, nothing is lost, all ranks agree."""

from __future__ import annotations

import comm_topk_jobs as jobs
import pytest
import torch
from comm_ranks import Ranks


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("count", "ratio"), [(256 * 8, 4), (256 * 37 + 11, 4), (256 * 9 + 255, 2), (100, 4)])
def test_sums_and_residuals_are_those_of_a_plain_loop(
    ranks: Ranks, world: int, count: int, ratio: int
) -> None:
    answers = ranks.call(jobs.by_reference, world, count=count, ratio=ratio, steps=4)
    assert answers == [(True, True)] * world


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("threshold", "path"), [(0.0, "blocks"), (1.0, "dense")])
def test_what_was_sent_and_what_is_left_is_what_was_given(
    ranks: Ranks, threshold: float, path: str, dtype: torch.dtype, together: bool
) -> None:
    answers = ranks.call(jobs.conserved, 4, threshold=threshold, dtype=dtype, together=together)
    for off, most, last in answers:
        assert last == path
        assert most > 100
        if dtype.itemsize >= 4:
            assert off == 0.0
        else:  # a 16-bit sum over ranks rounds once for each, as DDP's; every rank's own rounding is kept
            assert off <= 4 * 4 * most * torch.finfo(dtype).eps


def test_of_equal_blocks_the_first_are_sent(ranks: Ranks) -> None:
    assert ranks.call(jobs.ties, 3) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_reaches_everyone_and_leaves_the_residual_alone(
    ranks: Ranks, value: float, dtype: torch.dtype
) -> None:
    for answer in ranks.call(jobs.not_finite, 2, value=value, dtype=dtype):
        assert answer["arrived"]
        assert answer["elsewhere"] == 0
        assert answer["left"] < 1e-4
        assert answer["calm"]
        assert answer["path"] == "dense"


def test_squares_that_overflow_or_vanish_lose_nothing(ranks: Ranks) -> None:
    assert ranks.call(jobs.huge_and_tiny, 2) == [(True, True)] * 2


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.254), (torch.bfloat16, 0.258)])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_are_a_quarter_and_the_energies_at_any_number_of_ranks(
    ranks: Ranks, world: int, dtype: torch.dtype, share: float
) -> None:
    for found, collectives in ranks.call(jobs.bytes_of, world, dtype=dtype, blocks=1200):
        assert found == pytest.approx(share, abs=5e-4)
        assert found <= 0.26
        assert collectives == 2


def test_one_rank_makes_no_collective(ranks: Ranks) -> None:
    assert ranks.call(jobs.bytes_of, 1, dtype=torch.float32, blocks=8) == [(0.0, 0)]


def test_below_the_threshold_of_energy_a_gradient_goes_dense(ranks: Ranks) -> None:
    wanted = {"sparse": "blocks", "leaning": "blocks", "flat": "dense"}
    assert ranks.call(jobs.threshold, 2) == [wanted] * 2


def test_without_feedback_nothing_is_kept(ranks: Ranks) -> None:
    assert ranks.call(jobs.without_feedback, 2) == [({}, True)] * 2


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.01}, {"gradient_as_bucket_view": True}])
def test_odd_parameters_all_sent_get_the_weights_of_ddp(ranks: Ranks, options: dict[str, object]) -> None:
    stock = ranks.call(jobs.trained_odd, 2, how="stock", **options)
    ours = ranks.call(jobs.trained_odd, 2, how="ours", threshold=1.0, **options)
    for theirs, mine in zip(stock, ours, strict=True):
        assert {n: w for n, w in mine[0].items() if n != "narrow"} == {
            n: w for n, w in theirs[0].items() if n != "narrow"
        }


def test_odd_parameters_by_blocks_stay_together(ranks: Ranks) -> None:
    answers = ranks.call(jobs.trained_odd, 4, how="ours", steps=5)
    weights, paths, _ = answers[0]
    assert all(answer == answers[0] for answer in answers)
    assert {n for n, path in paths.items() if path == "blocks"} == {
        "pairs", "image", "transposed", "narrow", "wide",
    }  # fmt: skip
    assert weights != ranks.call(jobs.trained_odd, 2, how="stock", steps=5)[0][0]


def test_accumulated_gradients_are_sent_once(ranks: Ranks) -> None:
    once = ranks.call(jobs.trained_odd, 2, how="ours")
    thrice = ranks.call(jobs.trained_odd, 2, how="ours", accumulate=3)
    assert thrice[0] == thrice[1]
    assert thrice[0][2] == once[0][2] > 0


def test_one_rank_trains_as_without_ddp(ranks: Ranks) -> None:
    (plain,) = ranks.call(jobs.trained_odd, 1, how="plain")
    (ours,) = ranks.call(jobs.trained_odd, 1, how="ours")
    assert ours[0] == plain[0]
    assert ours[2] == 0


@pytest.mark.parametrize("cap", [None, 0.02, 1.0])
def test_a_resumed_run_goes_on_to_the_bit_whatever_the_buckets(ranks: Ranks, cap: float | None) -> None:
    for same, state in ranks.call(jobs.resumed, 2, stop=3, cap=cap):
        assert same
        assert all(float(r.abs().max()) > 0 for n, r in state["residuals"].items())
        assert {"image", "pairs", "narrow"} <= set(state["residuals"])


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 2), (2, 1)])
def test_another_number_of_ranks_keeps_the_sum_of_residuals(ranks: Ranks, before: int, after: int) -> None:
    states = [state for _, state in ranks.call(jobs.resumed, before, stop=3, cap=None)]
    answers = ranks.call(jobs.reloaded, after, states=states[::-1])
    for name in states[0]["residuals"]:
        old = torch.stack([state["residuals"][name].double() for state in states]).sum(0)
        new = torch.stack([r[name].double() for r, _ in answers if name in r]).sum(0)
        assert new.shape == old.shape
        assert torch.allclose(new, old, rtol=1e-6, atol=1e-9 + 1e-6 * float(old.abs().max()))
    assert all(not said for _, said in answers)


def test_one_state_of_another_number_of_ranks_is_dropped_with_a_warning(ranks: Ranks) -> None:
    (_, state), _ = ranks.call(jobs.resumed, 2, stop=3, cap=None)
    for residuals, said in ranks.call(jobs.reloaded, 4, states=state):
        assert residuals == {}
        assert len(said) == 1
        assert "begin at zero" in said[0]


def test_on_one_rank_what_was_left_is_added_and_done(ranks: Ranks) -> None:
    states = [state for _, state in ranks.call(jobs.resumed, 2, stop=3, cap=None)]
    ((right, collectives, after),) = ranks.call(jobs.flushed, 1, states=states)
    assert right
    assert collectives == 0
    assert "pairs" not in after


def test_states_that_do_not_fit_are_named(ranks: Ranks) -> None:
    (said,) = ranks.call(jobs.refused_states, 1)
    for words, text in zip(
        ("no state", "version 1", "v: the module", "(512,)", "NaN", r"ranks [0, 2]"), said, strict=True
    ):
        assert text.startswith("ResidualError")
        assert words in text


def test_a_rank_that_has_joined_sends_no_residual_again(ranks: Ranks) -> None:
    (first, change, size), (second, _, _) = ranks.call(jobs.joined, 2)
    assert first == second
    assert change == 0.0
    assert size > 0


def test_what_cannot_be_meant_is_refused(ranks: Ranks) -> None:
    for said in ranks.call(jobs.refused, 2):
        for words, text in zip(
            ("register_comm_hook", "sparsity_threshold=1.5", "compression_ratio=1", "SparseGradReducer"),
            said,
            strict=True,
        ):
            assert words in text
