"""TrainStep over several processes: real Gloo ranks, plain DistributedDataParallel as the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_cases as cases
import torch
from ranks import Ranks

from lf_graph import AllReduce, GraphError, TrainStep
from lf_graph._parallel import _packed
from lf_graph._reduce import cut_buckets


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pair = Ranks(2)
    yield pair
    pair.close()


def same_bits(a: list[Any], b: list[Any]) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def largest_difference(a: list[Any], b: list[Any]) -> float:
    return max(float(np.abs(x.astype(float) - y.astype(float)).max()) for x, y in zip(a, b, strict=True))


# -- the same numbers as DistributedDataParallel ------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True], ids=["reduce=AllReduce()", "DDP model"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2},
        {"accumulate": 2, "clip": 0.5},
        {"accumulate": 2, "autocast": torch.bfloat16, "clip": 0.5},
    ],
    ids=["plain", "accumulate", "clip", "bf16"],
)
@pytest.mark.parametrize("build", [{"flat": True}, {"build": cases.sgd}], ids=["AdamW", "SGD"])
def test_ragged_ranks_train_like_ddp(
    ranks: Ranks, build: dict[str, Any], wrapped: bool, options: dict[str, Any]
) -> None:
    # to the bit: two ranks make DDP's mean half the sum, so that 2/count of it rounds as 1/count of the sum does. The
    # loop by hand has our AdamW: torch's rounds in its own order, by CPU (within 1e-6: test_adamw.py), and its own SGD.
    results = ranks.call(cases.twins, wrapped=wrapped, **build, **options)
    for plain, ours, _ in results:
        assert same_bits(plain, ours)
        assert largest_difference(ours, cases.values(cases.net())) > 1e-3  # it did train
    assert same_bits(results[0][1], results[1][1])


def test_sgd_with_a_power_of_two_of_rows_equals_ddp_to_the_bit(ranks: Ranks) -> None:
    for plain, ours in ranks.call(cases.even_sgd):
        assert same_bits(plain, ours)


def test_bf16_shadows_with_one_micro_batch_sum_bf16_gradients_in_float32_when_asked(ranks: Ranks) -> None:
    results = ranks.call(cases.twins, wrapped=True, autocast=torch.bfloat16, wire=torch.float32)
    for plain, ours, info in results:
        assert "4 bf16 shadows" in info["optimizer"]
        # the sum of two bf16 gradients is rounded to bf16 once: 2^-9 of a gradient, a fraction of lr after AdamW
        assert largest_difference(plain, ours) <= 5 * 1e-2 * 2**-6
    assert same_bits(results[0][1], results[1][1])


def test_buffers_follow_rank_0_as_in_ddp(ranks: Ranks) -> None:
    # SGD: the bias before a BatchNorm has no gradient but rounding, which AdamW would blow up
    results = ranks.call(cases.twins, wrapped=True, normalize=True, build=cases.sgd, accumulate=2, updates=3)
    for plain, ours, _ in results:
        assert largest_difference(plain, ours) <= 1e-6
    running = [int(np.argmax([x.shape == () for x in ours])) for _, ours, _ in results]
    assert running[0] == running[1]  # num_batches_tracked is there, and an integer travelled too
    assert results[0][1][running[0]] == 6


def test_buffers_stay_local_without_the_wrapper(ranks: Ranks) -> None:
    (_, first, _), (_, second, _) = ranks.call(cases.twins, wrapped=False, normalize=True, updates=2)
    assert not same_bits(first, second)  # each rank's running mean is of its own batches


def test_loss_and_count_are_those_of_all_ranks(ranks: Ranks) -> None:
    for loss, count, want_loss, want_count in ranks.call(cases.reported):
        assert loss == pytest.approx(want_loss, rel=1e-6)
        assert count == want_count


# -- what travels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wire", "itemsize"), [(None, 4), (torch.bfloat16, 2)])
def test_an_update_costs_one_collective_per_bucket_and_one_for_the_totals(
    ranks: Ranks, wire: torch.dtype | None, itemsize: int
) -> None:
    for sizes, gradient_bytes in ranks.call(cases.collectives_of_one_update, wire=wire):
        *buckets, totals = sizes
        assert totals == 8
        assert max(buckets) == cases.SMALL_BUCKETS
        assert all(size == cases.SMALL_BUCKETS for size in buckets[:-1])
        assert sum(buckets) >= gradient_bytes * itemsize // 4
        assert len(buckets) == -(-sum(buckets) // cases.SMALL_BUCKETS)


def test_a_bf16_wire_stays_close_and_ranks_stay_equal(ranks: Ranks) -> None:
    results = ranks.call(cases.twins, wrapped=False, wire=torch.bfloat16)
    for plain, ours, _ in results:
        assert 0 < largest_difference(plain, ours) <= 5 * 1e-2 * 2**-5
    assert same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("numel", "itemsize", "bucket_bytes", "want"),
    [
        (10, 4, 16, [(0, 4), (4, 8), (8, 10)]),
        (8, 2, 8, [(0, 4), (4, 8)]),
        (3, 4, 1, [(0, 1), (1, 2), (2, 3)]),
        (5, 4, 1000, [(0, 5)]),
        (0, 4, 16, []),
    ],
)
def test_buckets_cover_a_buffer_once_in_order(
    numel: int, itemsize: int, bucket_bytes: int, want: list[tuple[int, int]]
) -> None:
    assert cut_buckets(numel, itemsize, bucket_bytes) == want


def test_buffers_of_every_dtype_and_shape_travel_as_bytes() -> None:
    tensors = [torch.tensor(7), torch.tensor([True, False]), torch.randn(3, 5), torch.ones(3).bfloat16()]
    flat, twins = _packed(tensors)
    for twin, tensor in zip(twins, tensors, strict=True):
        assert (twin.dtype, twin.shape) == (tensor.dtype, tensor.shape)
        assert twin.data_ptr() % 16 == flat.data_ptr() % 16
        assert flat.data_ptr() <= twin.data_ptr() < flat.data_ptr() + flat.numel()


# -- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(ranks: Ranks) -> None:
    results = ranks.call(cases.poisoned_on_one_rank)
    for before, after, skipped, later in results:
        assert same_bits(before, after)
        assert skipped == 1
        assert not same_bits(after, later)
        assert all(np.isfinite(x).all() for x in later)
    assert same_bits(results[0][3], results[1][3])


def test_ranks_that_cut_other_buckets_are_told_before_they_hang(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks.call(cases.different_options)):
        assert "ranks differ" in said
        assert f"bucket_bytes={256 * (1 + rank)}" in said


def test_a_dead_peer_is_an_error_and_the_step_can_be_closed(tmp_path: Path) -> None:
    pair = Ranks(2)
    try:
        found, nothing = pair.call(cases.peer_dies, flag=tmp_path / "first step done")
    finally:
        pair.close()
    assert nothing is None  # rank 1 died
    from_group, said = found["first"]
    assert not from_group, "the process group's own error"
    assert said
    for later in ("again", "micro"):
        ours, message = found[later]
        assert ours
        assert "not summed on every rank" in message
    assert same_bits(found["before"], found["after"])
    assert found["usable"]


def test_without_a_process_group_the_first_update_says_what_to_call() -> None:
    model = cases.net()
    with (
        TrainStep(model, cases.adamw(model), reduce=AllReduce()) as step,
        pytest.raises(GraphError, match="init_process_group"),
    ):
        step(*cases.batches(0, 1)[0])


@pytest.mark.parametrize("options", [{"bucket_bytes": 0}, {"dtype": torch.int32}])
def test_options_without_meaning_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(GraphError, match=next(iter(options))):
        AllReduce(**options)


# -- wrappers -----------------------------------------------------------------------------------------------------


def test_a_ddp_model_gives_its_group_and_bucket_size(ranks: Ranks) -> None:
    assert ranks.call(cases.bucket_size_of_wrapper) == [(3 * 2**20, True)] * 2


def test_the_loss_may_call_the_wrapper(ranks: Ranks) -> None:
    for by_wrapper, by_module in ranks.call(cases.wrapper_in_the_loss):
        assert same_bits(by_wrapper, by_module)


def test_the_wrapper_trains_eagerly_after_close(ranks: Ranks) -> None:
    results = ranks.call(cases.eager_after_close)
    for ours, plain in results:
        assert same_bits(ours, plain)
    assert same_bits(results[0][0], results[1][0])


def test_ddp_options_that_change_what_is_reduced_are_refused(ranks: Ranks) -> None:
    for said in ranks.call(cases.refused_wrappers):
        assert "communication hook" in said["hook"]
        assert "static_graph" in said["static"]
        assert "last.bias" in said["ignored"]
        assert "join()" in said["join"]


def assert_shards_refused(found: dict[str, Any]) -> None:
    for how in ("step", "chain", "capture"):
        parameter, kind, said = found[f"whole {how}"]
        assert (parameter, "fully_shard" in kind, "DTensor" in kind) == ("first.weight", True, True)
        assert "Eager elements" in said
        assert found[f"inner {how}"][0] == "last.weight"
        parameter, kind, _ = found[f"split {how}"]
        assert (parameter, "device mesh" in kind) == ("first.weight", True)
        assert "FullyShardedDataParallel" in found[f"old {how}"][1]
    assert found["still trains"]


def test_sharded_models_are_refused_at_construction_on_two_ranks(ranks: Ranks) -> None:
    for found in ranks.call(cases.refused_shards):
        assert_shards_refused(found)


def test_sharded_models_are_refused_at_construction_on_one_rank() -> None:
    alone = Ranks(1)
    try:
        (found,) = alone.call(cases.refused_shards)
    finally:
        alone.close()
    assert_shards_refused(found)


def test_pipeline_stages_are_refused_at_construction(ranks: Ranks) -> None:
    for said in ranks.call(cases.refused_pipeline):
        assert "PipelineStage" in said
        assert "stage's own module" in said
