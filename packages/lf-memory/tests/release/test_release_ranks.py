"""Released steps on real Gloo ranks: DistributedDataParallel and fully_shard."""

import pytest
import torch
from release_rank_cases import (
    compiled,
    ddp_exact,
    ddp_inside_refused,
    ddp_refused,
    fsdp,
    fsdp_local_clip,
    momentum,
)
from release_rank_pool import Ranks


@pytest.fixture(scope="module")
def pair():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize(("accumulation", "clip", "unused", "options"), [
    (1, None, False, {}), (1, 0.5, False, {}), (4, 0.5, False, {}), (1, 0.5, True, {"gate": True}),
    (1, 0.5, False, {"chunk_bytes": 1}),
])  # fmt: skip
def test_exact_under_ddp_has_the_bits_of_the_ordinary_loop(pair, view, accumulation, clip, unused, options):
    arguments = {
        "accumulation": accumulation,
        "clip": clip,
        "unused": unused,
        "options": options,
        "view": view,
    }
    assert pair.call(ddp_exact, **arguments) == [(0.0, 8 // accumulation, clip is not None)] * 2


def test_exact_under_ddp_on_four_ranks(four):
    assert four.call(ddp_exact, options={}, accumulation=2, clip=0.5) == [(0.0, 4, True)] * 4


@pytest.mark.parametrize(("mode", "options", "message"), [
    ("fused", {}, "mode='exact'"), ("local_clip", {"clip": 1.0}, "fully_shard"), ("two_pass", {}, "buckets"),
    ("exact", {"keep": torch.bfloat16}, "leave them out"), ("exact", {"accumulate": "buffer"}, "leave them out"),
])  # fmt: skip
def test_what_ddp_makes_pointless_or_wrong_is_refused(pair, mode, options, message):
    assert all(message in answer for answer in pair.call(ddp_refused, mode=mode, options=options))


def test_a_module_that_ddp_wraps_behind_our_back_is_refused_at_its_first_forward(pair):
    assert all("mode='exact'" in answer for answer in pair.call(ddp_inside_refused))


@pytest.mark.parametrize(("mode", "options", "clip"), [
    ("fused", {}, None), ("fused", {"gate": True}, None), ("exact", {}, None),
    ("exact", {"clip": 0.5, "gate": True}, 0.5), ("two_pass", {"clip": 0.5}, 0.5), ("two_pass", {"gate": True}, None),
])  # fmt: skip
def test_fully_sharded_parameters_are_trained_as_by_the_ordinary_loop(pair, mode, options, clip):
    for off, over_plan, live, early in pair.call(fsdp, mode=mode, options=options, clip=clip):
        assert off <= (0.0 if clip is None else 1e-6)
        assert live == 0
        assert early == (0 if mode == "exact" else 7)
        assert over_plan == 0


@pytest.mark.parametrize("mode", ["fused", "two_pass"])
def test_sharded_gradients_that_wait_for_each_other_give_the_same_bits(pair, mode):
    for off, _, live, _ in pair.call(fsdp, mode=mode, options={"chunk_bytes": 1 << 20}):
        assert off == live == 0


def test_accumulation_in_state_works_on_shards(pair):
    for off, *_ in pair.call(fsdp, mode="fused", options={"accumulate": "state"}, make=momentum):
        assert off <= 1e-6


def test_mixed_precision_of_fully_shard_changes_nothing(pair):
    for off, *_ in pair.call(fsdp, mode="fused", options={}, dtype=torch.bfloat16):
        assert off == 0.0


def test_local_clip_uses_the_norm_of_the_whole_parameter(pair):
    assert max(pair.call(fsdp_local_clip)) <= 1e-6


@pytest.mark.parametrize(("mode", "options", "clip"), [("fused", {}, None), ("exact", {"clip": 0.5}, 0.5)])
def test_replicas_of_shards_count_once_in_the_norm(four, mode, options, clip):
    answers = four.call(fsdp, mode=mode, options=options, clip=clip, mesh_shape=(2, 2))
    assert all(off <= 1e-6 and live == 0 for off, _, live, _ in answers)


def test_a_released_model_compiles_as_one_graph_on_a_rank(pair):
    assert max(pair.call(compiled)) <= 1e-6
