"""capture: gradients, inputs, outputs, random numbers and buffers equal eager code; on the recorder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capture_cases import dropping, mlp, same_gradients, same_state, square, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lf_graph import (
    capture,
)

# -- gradients of parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 8), mlp])
def test_three_micro_batches_without_zero_grad_equal_eager_to_the_bit(make: Any) -> None:
    """A1: pytorch#181723, ``.grad`` overwritten by the second micro-batch."""
    ours, theirs = twins(make)
    graphed = capture(ours, torch.randn(4, 8))
    for _ in range(3):
        x = torch.randn(4, 8)
        for model in (graphed, theirs):
            model(x).square().sum().backward()
        same_gradients(ours, theirs)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_in_both_forms_starts_anew(to_none: bool) -> None:
    ours, theirs = twins(mlp)
    graphed = capture(ours, torch.randn(4, 8))
    for _ in range(3):
        x = torch.randn(4, 8)
        for model, run in ((ours, graphed), (theirs, theirs)):
            model.zero_grad(set_to_none=to_none)
            run(x).sum().backward()
        same_gradients(ours, theirs)


def test_a_gradient_that_somebody_else_put_there_is_added_to() -> None:
    ours, theirs = twins(mlp)
    graphed = capture(ours, torch.randn(4, 8))
    x = torch.randn(4, 8)
    for _ in range(2):
        for model, run in ((ours, graphed), (theirs, theirs)):
            for p in model.parameters():
                p.grad = torch.full_like(p, 3.0)
            run(x).sum().backward()
        same_gradients(ours, theirs)


def test_eager_and_graphed_micro_batches_mix() -> None:
    ours, theirs = twins(mlp)
    graphed = capture(ours, torch.randn(4, 8))
    for i in range(4):
        x = torch.randn(4, 8)
        (graphed if i % 2 else ours)(x).sum().backward()
        theirs(x).sum().backward()
    same_gradients(ours, theirs)


def test_training_with_a_stock_optimizer_equals_eager() -> None:
    ours, theirs = twins(mlp)
    graphed = capture(ours, torch.randn(4, 8))
    steppers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (ours, theirs)]
    for _ in range(5):
        x = torch.randn(4, 8)
        for run, optimizer in zip((graphed, theirs), steppers, strict=True):
            run(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    same_state(ours, theirs)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


def test_tied_weights_get_both_gradients() -> None:
    ours, theirs = twins(Tied)
    graphed = capture(ours, torch.zeros(5, dtype=torch.int64))
    for _ in range(2):
        ids = torch.randint(0, 9, (5,))
        for run in (graphed, theirs):
            run(ids).square().sum().backward()
        torch.testing.assert_close(ours.embed.weight.grad, theirs.embed.weight.grad)
        assert len(graphed.parameters) == 1


def test_frozen_parameters_stay_without_gradient() -> None:
    ours, theirs = twins(mlp)
    for model in (ours, theirs):
        model[0].requires_grad_(False)
    graphed = capture(ours, torch.randn(4, 8))
    x = torch.randn(4, 8)
    for run in (graphed, theirs):
        run(x).sum().backward()
    same_gradients(ours, theirs)
    assert [id(p) for p in graphed.parameters] == [id(p) for p in ours[2].parameters()]


# -- inputs and outputs -----------------------------------------------------------------------------------------


def test_leaf_inputs_get_a_gradient_of_their_own() -> None:
    graphed = capture(square, torch.ones(3, requires_grad=True))
    first, second = torch.full((3,), 2.0, requires_grad=True), torch.full((3,), 5.0, requires_grad=True)
    graphed(first).sum().backward()
    graphed(second).sum().backward()
    graphed(second).sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    assert (first.grad.tolist(), second.grad.tolist()) == ([4.0] * 3, [20.0] * 3)


def test_graphs_sit_inside_an_ordinary_autograd_graph() -> None:
    ours, theirs = twins(mlp)
    graphed = capture(ours, torch.randn(4, 8, requires_grad=True))
    x, y = (torch.arange(8.0).requires_grad_() for _ in range(2))
    for source, run in ((x, graphed), (y, theirs)):
        run((source / 8).expand(4, 8).sin()).cos().prod(1).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.grad)
    same_gradients(ours, theirs)


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[::2], lambda x: x[:, 1:5], lambda x: x.expand(8, 8)]
)
def test_inputs_need_not_be_contiguous(view: Any) -> None:
    graphed = capture(square, view(torch.randn(8, 8)))
    for _ in range(2):
        x = view(torch.randn(8, 8))
        assert torch.equal(graphed(x), x * x)
    assert torch.equal(graphed(x.contiguous()), x * x)


def nested(batch: dict[str, Any], *, scale: float, flag: bool = True) -> dict[str, Any]:
    x = batch["x"] * scale
    return {"sum": x.sum(), "both": (x, [batch["ids"] + 1, None]), "note": "kept" if flag else "lost"}


