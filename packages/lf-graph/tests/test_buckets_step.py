"""Buckets of a TrainStep."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bucket_cases import VOCABULARY, Attention, full, square
from torch import Tensor, nn

from lf_graph import (
    Buckets,
    GraphError,
    GraphPool,
    TrainStep,
)

# -- a training step ---------------------------------------------------------------------------------------


class Loss(nn.Module):
    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.model = Attention(capacity)

    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(ids, lengths)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total, (labels != -100).sum()


def batches(count: int, longest: int) -> list[tuple[Tensor, Tensor]]:
    draw = random.Random(3)
    lengths = [draw.randint(1, longest) for _ in range(count)]
    return [(torch.randint(0, VOCABULARY, (2, n)), torch.randint(0, VOCABULARY, (2, n))) for n in lengths]


def stepped(step: TrainStep, edges: tuple[int, ...]) -> Buckets:
    return Buckets(step, edges, dims={"ids": 1, "labels": 1}, pad={"labels": -100}, lengths="lengths")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_training_step_over_buckets_equals_the_eager_loop(accumulate: int) -> None:
    """New buckets also come up between micro-batches of one update."""
    ours = Loss(16)
    theirs = Loss(16)
    theirs.load_state_dict(ours.state_dict())
    step = TrainStep(ours, torch.optim.AdamW(ours.parameters(), 1e-2), accumulate=accumulate, max_graphs=3)
    buckets, adam = stepped(step, (4, 8, 16)), torch.optim.AdamW(theirs.parameters(), 1e-2)
    data = batches(6 * accumulate, 16)
    for at in range(0, len(data), accumulate):
        sums = []
        for ids, labels in data[at : at + accumulate]:
            buckets.micro(ids, labels)
            total, count = theirs(ids, labels, full(ids))
            total.backward()
            sums.append((total.detach(), count))
        found = buckets.update()
        counted = torch.stack([c for _, c in sums]).sum()
        for p in theirs.parameters():
            assert p.grad is not None
            p.grad /= counted
        adam.step()
        adam.zero_grad()
        torch.testing.assert_close(found.loss, torch.stack([t for t, _ in sums]).sum() / counted)
        assert found.count == counted
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert (buckets.stats().captures, step.stats().captures) == (3, 3)
    step.close()


def test_preparing_a_step_trains_nothing() -> None:
    model = Loss(8)
    before = copy.deepcopy(model.state_dict())
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-2), max_graphs=2)
    buckets = stepped(step, (4, 8))
    buckets.prepare(*batches(1, 8)[0])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for batch in batches(5, 8):
        buckets(*batch)
    assert (buckets.stats().captures, buckets.stats().hits, step.stats().captures) == (2, 5, 2)
    step.close()


def test_a_bucket_that_other_batches_of_the_step_displaced_is_counted() -> None:
    step = a_step()
    buckets = stepped(step, (4, 8))
    ids = torch.ones(2, 8, dtype=torch.int64)
    buckets(ids, ids)
    for width in (5, 6):  # not through the buckets; the step holds two graphs
        step(ids[:, :width], ids[:, :width], full(ids[:, :width]))
    buckets(ids, ids)
    assert [(b.edge, b.captures, b.hits) for b in buckets.stats().buckets] == [(4, 0, 0), (8, 2, 1)]
    assert step.captures == 4
    step.close()


def a_step(max_graphs: int = 2) -> TrainStep:
    model = Loss(8)
    return TrainStep(model, torch.optim.AdamW(model.parameters()), max_graphs=max_graphs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 5}, r"\['max_bytes'\] belong to the TrainStep"),
        ({"copy_outputs": False}, r"\['copy_outputs'\] belong to the TrainStep"),
        ({"longer": "eager"}, "no eager way"),
        ({"policy": "eager"}, "no eager way"),
        ({"max_graphs": 2}, "its own max_graphs"),
        ({"unpad": 0}, "no outputs"),
        ({"edges": (2, 4, 8)}, r"3 buckets need TrainStep\(max_graphs=3\)"),
    ],
)
def test_options_of_a_step_stay_with_the_step(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Buckets(a_step(), **{"edges": (4, 8), **options})


def test_a_step_is_told_how_its_loss_knows_what_is_padded() -> None:
    with pytest.raises(GraphError, match=r"would count what is padded.*lengths=.*pad="):
        Buckets(a_step(), (4, 8), dims={"ids": 1, "targets": 1})
    for known in ({"pad": 0}, {"pad": {"targets": 0}}, {"lengths": "lengths"}):
        Buckets(a_step(), (4, 8), dims={"ids": 1, "targets": 1}, **known)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "pack"}, "policy='pack'"),
        ({"longer": "cut"}, "longer='cut'"),
        ({"max_graphs": 0}, "at least 1"),
        ({"max_bytes": 5, "pool": GraphPool("cpu")}, "leave the pool out"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Buckets(square, (4, 8), **options)


@pytest.mark.parametrize(
    ("target", "edges", "message"),
    [(square, 16, "edges=16: give the lengths"), ("model", (4, 8), "the target is a str")],
)
def test_targets_and_edges_of_another_kind_are_refused(target: Any, edges: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Buckets(target, edges)


def test_only_a_step_has_micro_batches() -> None:
    with pytest.raises(GraphError, match="no TrainStep"):
        Buckets(square, (4,)).micro(torch.ones(1, 2))
    with pytest.raises(GraphError, match="no TrainStep"):
        Buckets(square, (4,)).update()
