"""TrainStep gives the numbers of the eager loop, on the recorder. What it refuses: test_train_step_refusals.py."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import train_cases as cases
from torch import Tensor, nn
from train_cases import (
    TOLERANCE,
    Towers,
    Twins,
    batches,
    equal,
    largest_difference,
    model_of,
    pairs,
    snapshot,
)

from lf_graph import TrainStep

# over many steps in bf16, a last bit of a master sooner or later rounds its shadow the other way, 2^-9 apart
MANY_BF16_STEPS = 2e-3

# -- A5: the optimizer follows its schedule ------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_20_steps_with_a_cosine_rate_equal_the_eager_loop(
    accumulate: int, clip: float, autocast: torch.dtype | None
) -> None:
    twins = Twins(accumulate=accumulate, clip=clip, autocast=autocast)
    with twins.step:
        twins.run(batches(20 * accumulate), schedule=True)
        assert twins.difference() <= (MANY_BF16_STEPS if autocast else TOLERANCE)
        assert twins.step.stats().captures == 1
        assert int(twins.step.skipped) == 0


@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_bf16_update_equals_the_eager_one(accumulate: int) -> None:
    for seed in range(5):
        twins = Twins(model=model_of(seed), accumulate=accumulate, autocast=torch.bfloat16)
        with twins.step:
            twins.run(batches(accumulate, seed=seed))
            assert twins.difference() <= TOLERANCE


def test_bf16_reads_shadows_of_what_autocast_casts_and_of_nothing_else() -> None:
    twins = Twins(autocast=torch.bfloat16)
    with twins.step as step:
        twins.run(batches(1))
        assert "9 bf16 shadows" in step.info()["optimizer"]  # 2 x (up, down) with biases, and the head
        read = {
            n: step._open().update.stand_ins()[p].dtype
            for n, p in twins.ours.named_parameters()
            if p.requires_grad
        }
    in_float32 = {n for n, dtype in read.items() if dtype is torch.float32}
    assert all("norm" in n or "embedding" in n for n in in_float32)
    assert len(in_float32) == 5
    assert list(read.values()).count(torch.bfloat16) == 9
    assert {p.dtype for p in twins.ours.parameters()} == {torch.float32}


def test_without_shadows_the_numbers_are_the_same_bits() -> None:
    found = []
    for shadows in (True, False):
        model = model_of()
        with TrainStep(model, cases.adamw(model), autocast=torch.bfloat16, shadows=shadows) as step:
            for batch in batches(20):
                step(*batch)
        found.append(snapshot(model))
    assert equal(*found)


def test_the_flat_adamw_and_the_stock_optimizer_agree() -> None:
    found = []
    for fused in (True, False):
        model = model_of()
        with TrainStep(model, cases.adamw(model, fused=True), fused=fused, clip=0.3) as step:
            for batch in batches(4):
                step(*batch)
            assert ("flat" in step.info()["optimizer"]) is fused
        found.append(model)
    assert largest_difference(*found) <= TOLERANCE


# -- optimizers ---------------------------------------------------------------------------------------------------


def adam_l2(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Cooling(torch.optim.Optimizer):
    """An optimizer of the user's own whose state starts at one, not at zero."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                heat = self.state[p].setdefault("heat", torch.ones_like(p))
                heat.mul_(0.9)
                p.sub_(p.grad * heat * group["lr"])


def cooling(model: nn.Module) -> torch.optim.Optimizer:
    return Cooling(model.parameters())


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("build", [cases.two_groups, adam_l2, sgd, nesterov, plain_sgd, cooling])
def test_every_optimizer_follows_its_groups_and_its_schedule(
    build: Callable[[nn.Module], torch.optim.Optimizer], accumulate: int
) -> None:
    twins = Twins(build, accumulate=accumulate, clip=0.5)
    with twins.step:
        twins.run(batches(8 * accumulate), schedule=True)
        assert twins.difference() <= TOLERANCE
    theirs, ours = twins.reference.state_dict()["state"], twins.optimizer.state_dict()["state"]
    for index, state in theirs.items():
        for key, value in state.items():
            torch.testing.assert_close(ours[index][key], value, rtol=1e-4, atol=1e-6)


