"""What a loss may not do, and the modules that it uses beside the trained model (the model's own: test_misuse.py)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from misuse_cases import WIDTH, model_of, x
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lf_graph import (
    AddressError,
    Chain,
    GraphCaptureError,
    GraphError,
    Piece,
    SignatureError,
    TrainStep,
    capture,
)
from lf_graph._outside import Outside

Loss = Callable[..., Any]


def step_of(model: nn.Module, loss: Loss, **options: Any) -> TrainStep:
    return TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1), loss=loss, **options)


# what a loss does by itself


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_loss_that_trains_by_itself_is_refused_and_leaves_no_trace(autocast: torch.dtype | None) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())

    def loss(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = model(x).square().mean()
        found.backward()  # at: backward
        optimizer.step()
        return found

    with (
        TrainStep(model, optimizer, loss=loss, autocast=autocast) as step,
        pytest.raises(
            GraphCaptureError, match=r"leave backward\(\), zero_grad\(\) and optimizer.step\(\)"
        ) as e,
    ):
        step(x())
    assert e.value.where == line_of("backward")
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def line_of(mark: str) -> str:
    with open(__file__, encoding="utf-8") as lines:
        (number,) = [i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"# at: {mark}")]
    return f"{__file__}:{number}"


def test_a_backward_elsewhere_is_none_of_the_steps_business() -> None:
    model = model_of()
    with step_of(model, lambda x: model(x).square().mean()) as step:
        step(x())
        other = nn.Linear(WIDTH, 1)
        other(x()).sum().backward()
        assert other.weight.grad is not None


def test_a_scaled_loss_is_refused_and_a_scaler_that_is_off_is_not() -> None:
    model = model_of()
    for enabled in (True, False):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        step = step_of(model, lambda x, s=scaler: s.scale(model(x).square().mean()))
        if enabled:
            with pytest.raises(GraphCaptureError, match="return the loss unscaled"):
                step(x())
        else:
            step(x())
        step.close()


def test_printing_a_tensor_is_refused_at_its_line() -> None:
    model = model_of()

    def loss(x: Tensor) -> Tensor:
        found = model(x).square().mean()
        print(found)  # at: print
        return found

    with (
        step_of(model, loss) as step,
        pytest.raises(GraphCaptureError, match="print it after the replay") as e,
    ):
        step(x())
    assert (e.value.op, e.value.where) == ("Tensor.__repr__", line_of("print"))
    assert repr(torch.ones(2)) == "tensor([1., 1.])"


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x: model(x).detach().mean(),
        lambda model, x: (model(x) > 0).sum(),
        lambda model, x: F.mse_loss(x, x),
    ],
    ids=["detached", "counted", "without the model"],
)
def test_a_loss_without_any_gradient_is_told_as_such(loss: Loss) -> None:
    model = model_of()
    with (
        step_of(model, lambda x: loss(model, x)) as step,
        pytest.raises(GraphError, match="the loss has no gradient: it was detached"),
    ):
        step(x())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_reentrant": True}, "pass use_reentrant=False"),
        # the graph of the backward would draw another dropout than the forward's, in silence
        (
            {"use_reentrant": False},
            "checkpoint with preserve_rng_state=False where the region has no dropout",
        ),
    ],
)
def test_checkpoints_that_a_graph_cannot_hold_are_refused(options: dict[str, bool], said: str) -> None:
    model = model_of()

    def loss(x: Tensor) -> Tensor:
        hidden = checkpoint(nn.Sequential(nn.Tanh(), nn.Dropout(0.5)), model[0](x), **options)
        return model[1:](hidden).square().mean()

    position = torch.get_rng_state()
    with step_of(model, loss) as step, pytest.raises(GraphCaptureError, match=said):
        step.capture(x())
    torch.set_rng_state(position)  # both can be called again


def test_a_checkpoint_without_generator_states_trains_as_in_a_loop() -> None:
    model, batch = model_of(), x()
    twin = copy.deepcopy(model)

    def loss(of: nn.Module, x: Tensor) -> Tensor:
        hidden = checkpoint(nn.Tanh(), of[0](x), use_reentrant=False, preserve_rng_state=False)
        return of[1:](hidden).square().mean()

    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1)
    with step_of(model, lambda x: loss(model, x)) as step:
        for _ in range(3):
            expected = loss(twin, batch)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(step(batch).loss, expected.detach())


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x * torch.rand(WIDTH)


def own(x: Tensor) -> Tensor:
    return x * torch.rand(WIDTH, generator=torch.Generator())


@pytest.mark.parametrize(
    ("noisy", "said"),
    [(seeded, "seed and restore generators outside of the graph"), (own, "drop generator=")],
)
def test_random_numbers_that_a_replay_would_draw_otherwise_are_refused(noisy: Loss, said: str) -> None:
    model = model_of()
    with (
        step_of(model, lambda x: model(noisy(x)).square().mean()) as step,
        pytest.raises(GraphCaptureError, match=said),
    ):
        step(x())


def test_anomaly_detection_is_refused_and_goes_without_its_reading() -> None:
    model = model_of()
    with (
        warnings.catch_warnings(action="ignore"),
        step_of(model, lambda x: model(x).square().mean()) as step,
    ):
        with torch.autograd.detect_anomaly(), pytest.raises(GraphError, match="check_nan=False"):
            step(x())
        with torch.autograd.detect_anomaly(check_nan=False):
            step(x())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_reach_weights_losses_and_norms(dtype: torch.dtype) -> None:
    model = model_of()
    torch.set_default_dtype(dtype)
    try:
        with step_of(model, lambda x: model(x).square().mean(), clip=1.0) as step:
            result = step(torch.ones(2, WIDTH, dtype=torch.float32))
            kinds = {p.dtype for p in model.parameters()} | {result.loss.dtype, step.norm.dtype}
    finally:
        torch.set_default_dtype(torch.float32)
    assert kinds == {torch.float32}


# modules beside the trained one


class Teacher(nn.Module):
    """Weights that are used without a call, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.linear(x, self.linear.weight))


