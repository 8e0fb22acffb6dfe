"""What changes behind a graph's back is refused with a way out (arguments: test_misuse_arguments.py)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from misuse_cases import WAYS, WIDTH, called, model_of, stepped, x
from torch import Tensor, nn

from lf_graph import (
    AddressError,
    Chain,
    Eager,
    GraphCaptureError,
    GraphError,
    Piece,
    SignatureError,
    TrainStep,
    capture,
)

# what a graph took from its modules


@WAYS
def test_a_parameter_frozen_after_the_capture_is_named(way: Any) -> None:
    model = model_of()
    run = way(model)
    model[0].requires_grad_(False)
    with pytest.raises(SignatureError, match=r"requires_grad of 0\.weight.*: True -> False"):
        run()


@WAYS
def test_a_parameter_unfrozen_after_the_capture_is_named(way: Any) -> None:
    model = model_of()
    model[0].requires_grad_(False)
    run = way(model)
    model[0].requires_grad_(True)
    with pytest.raises(SignatureError, match=r"requires_grad of 0\.weight.*: False -> True"):
        run()


@WAYS
def test_an_exchanged_module_is_named(way: Any) -> None:
    model = model_of()
    run = way(model)
    model[1] = nn.BatchNorm1d(WIDTH)
    with pytest.raises(AddressError, match="1 is another one"):
        run()


def test_an_appended_module_is_named() -> None:
    model = model_of()
    run = called(model)
    model.append(nn.Tanh())
    with pytest.raises(AddressError, match="3 is another one"):
        run()


@WAYS
def test_an_exchanged_buffer_is_named(way: Any) -> None:
    model = model_of()
    run = way(model)
    model[1].running_mean = torch.ones(WIDTH)
    with pytest.raises(AddressError, match=r"1\.running_mean is another one"):
        run()


@WAYS
def test_moved_data_of_a_frozen_parameter_is_named(way: Any) -> None:
    model = model_of()
    model[0].requires_grad_(False)
    run = way(model)
    model[0].weight.data = torch.ones(WIDTH, WIDTH)
    with pytest.raises(AddressError, match=r"0\.weight lies elsewhere"):
        run()


@WAYS
def test_values_of_frozen_parameters_and_buffers_may_change_in_place(way: Any) -> None:
    model = model_of()
    model[0].requires_grad_(False)
    run = way(model)
    model.load_state_dict(model_of().state_dict())
    run()


class Counting(nn.Module):
    """Assigns a buffer anew in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.linear(x) * self.calls


@WAYS
def test_a_buffer_that_the_forward_assigns_is_refused_and_put_back(way: Any) -> None:
    model = Counting()
    own = model.calls
    with pytest.raises(GraphCaptureError, match=r"assignment of calls.*self\.calls\.copy_"):
        way(model)
    assert model.calls is own
    assert own.item() == 0


class Caching(nn.Module):
    """Makes a buffer in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.register_buffer("table", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH).float()
        return self.linear(x + self.table)


@WAYS
def test_a_buffer_made_once_is_allowed(way: Any) -> None:
    way(Caching())()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@WAYS
def test_a_hook_on_a_gradient_is_refused(way: Any, register: str) -> None:
    model = model_of()
    getattr(model[0].weight, register)(lambda grad: None)
    with pytest.raises(GraphCaptureError, match=r"hook of 0\.weight"):
        way(model)


def test_a_model_converted_after_closing_gets_gradients_of_its_new_dtype() -> None:
    model = nn.Linear(WIDTH, 1)
    with capture(model, x()) as graphed:
        graphed(x()).sum().backward()
    model.zero_grad()
    model.double()
    with capture(model, x().double()) as graphed:
        graphed(x().double()).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float64


# the surroundings of a capture and of a call


def test_a_capture_inside_autocast_follows_the_weights() -> None:
    model = nn.Linear(WIDTH, 1)
    with torch.autocast("cpu", torch.bfloat16):
        graphed = capture(model, x())
    with torch.no_grad():
        model.weight.mul_(3)
    batch = x()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(graphed(batch), model(batch))


def test_a_step_inside_autocast_follows_the_weights() -> None:
    model = nn.Linear(WIDTH, 1)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.5), x()
    with (
        torch.autocast("cpu", torch.bfloat16),
        TrainStep(model, optimizer, loss=lambda x: model(x).float().mean()) as step,
    ):
        losses = [step(batch).loss.item() for _ in range(3)]
        assert losses[0] > losses[1] > losses[2]


def test_a_graph_without_a_backward_is_not_called_with_gradients() -> None:
    model = nn.Linear(WIDTH, 1)
    with torch.no_grad():
        graphed = capture(model, x())
        graphed(x())
    with pytest.raises(SignatureError, match=r"gradients \(torch\.no_grad\): off -> on"):
        graphed(x())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_is_captured_where_autograd_is_on(mode: Any) -> None:
    with mode(), pytest.raises(GraphError, match="call it outside of"):
        stepped(model_of())


def test_a_capture_in_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(GraphError, match=r"outside of torch\.inference_mode"):
        capture(model_of(), x())


def test_a_call_in_inference_mode_replays() -> None:
    model = nn.Linear(WIDTH, 1)
    graphed, batch = capture(model, x()), x()
    with torch.inference_mode():
        assert torch.allclose(graphed(batch), model(batch))


def test_a_second_thread_is_refused_and_gets_no_numbers_of_the_first() -> None:
    inside, leave, errors = threading.Event(), threading.Event(), []

    def wait(x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert leave.wait(10)
        return x

    chain = Chain([Piece(torch.relu), Eager(wait), Piece(torch.neg)]).capture(x())
    thread = threading.Thread(target=chain, args=(x(),))
    thread.start()
    assert inside.wait(10)
    try:
        chain(x())
    except GraphError as e:
        errors.append(str(e))
    leave.set()
    thread.join()
    assert "second thread" in errors[0]
    chain(x())