def test_the_kind_of_weight_decay_may_change_between_steps() -> None:
    twins = Twins(lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5))
    if "decoupled_weight_decay" not in twins.reference.param_groups[0]:
        pytest.skip("this torch knows one kind for each optimizer")
    with twins.step:
        twins.run(batches(2))
        for optimizer in (twins.reference, twins.optimizer):
            optimizer.param_groups[0]["decoupled_weight_decay"] = False
        twins.run(batches(2))
        assert twins.difference() <= TOLERANCE


@pytest.mark.parametrize("build", [sgd, cooling, lambda m: cases.adamw(m, fused=True)])
def test_rehearsing_a_stock_optimizer_leaves_weights_and_state_as_they_start(
    build: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    model = model_of()
    optimizer, before = build(model), snapshot(model)
    with TrainStep(model, optimizer, fused=False) as step:
        step.micro(*batches(1)[0])  # captures everything, updates nothing
        assert equal(snapshot(model), before)
        start = 1.0 if isinstance(optimizer, Cooling) else 0.0
        states = [v for s in optimizer.state.values() for v in s.values()]
        assert states
        assert all(bool((v == start).all()) for v in states)
        assert all(p.grad is None for p in model.parameters())


# -- models -------------------------------------------------------------------------------------------------------


def test_tied_weights_get_the_gradients_of_both_uses() -> None:
    for autocast in (None, torch.bfloat16):
        twins = Twins(model=model_of(tied=True), autocast=autocast, accumulate=2)
        with twins.step:
            twins.run(batches(8))
            assert twins.difference() <= TOLERANCE
        assert twins.ours.head.weight is twins.ours.embedding.weight


def test_dropout_draws_what_the_eager_loop_draws_and_differs_between_steps() -> None:
    twins = Twins(model=model_of(dropout=0.4), accumulate=2)
    with twins.step:
        twins.run(
            batches(10)
        )  # every update starts from a seed of its own, and two micro-batches draw in turn
        assert twins.difference() <= TOLERANCE
    losses = set()
    model = model_of(dropout=0.4)
    with TrainStep(model, cases.adamw(model, lr=0.0, weight_decay=0.0)) as step:
        for _ in range(3):
            losses.add(float(step(*batches(1)[0]).loss))
    assert len(losses) == 3


def test_capturing_draws_no_random_numbers() -> None:
    model = model_of(dropout=0.4)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    step = TrainStep(model, cases.adamw(model))
    step._require_graph(batches(1)[0], {})
    assert torch.equal(torch.get_rng_state(), before)
    step.close()


def test_batch_norm_sees_every_batch_once() -> None:
    twins = Twins(lambda m: plain_sgd(m), model=model_of(batch_norm=True), accumulate=2)
    with twins.step:
        twins.run(batches(6))
        assert twins.difference() <= 1e-5
        assert int(twins.ours.blocks[0].batch_norm.num_batches_tracked) == 6


def test_keywords_nested_batches_and_constants_reach_the_loss() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor], *, scale: float) -> tuple[Tensor, Tensor]:
        total, count = model(batch["ids"], batch["targets"])
        return total * scale, count

    ours, plain = model_of(), model_of()
    optimizer, reference = cases.adamw(ours), cases.adamw(plain)
    with TrainStep(ours, optimizer, loss=lambda **kw: loss(ours, **kw)) as step:
        for ids, targets in batches(3):
            result = step(batch={"ids": ids, "targets": targets}, scale=0.5)
            mean = cases.eager_update(
                plain, reference, [(ids, targets)], loss=lambda *b: (plain(*b)[0] * 0.5, plain(*b)[1])
            )
            assert float(result.loss) == pytest.approx(mean, rel=1e-5)
            assert float(result.count) == int((targets != 0).sum())
    assert largest_difference(ours, plain) <= TOLERANCE


def test_a_mean_loss_counts_as_one_per_micro_batch() -> None:
    ours, plain = model_of(), model_of()

    def mean(model: nn.Module, *batch: Tensor) -> Tensor:
        total, count = model(*batch)
        return total / count

    optimizer, reference = cases.adamw(ours), cases.adamw(plain)
    with TrainStep(ours, optimizer, loss=lambda *b: mean(ours, *b), accumulate=2) as step:
        for group in cases.grouped(batches(6), 2):
            assert float(cases.step_update(step, group)) == pytest.approx(
                cases.eager_update(plain, reference, group, loss=lambda *b: (mean(plain, *b), 1.0)), rel=1e-5
            )
    assert largest_difference(ours, plain) <= TOLERANCE


