"""What TrainStep refuses at its construction, its first batch, and by another signature; on the recorder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import train_cases as cases
from torch import Tensor, nn
from train_cases import TOLERANCE, Build, Twins, batches, equal, largest_difference, model_of, sgd, snapshot

from lf_graph import (
    GraphCaptureError,
    GraphError,
    SignatureError,
    TrainStep,
)

# -- refused at the first batch -------------------------------------------------------------------------------------


class Strange(nn.Module):
    """A language model with one thing that a graph cannot hold, or that makes no sense; ``fault`` can be cleared."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.inner = model_of(batch_norm=True, dropout=0.2)
        self.spare = nn.Linear(2, 2)

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        total, count = self.inner(ids, targets)
        if self.fault == "item" and total.item() > 0:
            total = total * 1.0
        if self.fault == "shape":
            return total.expand(3), count
        if self.fault == "tuple":
            return total, count, count
        if self.fault == "number":
            return 1.0
        if self.fault != "unused":
            total = total + 0 * self.spare(torch.ones(2)).sum()
        return total, count


@pytest.mark.parametrize("build", [cases.adamw, sgd])
def test_a_parameter_without_gradient_is_named(build: Build) -> None:
    model = Strange("unused")
    with (
        TrainStep(model, build(model)) as step,
        pytest.raises(GraphError, match=r"spare\.weight, spare\.bias"),
    ):
        step(*batches(1)[0])


@pytest.mark.parametrize("build", [cases.adamw, sgd])
def test_a_trained_parameter_that_no_optimizer_updates_is_refused(build: Build) -> None:
    model = model_of()
    optimizer = build(model.blocks)
    with (
        TrainStep(model, optimizer) as step,
        pytest.raises(GraphError, match=r"2 tensors .* not in the optimizer"),
    ):
        step(*batches(1)[0])
    model.embedding.requires_grad_(False)
    model.head.requires_grad_(False)
    with TrainStep(model, optimizer) as step:
        step(*batches(1)[0])


@pytest.mark.parametrize("fault", ["shape", "tuple", "number"])
def test_a_loss_that_is_no_scalar_or_pair_is_refused(fault: str) -> None:
    model = Strange(fault)
    with (
        TrainStep(model, cases.adamw(model)) as step,
        pytest.raises(GraphError, match="the loss must be a scalar"),
    ):
        step(*batches(1)[0])


def test_a_batch_without_tensors_is_refused() -> None:
    model = model_of()
    with TrainStep(model, cases.adamw(model)) as step, pytest.raises(GraphError, match="at least one tensor"):
        step(1, 2)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_read_back_is_named_and_leaves_no_trace_and_a_mended_model_works(
    autocast: torch.dtype | None,
) -> None:
    model, plain = Strange("item"), Strange()
    plain.load_state_dict(model.state_dict())
    optimizer = cases.adamw(model)
    before, random = snapshot(model), torch.get_rng_state()
    with TrainStep(model, optimizer, autocast=autocast) as step:
        for _ in range(3):
            with pytest.raises(GraphCaptureError) as caught:
                step(*batches(1)[0])
        assert caught.value.op == "aten._local_scalar_dense"
        assert caught.value.where.startswith(__file__)
        assert equal(snapshot(model), before)
        assert torch.equal(torch.get_rng_state(), random)
        assert all(p.grad is None for p in model.parameters())
        assert all(bool((v == 0).all()) for s in optimizer.state.values() for v in s.values())
        assert step.stats().graphs == 0
        model.fault = ""
        torch.manual_seed(4)
        step(*batches(1)[0])
    torch.manual_seed(4)
    cases.eager_update(plain, cases.adamw(plain), batches(1), autocast=autocast)
    assert largest_difference(model, plain) <= 1e-5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accumulate": 0}, "accumulate=0"),
        ({"accumulate": 2.5}, "accumulate=2.5"),
        ({"max_graphs": 0}, "max_graphs=0"),
        ({"clip": None}, "clip=None"),
        ({"clip": -1.0}, r"clip=-1\.0"),
        ({"clip": float("nan")}, "clip=nan"),
        ({"compile": "yes"}, "compile='yes'"),
        ({"recompute": "all"}, "recompute='all'"),
        ({"recompute": 0.0, "compile": "model"}, r"recompute=0\.0"),
        ({"recompute": True, "compile": "model"}, "recompute=True"),
        ({"recompute": "cheap"}, "compile='model'"),
        ({"autocast": "bf16"}, r"autocast='bf16'.*torch\.bfloat16"),
        ({"autocast": torch.float16}, r"scaler.*torch\.bfloat16"),
        ({"loss": "mse"}, "loss='mse'.*called with the batch"),
        ({"gate": "yes"}, "gate='yes'"),
        ({"max_bytes": "1GB"}, "max_bytes='1GB'"),
        ({"max_bytes": -1}, "max_bytes=-1"),
        ({"model": "no module"}, "a str"),
        ({"optimizer": "adamw"}, "a str"),
        ({"optimizer": torch.optim.LBFGS(nn.Linear(2, 2).parameters())}, "LBFGS"),
    ],
)
def test_arguments_without_meaning_are_refused_at_construction(options: dict[str, Any], said: str) -> None:
    model = model_of()
    arguments = {"model": model, "optimizer": cases.adamw(model), **options}
    with pytest.raises(GraphError, match=said):
        TrainStep(**arguments)


# -- signatures -----------------------------------------------------------------------------------------------------


