"""What TrainStep leaves alone, and what others may do between its steps; on the recorder."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import train_cases as cases
from torch import Tensor, nn
from train_cases import TOLERANCE, Build, Twins, batches, equal, model_of, sgd, snapshot

from lf_graph import (
    AddressError,
    ClosedError,
    GraphCaptureError,
    GraphError,
    StepResult,
    TrainStep,
)

# -- micro-batches and updates ----------------------------------------------------------------------------------------


def test_an_update_needs_a_micro_batch() -> None:
    model = model_of()
    with TrainStep(model, cases.adamw(model)) as step:
        for _ in range(2):
            with pytest.raises(GraphError, match="needs a micro-batch"):
                step.update()
            step(*batches(1)[0])


def test_more_micro_batches_than_promised_are_refused() -> None:
    twins = Twins(accumulate=2)
    with twins.step as step:
        group = batches(3)
        step.micro(*group[0])
        step.micro(*group[1])
        with pytest.raises(GraphError, match="accumulate=2"):
            step.micro(*group[2])
        step.update()  # what was there still counts
        cases.eager_update(twins.plain, twins.reference, group[:2])
        assert twins.difference() <= TOLERANCE


def test_fewer_micro_batches_than_promised_are_a_smaller_mean() -> None:
    twins = Twins(accumulate=4)
    with twins.step as step:
        for count in (1, 4, 2):
            group = batches(count, seed=count)
            cases.eager_update(twins.plain, twins.reference, group)
            cases.step_update(step, group)
        assert twins.difference() <= TOLERANCE


def test_results_are_tensors_of_their_own() -> None:
    model = model_of()
    with TrainStep(model, cases.adamw(model)) as step:
        first, second = (step(*batch) for batch in batches(2))
    assert isinstance(first, StepResult)
    assert float(first.loss) != float(second.loss)
    assert [float(r.count) for r in (first, second)] == [float((t != 0).sum()) for _, t in batches(2)]


# -- gradients that are not finite ------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(bad: float, accumulate: int) -> None:
    torch.manual_seed(0)
    twins = Twins(model=Scaled(), accumulate=accumulate, autocast=torch.bfloat16)
    good = [(torch.randn(3, 4),) for _ in range(3 * accumulate)]
    with twins.step as step:
        cases.step_update(step, good[:accumulate])
        before = snapshot(twins.ours, twins.optimizer)
        read = [s.detach().clone() for s in step._open().update.stand_ins().values()]
        result = cases.step_update(step, [(good[0][0] * bad,), *good[1:accumulate]])
        assert not torch.isfinite(result)
        assert not torch.isfinite(step.norm)
        assert equal(snapshot(twins.ours, twins.optimizer), before)
        assert equal(list(step._open().update.stand_ins().values()), read)
        assert int(step.skipped) == 1
        cases.step_update(step, good[accumulate : 2 * accumulate])
        assert torch.isfinite(step.norm)
        assert int(step.skipped) == 1
        for group in (good[:accumulate], good[accumulate : 2 * accumulate]):
            cases.eager_update(
                twins.plain,
                twins.reference,
                group,
                autocast=torch.bfloat16,
                loss=lambda x: (twins.plain(x), 1.0),
            )
        assert twins.difference() <= TOLERANCE


def test_a_gate_is_refused_where_it_cannot_be_had() -> None:
    model = model_of()
    with TrainStep(model, sgd(model), gate=True) as step, pytest.raises(GraphError, match="gate=True"):
        step(*batches(1)[0])


def test_the_norm_is_the_one_before_clipping() -> None:
    model, plain = model_of(), model_of()
    with TrainStep(model, cases.adamw(model), clip=1e-3) as step:
        step(*batches(1)[0])
        total, count = plain(*batches(1)[0])
        (total / count).backward()
        want = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        assert float(step.norm) == pytest.approx(float(want), rel=1e-5)
        assert float(want) > 1e-3


# -- what others do to the model and the optimizer --------------------------------------------------------------------


@pytest.mark.parametrize("build", [cases.adamw, sgd])
def test_the_model_is_usable_eagerly_between_steps_and_after_close(build: Build) -> None:
    twins = Twins(build, autocast=torch.bfloat16, accumulate=2)
    with twins.step:
        for seed in range(3):
            twins.run(batches(2, seed=seed))
            held_out = batches(1, seed=99)[0]
            with torch.no_grad():
                assert float(twins.ours(*held_out)[0]) == pytest.approx(
                    float(twins.plain(*held_out)[0]), rel=1e-5
                )
            twins.ours(*held_out)[0].backward()  # somebody looks at gradients: they are his, not the step's
            twins.ours.zero_grad()
    for seed in range(3):
        for model, optimizer in ((twins.ours, twins.optimizer), (twins.plain, twins.reference)):
            cases.eager_update(model, optimizer, batches(2, seed=seed))
    assert twins.difference() <= TOLERANCE


@pytest.mark.parametrize("build", [cases.adamw, sgd])
def test_gradients_that_a_user_holds_do_not_enter_the_step(build: Build) -> None:
    twins = Twins(build, accumulate=2)
    with twins.step:
        twins.run(batches(2))
        for p in twins.ours.parameters():
            assert p.grad is None
            p.grad = torch.full_like(p, 7.0)
        cases.step_update(twins.step, batches(2, seed=5))
        cases.eager_update(twins.plain, twins.reference, batches(2, seed=5))
        assert twins.difference() <= TOLERANCE
        assert all(bool((p.grad == 7.0).all()) for p in twins.ours.parameters())


def test_loaded_weights_are_those_of_the_next_step() -> None:
    twins = Twins(autocast=torch.bfloat16)
    other = model_of(seed=3)
    with twins.step:
        twins.run(batches(2))
        for model in (twins.ours, twins.plain):
            model.load_state_dict(other.state_dict())
        loss = float(cases.step_update(twins.step, batches(1, seed=7)))
        want = cases.eager_update(twins.plain, twins.reference, batches(1, seed=7), autocast=torch.bfloat16)
        assert loss == pytest.approx(want, rel=1e-5)
        assert twins.difference() <= TOLERANCE


def test_weights_changed_in_place_are_those_of_the_next_step() -> None:
    twins = Twins(autocast=torch.bfloat16)
    with twins.step:
        twins.run(batches(1))
        for model in (twins.ours, twins.plain):
            with torch.no_grad():
                model.head.weight.mul_(0.5)
        twins.run(batches(1, seed=7))
        assert twins.difference() <= TOLERANCE


def test_loading_by_assignment_is_refused_because_the_optimizer_would_train_other_tensors() -> None:
    model = model_of()
    state = copy.deepcopy(model.state_dict())
    with TrainStep(model, cases.adamw(model)) as step:
        step(*batches(1)[0])
        with pytest.raises(AddressError, match=r"embedding\.weight .*assign=False"):
            model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("build", [cases.adamw, sgd])
def test_replaced_weights_are_named(build: Build) -> None:
    model = model_of()
    with TrainStep(model, build(model)) as step:
        step(*batches(1)[0])
        model.head.weight.data = model.head.weight.data.clone()
        with pytest.raises(AddressError, match=r"head\.weight"):
            step(*batches(1)[0])


@pytest.mark.parametrize(("build", "key"), [(cases.adamw, "exp_avg"), (sgd, "momentum_buffer")])
def test_replaced_optimizer_state_is_named(build: Build, key: str) -> None:
    model = model_of()
    optimizer = build(model)
    with TrainStep(model, optimizer) as step:
        step(*batches(1)[0])
        state = optimizer.state[model.head.weight]
        state[key] = state[key].clone()
        with pytest.raises(AddressError, match=r"head\.weight was replaced; use optimizer\.load_state_dict"):
            step(*batches(1)[0])


def test_loading_a_state_without_what_the_graph_holds_is_refused() -> None:
    model = model_of()
    optimizer = sgd(model)
    empty = copy.deepcopy(optimizer.state_dict())
    with TrainStep(model, optimizer) as step:
        step(*batches(1)[0])
        with pytest.raises(GraphError, match=r"momentum_buffer: .* none for embedding\.weight"):
            optimizer.load_state_dict(empty)


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad])
def test_an_optimizer_that_reads_back_is_named(kind: type[torch.optim.Optimizer]) -> None:
    model = model_of()
    before = snapshot(model)
    with TrainStep(model, kind(model.parameters(), lr=0.1)) as step:  # type: ignore[call-arg]
        with pytest.raises(
            GraphCaptureError, match=rf"{kind.__name__}\.step\(\) does that.*use torch\.optim\.AdamW"
        ):
            step(*batches(1)[0])
        assert equal(snapshot(model), before)


def test_a_stock_optimizer_may_change_its_rate_and_nothing_else() -> None:
    model = model_of()
    optimizer = sgd(model)
    with TrainStep(model, optimizer) as step:
        step(*batches(1)[0])
        optimizer.param_groups[0]["lr"] = 0.0
        before = snapshot(model)
        step(*batches(1)[0])
        assert equal(snapshot(model), before)
        optimizer.param_groups[0]["momentum"] = 0.5
        with pytest.raises(GraphError, match=r"momentum: it was 0.9 at the capture and is 0.5"):
            step(*batches(1)[0])


def test_the_flat_adamw_follows_every_hyper_parameter() -> None:
    twins = Twins()
    with twins.step:
        for seed, values in enumerate(
            [{"lr": 3e-3}, {"weight_decay": 0.5}, {"betas": (0.7, 0.9)}, {"eps": 1e-4}]
        ):
            for optimizer in (twins.optimizer, twins.reference):
                optimizer.param_groups[0].update(values)
            twins.run(batches(1, seed=seed))
        assert twins.difference() <= TOLERANCE


def test_stock_optimizers_that_a_graph_would_change_are_refused() -> None:
    class Counting(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
                p.sub_(p.grad / self.state[p]["step"])

    model = model_of()
    damped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)
    for optimizer, said in ((damped, "dampening"), (Counting(model.parameters()), "counts step on the host")):
        with TrainStep(model, optimizer) as step, pytest.raises(GraphError, match=said):
            step(*batches(1)[0])
    nothing = torch.optim.SGD(model_of().requires_grad_(False).parameters(), lr=0.1)
    with TrainStep(model, nothing) as step, pytest.raises(GraphError, match="no trainable parameter"):
        step(*batches(1)[0])


def test_an_optimizer_that_reads_back_is_named_and_can_be_tried_again() -> None:
    model = model_of()
    optimizer = torch.optim.Adagrad(model.parameters(), foreach=False, fused=False)
    before = snapshot(model, optimizer)
    with TrainStep(model, optimizer) as step:
        for _ in range(2):
            with pytest.raises(GraphCaptureError, match="_local_scalar_dense"):
                step(*batches(1)[0])
        assert equal(snapshot(model, optimizer), before)


# -- what it tells, and its end -------------------------------------------------------------------------------------


def test_compiling_is_left_out_on_the_recorder_and_said() -> None:
    model = model_of()
    for mode in ("blocks", "model"):
        with TrainStep(model, cases.adamw(model), compile=mode) as step:
            step(*batches(1)[0])
            assert step.info()["compile"] == "off: no compiler on recorder"


def test_gradients_are_read_where_the_backward_made_them_unless_something_adds_or_reduces() -> None:
    reduced: list[tuple[list[tuple[int, torch.dtype]], float]] = []

    def reduce(buffers: list[Tensor], totals: Tensor) -> None:
        reduced.append(([(b.ndim, b.dtype) for b in buffers], float(totals[1])))

    kinds = []
    for options in ({}, {"accumulate": 2}, {"max_graphs": 2}, {"reduce": reduce}):
        model = model_of()
        with TrainStep(model, cases.adamw(model), autocast=torch.bfloat16, **options) as step:
            step(*batches(1)[0])
            kinds.append(step.info()["gradients"].split(",")[0])
    assert kinds == ["Direct", "Into", "Into", "Into"]
    flat, count = reduced[0]
    assert set(flat) == {(1, torch.float32), (1, torch.bfloat16)}
    assert count == float((batches(1)[0][1] != 0).sum())


def test_close_is_final_and_may_be_called_twice() -> None:
    model = model_of()
    step = TrainStep(model, cases.adamw(model))
    with pytest.raises(ClosedError):
        _ = step.norm
    step(*batches(1)[0])
    step.close()
    step.close()
    for act in (lambda: step(*batches(1)[0]), step.update, lambda: step.capture(*batches(1)[0])):
        with pytest.raises(ClosedError):
            act()
    assert step.stats().graphs == 0


def test_a_second_step_takes_over_from_a_closed_one() -> None:
    twins = Twins(autocast=torch.bfloat16)
    with twins.step:
        twins.run(batches(2))
    twins.step = TrainStep(twins.ours, twins.optimizer, autocast=torch.bfloat16)
    with twins.step:
        twins.run(batches(1, seed=8))
        assert twins.difference() <= TOLERANCE