def taught(teacher: nn.Module, **options: Any) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    teacher.requires_grad_(False)
    return step_of(model, lambda x: (model(x).float() - teacher(x)).square().mean(), **options)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_teacher_sees_every_batch_once(autocast: torch.dtype | None) -> None:
    teacher = Teacher()
    with taught(teacher, autocast=autocast) as step:
        step.capture(x())
        assert teacher.norm.num_batches_tracked.item() == 0
        assert torch.equal(teacher.norm.running_mean, torch.zeros(WIDTH))
        step(x())
        assert teacher.norm.num_batches_tracked.item() == 1


def moved(teacher: Teacher) -> None:
    teacher.linear.weight.data = torch.ones(WIDTH, WIDTH)


def exchanged(teacher: Teacher) -> None:
    teacher.norm = nn.BatchNorm1d(WIDTH)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (
            moved,
            AddressError,
            r"Teacher outside of the model\.linear\.weight lies elsewhere.*capture that one first",
        ),
        (exchanged, AddressError, r"Teacher outside of the model\.norm is another one"),
        (
            nn.Module.eval,
            SignatureError,
            "training of a Teacher: True -> False.*evaluate with the model itself",
        ),
    ],
)
def test_a_change_of_a_teacher_behind_the_graph_is_refused(
    change: Callable[[Teacher], Any], error: type[GraphError], said: str
) -> None:
    teacher = Teacher()
    with taught(teacher) as step:
        step(x())
        change(teacher)
        with pytest.raises(error, match=said):
            step(x())


def test_a_teacher_may_follow_in_place_and_be_unfrozen() -> None:
    teacher = Teacher()
    with taught(teacher) as step:
        batch = x()
        assert step(batch).loss < 10
        with torch.no_grad():
            teacher.norm.bias.add_(10)
        teacher.requires_grad_(True)  # for a step of its own, as in adversarial training
        assert step(batch).loss > 50


def test_two_steps_train_against_each_other_as_in_a_loop() -> None:
    def pair() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def judge(maker: nn.Module, critic: nn.Module) -> tuple[Loss, Loss]:
        return (
            lambda x: critic(maker(x).detach()).mean() - critic(x).mean(),
            lambda x: -critic(maker(x)).mean(),
        )

    makers, losses = [], []
    for captured in (True, False):
        maker, critic = pair()
        of_critic, of_maker = judge(maker, critic)
        a = torch.optim.AdamW(critic.parameters(), lr=0.1)
        b = torch.optim.SGD(maker.parameters(), lr=0.1)
        batch = x()
        if captured:
            first = TrainStep(critic, a, loss=of_critic)
            first.capture(batch)  # moves the critic's weights, so it comes before what reads them
            second = TrainStep(maker, b, loss=of_maker)
            critic.requires_grad_(False)
            second.capture(batch)
            critic.requires_grad_(True)
        torch.manual_seed(1)
        for _ in range(3):
            batch = x()
            if captured:
                losses += [first(batch).loss.item(), second(batch).loss.item()]
                continue
            for optimizer, loss in ((a, of_critic), (b, of_maker)):
                found = loss(batch)
                a.zero_grad()
                b.zero_grad()
                found.backward()
                optimizer.step()
                losses.append(found.item())
        makers.append(maker)
    assert losses[:6] == pytest.approx(losses[6:], abs=1e-6)
    assert torch.allclose(makers[0].weight, makers[1].weight, atol=1e-6)


def test_a_wrapper_around_the_model_is_not_outside_but_what_else_it_holds_is() -> None:
    model, teacher = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
    both = nn.ModuleDict({"model": model, "teacher": teacher})
    both.forward = lambda x: model(x) - teacher(x)  # type: ignore[method-assign]
    outside = Outside([model])
    with outside.watching():
        both(x())
        both(x())
    assert outside.modules == [teacher]


def test_a_module_in_a_function_of_a_chain_is_guarded_like_one_given_itself() -> None:
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    with Chain([Piece(lambda h: inner(h) + 1)]) as chain:
        chain.capture(x())
        assert inner[1].num_batches_tracked.item() == 0
        inner.eval()
        with pytest.raises(SignatureError, match="training of a BatchNorm1d: True -> False"):
            chain(x())


# graphs inside of graphs


def test_a_step_inside_its_own_loss_is_refused() -> None:
    model = model_of()
    steps: list[TrainStep] = []
    for autocast in (None, torch.bfloat16):
        steps[:] = [step_of(model, lambda x: steps[0](x).loss, autocast=autocast)]
        with (
            steps[0],
            pytest.raises(GraphError, match="graphs do not nest: call the function or module itself"),
        ):
            steps[0](x())


def test_graphs_inside_of_what_is_captured_are_refused() -> None:
    model, other = model_of(), nn.Linear(WIDTH, WIDTH)
    inner, before = capture(other, x()), copy.deepcopy(other.state_dict())
    with step_of(other, lambda x: other(x).square().mean()) as trained:
        for loss in (lambda x: model(inner(x)).mean(), lambda x: model(x).mean() + trained(x).loss):
            with step_of(model, loss) as step, pytest.raises(GraphError, match="graphs do not nest"):
                step(x())
    assert all(torch.equal(v, before[n]) for n, v in other.state_dict().items())
    inner.close()
