"""Arguments, results and optimizers that cannot be part of a graph are refused with a way out."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from misuse_cases import WIDTH, called, model_of, stepped, x
from torch import Tensor, nn

from lf_graph import (
    Buckets,
    Chain,
    GraphCaptureError,
    GraphError,
    HostRoutedMoE,
    MoE,
    OptimizerError,
    Piece,
    StaleReplayError,
    TrainStep,
    capture,
)

# arguments and results


@dataclass
class Batch:
    """Not a tree of tensors for torch."""

    ids: Tensor


@pytest.mark.parametrize("argument", [Batch(torch.ones(2)), UserDict(ids=torch.ones(2))])
def test_an_argument_with_hidden_values_is_refused(argument: Any) -> None:
    with pytest.raises(GraphError, match=f"a {type(argument).__name__}, whose content would be frozen"):
        capture(lambda x, other: x, x(), argument)
    model = nn.Linear(WIDTH, 1)
    step = TrainStep(model, torch.optim.AdamW(model.parameters()), loss=lambda x, other: model(x).mean())
    with pytest.raises(GraphError, match="whose content would be frozen"):
        step(x(), argument)


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x[0].zero_(), lambda x: x.t().mul_(2)])
def test_an_input_changed_in_place_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(GraphCaptureError, match="in-place change of input in0"):
        capture(lambda x: (change(x), x * 2)[1], x())


@pytest.mark.parametrize("result", [None, 3, (torch.ones(1), None)])
def test_a_piece_returns_tensors(result: Any) -> None:
    with pytest.raises(GraphError, match="a piece gives one tensor, or a tuple of tensors"):
        Chain([Piece(lambda x: result)]).capture(x())


def test_a_parameter_that_is_only_returned_gets_its_gradient() -> None:
    weight = nn.Parameter(torch.ones(3))
    held = nn.ParameterList([weight])
    graphed = capture(lambda x: (x * 2, held[0]), torch.ones(3), modules=[held])
    (graphed(torch.ones(3))[1] * 3).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("value", "dtype"), [(-100, torch.bool), (300, torch.uint8), (0.5, torch.int64), (-1, torch.uint8)]
)
def test_a_pad_value_that_its_tensor_cannot_hold_is_refused(value: float, dtype: torch.dtype) -> None:
    buckets = Buckets(lambda x: x * 1, (4,), pad=value)
    with pytest.raises(GraphError, match=f"x is {dtype} and cannot be padded with {value}"):
        buckets(torch.ones(1, 3, dtype=dtype))


def test_a_chain_takes_tensors() -> None:
    with pytest.raises(GraphError, match=r"takes tensors, got \['int'\]"):
        Chain([Piece(torch.relu)]).capture(3)  # type: ignore[arg-type]


def test_a_second_backward_of_one_replay_is_refused() -> None:
    loss = capture(model_of(), x())(x()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(StaleReplayError, match="add the losses and run one backward"):
        loss.backward()


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(GraphError, match="sparse=False"):
        capture(nn.Embedding(5, WIDTH, sparse=True), torch.tensor([1, 2]))


@pytest.mark.parametrize("way", [called, stepped])
def test_nothing_that_holds_graphs_is_copied(way: Any) -> None:
    graphed = way(model_of()).__closure__[0].cell_contents
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(GraphError, match="cannot be copied or pickled"):
            duplicate(graphed)


def test_a_model_and_its_optimizer_can_be_copied_and_pickled_beside_a_step() -> None:
    model = model_of()
    run = stepped(model)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        twin.load_state_dict(twin.state_dict(), assign=True)  # the step does not watch copies
        assert torch.equal(twin[0].weight, model[0].weight)
    run()


def test_a_copied_moe_layer_comes_without_graphs() -> None:
    layer = HostRoutedMoE(WIDTH, 8, 3, 1, capacities=(6,))
    layer.capture_buckets(x())
    batch = x()
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        layer.experts.down.zero_()
    assert twin(batch).y.abs().sum() > 0
    layer.close()


# the step


def test_a_loss_may_hold_a_parameter_itself() -> None:
    ours, theirs = nn.Linear(WIDTH, 1, bias=False), nn.Linear(WIDTH, 1, bias=False)
    theirs.load_state_dict(ours.state_dict())
    weight, optimizer = ours.weight, torch.optim.AdamW(theirs.parameters(), lr=0.1)
    step = TrainStep(
        ours, torch.optim.AdamW([weight], lr=0.1), loss=lambda x: (x @ weight.t()).square().mean()
    )
    for batch in (x(), x(), x()):
        step(batch)
        optimizer.zero_grad()
        theirs(batch).square().mean().backward()
        optimizer.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)


def test_an_lstm_is_trained_as_in_a_loop() -> None:
    ours = nn.LSTM(WIDTH, WIDTH)
    theirs = copy.deepcopy(ours)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    step = TrainStep(
        ours, torch.optim.AdamW(ours.parameters(), lr=0.1), loss=lambda x: ours(x)[0].square().mean()
    )
    for batch in (torch.randn(3, 2, WIDTH) for _ in range(3)):
        step(batch)
        optimizer.zero_grad()
        theirs(batch)[0].square().mean().backward()
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def sgd_step(model: nn.Linear, **options: Any) -> tuple[TrainStep, torch.optim.SGD]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainStep(
        model, optimizer, loss=lambda x: (model(x).square().sum(), x.new_tensor(7.0)), **options
    ), optimizer


def test_an_update_refused_by_the_optimizer_can_be_repeated() -> None:
    ours, batch = nn.Linear(WIDTH, 1), x()
    theirs = copy.deepcopy(ours)
    step, optimizer = sgd_step(ours, accumulate=2)
    step.capture(batch)
    step.micro(batch)
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(OptimizerError, match="only lr may change"):
        step.update()
    optimizer.param_groups[0]["momentum"] = 0.9
    loss = theirs(batch).square().sum() / 7
    loss.backward()
    assert torch.allclose(step.update().loss, loss)
    assert torch.allclose(ours.weight, theirs.weight - 0.1 * theirs.weight.grad, atol=1e-6)


def test_a_step_interrupted_inside_an_update_can_only_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = sgd_step(nn.Linear(WIDTH, 1))
    step(x())
    step.micro(x())

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(step._state.optimize, "replay", interrupt)  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        step.update()
    with pytest.raises(GraphError, match=r"the last update was interrupted \(KeyboardInterrupt"):
        step.update()
    step.close()


def test_a_group_added_to_any_optimizer_is_refused() -> None:
    step, optimizer = sgd_step(nn.Linear(WIDTH, 1))
    step(x())
    optimizer.add_param_group({"params": nn.Linear(WIDTH, 1).parameters()})
    with pytest.raises(OptimizerError, match="a group was added later"):
        step(x())


@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
def test_an_option_switched_on_later_is_refused(option: str) -> None:
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    step = TrainStep(model, optimizer, loss=lambda x: model(x).mean())
    step(x())
    optimizer.param_groups[0][option] = True
    with pytest.raises(OptimizerError, match=option):
        step(x())


def test_a_loss_may_change_its_batch_in_place() -> None:
    model = nn.Embedding(6, WIDTH)
    theirs = copy.deepcopy(model)
    optimizer, ids = torch.optim.SGD(model.parameters(), lr=0.1), torch.tensor([1, 4])
    step = TrainStep(model, optimizer, loss=lambda ids: model(ids.add_(1)).square().mean())
    assert torch.equal(step(ids).loss, theirs(ids + 1).square().mean())
    assert ids.tolist() == [1, 4]


def test_a_batch_that_wants_gradients_is_refused() -> None:
    model = nn.Linear(WIDTH, 1)
    step = TrainStep(model, torch.optim.AdamW(model.parameters()), loss=lambda x: model(x).mean())
    with pytest.raises(GraphError, match="pass detach"):
        step(x().requires_grad_())


def test_padding_of_a_moe_layer_may_hold_nan() -> None:
    layer = MoE(WIDTH, 8, 3, 2, balance_weight=0.1, z_weight=0.1)
    keep = torch.tensor([True, True, False, False, True, False])
    batch = torch.where(keep[:, None], x(), torch.nan).requires_grad_()
    found = layer(batch, keep)
    (found.y.sum() + found.aux).backward()
    for tensor in (batch, *layer.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