def test_another_shape_is_refused_with_both_shapes() -> None:
    model = model_of()
    with TrainStep(model, cases.adamw(model)) as step:
        step(*batches(1, length=6)[0])
        with pytest.raises(SignatureError) as caught:
            step(*batches(1, length=7)[0])
        assert caught.value.differences == [
            f"args[{i}]: int64[3, 6] on cpu -> int64[3, 7] on cpu" for i in (0, 1)
        ]
        step(*batches(1, length=6)[0])
        assert step.stats().captures == 1


def test_a_message_shows_six_differences_and_the_attribute_has_all() -> None:
    model = model_of()
    ids, targets = batches(1)[0]
    with TrainStep(model, cases.adamw(model), loss=lambda *numbers: model(ids, targets)) as step:
        step(ids, *range(9))
        with pytest.raises(SignatureError, match=r"args\[6\]: 5 -> 6; 3 more; ") as caught:
            step(ids, *range(1, 10))
    assert len(caught.value.differences) == 9


def test_an_argument_more_or_less_is_refused_by_its_name() -> None:
    model = model_of()
    with TrainStep(model, cases.adamw(model), loss=lambda ids, targets: model(ids, targets)) as step:
        ids, targets = batches(1)[0]
        step(ids, targets)
        with pytest.raises(SignatureError) as caught:
            step(ids, targets=targets)
    assert caught.value.differences == ["args[1]: given -> missing", "kwargs['targets']: missing -> given"]


def test_a_numpy_array_is_refused_at_the_first_batch_and_named() -> None:
    model = model_of()
    ids, targets = batches(1)[0]
    with (
        TrainStep(model, cases.adamw(model)) as step,
        pytest.raises(GraphError, match=r"args\[1\] is a numpy array.*from_numpy"),
    ):
        step(ids, targets.numpy())


def test_a_parameter_frozen_after_the_capture_is_not_trained_on_in_silence() -> None:
    for build in (cases.adamw, sgd):
        model = model_of()
        with TrainStep(model, build(model)) as step:
            step(*batches(1)[0])
            model.embedding.requires_grad_(False)
            before = snapshot(model)
            with pytest.raises(
                SignatureError, match=r"embedding\.weight: True -> False; make a new TrainStep"
            ):
                step(*batches(1)[0])
            assert equal(snapshot(model), before)
            model.embedding.requires_grad_(True)
            step(*batches(1)[0])


def test_another_constant_is_refused() -> None:
    model = model_of()

    def loss(ids: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        total, count = model(ids, targets)
        return total * scale, count

    with TrainStep(model, cases.adamw(model), loss=loss) as step:
        step(*batches(1)[0], 1.0)
        with pytest.raises(SignatureError, match=r"args\[2\]: 1.0 -> 2.0"):
            step(*batches(1)[0], 2.0)
        with pytest.raises(SignatureError, match=r"args\[2\]: 1.0 -> True"):
            step(*batches(1)[0], True)


def test_the_mode_of_the_model_is_part_of_the_graph() -> None:
    model = model_of(dropout=0.5)
    with TrainStep(model, cases.adamw(model)) as step:
        step(*batches(1)[0])
        model.eval()
        with pytest.raises(SignatureError, match=r"training of a \w+: True -> False"):
            step(*batches(1)[0])
        model.train()
        next(m for m in model.modules() if isinstance(m, nn.Dropout)).eval()  # a part of it counts too
        with pytest.raises(SignatureError, match=r"another call: training of a Dropout: True -> False;"):
            step(*batches(1)[0])
        model.train()
        step(*batches(1)[0])


class FrozenInEval(cases.Towers):
    """Puts its frozen tower into eval() in every forward, as GR00T does."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.encoder.eval()
        return super().forward(x, y)


def test_a_forward_may_set_the_mode_of_frozen_parts_by_itself() -> None:
    model = FrozenInEval()
    with TrainStep(model, cases.adamw(model)) as step:
        for batch in cases.pairs(3):
            step(*batch)
        model.train()  # at the start of an epoch: the next forward would undo it for the encoder
        step(*cases.pairs(1)[0])
        model.head.eval()
        with pytest.raises(SignatureError, match="training of a Linear: True -> False"):
            step(*cases.pairs(1)[0])
    assert type(model).train is nn.Module.train


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_graphs_hold_two_shapes_and_the_least_recently_used_goes_first(accumulate: int) -> None:
    twins = Twins(accumulate=accumulate, max_graphs=2, clip=0.5)
    made = {n: batches(8, length=n, seed=n) for n in (5, 6, 7)}
    captures = []
    with twins.step as step:
        for length in (5, 6, 5, 7, 5, 6):
            group = [made[length].pop() for _ in range(accumulate)]
            cases.eager_update(twins.plain, twins.reference, group, twins.clip)
            cases.step_update(step, group)
            captures.append(step.stats().captures)
        assert captures == [1, 2, 2, 3, 3, 4]  # 7 replaced 6, not 5
        assert twins.difference() <= TOLERANCE


def test_micro_batches_of_one_update_may_differ_in_shape() -> None:
    twins = Twins(accumulate=3, max_graphs=2)
    with twins.step as step:
        for seed in range(3):
            group = [batches(1, length=n, seed=10 * seed + n)[0] for n in (5, 6, 5)]
            cases.eager_update(twins.plain, twins.reference, group)
            cases.step_update(step, group)
        assert twins.difference() <= TOLERANCE