def test_keywords_and_nested_arguments_and_outputs_keep_their_structure() -> None:
    sample = {"x": torch.randn(3), "ids": torch.arange(3)}
    graphed = capture(nested, sample, scale=2.0)
    batch = {"x": torch.randn(3), "ids": torch.tensor([5, 6, 7])}
    found, expected = graphed(batch, scale=2.0), nested(batch, scale=2.0)
    assert found.keys() == expected.keys()
    assert torch.equal(found["sum"], expected["sum"])
    assert torch.equal(found["both"][0], expected["both"][0])
    assert found["both"][1][0].tolist() == [6, 7, 8]
    assert (found["both"][1][1], found["note"]) == (None, "kept")


def test_a_backward_through_some_outputs_only_is_exact() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * w, x + w, (x > 0).long()

    x, w = (torch.randn(4, requires_grad=True) for _ in range(2))
    graphed = capture(fn, x, w)
    for pick in (0, 1, 0):
        x.grad = w.grad = None
        outputs = graphed(x, w)
        assert not outputs[2].requires_grad
        outputs[pick].sum().backward()
        ours = [x.grad.clone(), w.grad.clone()]
        x.grad = w.grad = None
        fn(x, w)[pick].sum().backward()
        assert torch.equal(ours[0], x.grad)
        assert torch.equal(ours[1], w.grad)


def test_copied_outputs_outlive_the_next_call_and_others_do_not() -> None:
    a, b = torch.ones(2), torch.full((2,), 3.0)
    copied, shared = capture(square, a), capture(square, a, copy_outputs=False)
    first, same = copied(a), shared(a)
    copied(b), shared(b)
    assert (first.tolist(), same.tolist()) == ([1.0, 1.0], [9.0, 9.0])


def test_calls_without_grad_mode_only_replay_the_forward() -> None:
    ours, theirs = twins(mlp)
    graphed = capture(ours, torch.randn(4, 8))
    x = torch.randn(4, 8)
    with torch.no_grad():
        found = graphed(x)
    assert torch.equal(found, theirs(x))
    assert not found.requires_grad
    graphed(x).sum().backward()
    theirs(x).sum().backward()
    same_gradients(ours, theirs)


def test_a_capture_for_inference_has_a_forward_graph_only() -> None:
    with torch.no_grad():
        graphed = capture(mlp(), torch.randn(4, 8))
        assert not graphed(torch.randn(4, 8)).requires_grad
    assert graphed.stats().graphs == 1


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    graphed = capture(square, x)
    (grad,) = torch.autograd.grad(graphed(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_autocast_is_part_of_the_capture() -> None:
    ours, theirs = twins(mlp)

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    graphed = capture(ours, torch.randn(4, 8), autocast=autocast)
    x = torch.randn(4, 8)
    found = graphed(x)
    with autocast():
        expected = theirs(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    found.float().sum().backward()
    expected.float().sum().backward()
    same_gradients(ours, theirs)


# -- random numbers and buffers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_draws_anew_and_equals_the_eager_sequence(recompute: bool) -> None:
    """pytorch#84614; with checkpointing, the recomputed forward draws what the first drew."""
    ours, theirs = twins(dropping)
    x = torch.randn(4, 8)
    graphed = capture(ours, x, checkpoint=recompute)
    sequences = []
    for run in (graphed, theirs, graphed):
        torch.manual_seed(5)
        outputs = []
        for _ in range(3):
            out = run(x)
            out.sum().backward()
            outputs.append(out.detach())
        sequences.append(outputs)
    first, eager, again = sequences
    assert not torch.equal(first[0], first[1])
    for a, b, c in zip(first, eager, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, 2 * q.grad)  # ours ran the sequence twice


def test_checkpointed_gradients_equal_torchs_checkpoint() -> None:
    ours, theirs = twins(dropping)
    graphed = capture(ours, torch.randn(4, 8), checkpoint=True)
    x = torch.randn(4, 8)
    for run in (graphed, lambda x: torch_checkpoint(theirs, x, use_reentrant=False)):
        torch.manual_seed(1)
        run(x).square().sum().backward()
    same_gradients(ours, theirs)


def test_a_capture_leaves_generator_buffers_and_gradients_as_they_were() -> None:
    ours, theirs = twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)))
    position = torch.get_rng_state()
    graphed = capture(ours, torch.randn(4, 8, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(torch.get_rng_state(), position)
    same_state(ours, theirs)
    assert all(p.grad is None for p in ours.parameters())
    x = torch.randn(4, 8)
    for run in (graphed, theirs):
        torch.manual_seed(2)
        for _ in range(3):
            run(x).sum().backward()
    same_state(ours, theirs)  # batch norm's statistics move by replays
    same_gradients(ours, theirs)


def test_autocast_around_a_replay_changes_nothing() -> None:
    """A graph holds the kernels of its capture, on CUDA and on the recorder."""
    model, x = mlp(), torch.randn(4, 8)
    graphed = capture(lambda x: model(x).square().mean(), x)
    plain = graphed(x)
    with torch.autocast("cpu", torch.bfloat16):
        again = graphed(x)
    assert torch.equal(plain, again)