@pytest.mark.parametrize("total", [0.25, 0.0])
def test_fractional_weights_divide_by_their_sum_and_no_weight_at_all_changes_nothing(total: float) -> None:
    ours, plain = model_of(), model_of()
    weight = torch.tensor(total)
    optimizer = cases.adamw(ours, weight_decay=0.0)
    with TrainStep(ours, optimizer, loss=lambda i, t, w: (ours(i, t)[0] * w, w)) as step:
        result = step(*batches(1)[0], weight)
    expected = plain(*batches(1)[0])[0].detach()
    assert float(result.loss) == pytest.approx(float(expected) if total else 0.0, rel=1e-5)
    if not total:
        assert equal(snapshot(ours), snapshot(plain))


# -- frozen layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("functional", ["", "before", "after"])
def test_layers_before_the_trained_ones_may_be_frozen(functional: str, accumulate: int) -> None:
    torch.manual_seed(0)
    twins = Twins(model=Towers(functional), accumulate=accumulate)
    with twins.step:
        frozen = {n: p.detach().clone() for n, p in twins.ours.named_parameters() if not p.requires_grad}
        twins.run(pairs(6 * accumulate))
        assert twins.difference() <= TOLERANCE
        assert frozen
        assert all(torch.equal(p, dict(twins.ours.named_parameters())[n]) for n, p in frozen.items())


# -- saving and loading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [cases.two_groups, sgd])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_plain_torch_continues_from_our_state(
    build: Callable[[nn.Module], torch.optim.Optimizer], autocast: torch.dtype | None
) -> None:
    ours, plain = model_of(), model_of(seed=9)
    optimizer, reference = build(ours), build(plain)
    micros = batches(6)
    with TrainStep(ours, optimizer, autocast=autocast) as step:
        for batch in micros[:3]:
            step(*batch)
        plain.load_state_dict(copy.deepcopy(ours.state_dict()))
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for batch in micros[3:]:
            step(*batch)
            cases.eager_update(plain, reference, [batch], autocast=autocast)
    assert largest_difference(ours, plain) <= TOLERANCE


@pytest.mark.parametrize("captured", [False, True], ids=["before the capture", "after the capture"])
@pytest.mark.parametrize("build", [cases.two_groups, sgd])
def test_we_continue_from_the_state_of_plain_torch(
    build: Callable[[nn.Module], torch.optim.Optimizer], captured: bool
) -> None:
    ours, plain = model_of(seed=9), model_of()
    optimizer, reference = build(ours), build(plain)
    micros = batches(6)
    with TrainStep(ours, optimizer, autocast=torch.bfloat16) as step:
        if captured:
            step(*micros[0])
        for batch in micros[:3]:
            cases.eager_update(plain, reference, [batch], autocast=torch.bfloat16)
        ours.load_state_dict(copy.deepcopy(plain.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
        for batch in micros[3:]:
            step(*batch)
            cases.eager_update(plain, reference, [batch], autocast=torch.bfloat16)
    assert largest_difference(ours, plain) <= TOLERANCE


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_gives_the_same_bits(accumulate: int) -> None:
    def build(state: Any = None) -> tuple[nn.Module, torch.optim.Optimizer, Any, TrainStep]:
        model = model_of(seed=0 if state is None else 9, dropout=0.2)
        optimizer = cases.adamw(model)
        rate = cases.cosine(optimizer)
        if state is not None:
            for part, saved in zip((model, optimizer, rate), state, strict=True):
                part.load_state_dict(saved)
        step = TrainStep(model, optimizer, accumulate=accumulate, autocast=torch.bfloat16, clip=0.3)
        return model, optimizer, rate, step

    def run(made: Any, first: int, last: int) -> None:
        for i, group in enumerate(cases.grouped(batches(8 * accumulate), accumulate)):
            if first <= i < last:
                torch.manual_seed(i)
                cases.step_update(made[3], group)
                made[2].step()

    whole = build()
    run(whole, 0, 4)
    saved = copy.deepcopy([part.state_dict() for part in whole[:3]])
    run(whole, 4, 8)
    resumed = build(saved)
    run(resumed, 4, 8)
    assert equal(snapshot(*whole[:2]), snapshot(*resumed[:2]))
    whole[3].close()
    resumed[3].close()


def test_a_scheduler_of_torch_sees_the_steps() -> None:
    model = model_of()
    optimizer = cases.adamw(model)
    rate = cases.cosine(optimizer)
    with TrainStep(model, optimizer) as step, warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        step(*batches(1)[0])
        rate.step()
