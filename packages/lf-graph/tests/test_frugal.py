"""Runs that teach something and must not need the memory that compiling saves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lf_graph import GraphCaptureError
from lf_graph import _cuda as cuda
from lf_graph._compile import blocks_of
from lf_graph._frugal import forward_only, in_parts
from lf_graph._gradients import Collect
from lf_graph._pool import GraphPool
from lf_graph._recorder import RecordBackend
from lf_graph._segment import Piece, Segment

LAYERS = 6


class Watched(nn.Module):
    """Counts how many of the stack's inner values are alive."""

    def __init__(self, alive: weakref.WeakSet[Tensor], act: Callable[[Tensor], Tensor] = torch.exp) -> None:
        super().__init__()
        self.up, self.act, self.alive, self.most = nn.Linear(4, 4), act, alive, 0

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.up(x))
        self.alive.add(inner)
        self.most = max(self.most, len(self.alive))
        return x + inner * inner


class Stack(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.layers = nn.ModuleList(Watched(alive, **options) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()

    @property
    def most(self) -> int:
        return max(layer.most for layer in self.layers)


def segment_of(stack: nn.Module) -> Segment:
    return Segment([Piece(stack, ("x",), ("y",))], ["y"], GraphPool(RecordBackend()), torch.enable_grad)


def dry_run(stack: Stack) -> None:
    values = {"x": torch.ones(2, 4)}
    in_parts(blocks_of([stack]), lambda: segment_of(stack).dry_run(values))


def test_a_dry_run_holds_one_layers_values_at_a_time_and_leaves_the_model_as_it_was() -> None:
    whole, parts = Stack(), Stack()
    segment_of(whole).dry_run({"x": torch.ones(2, 4)})
    dry_run(parts)
    assert whole.most == LAYERS
    assert parts.most <= 2
    assert all("forward" not in vars(layer) for layer in parts.layers)


def test_what_a_graph_cannot_hold_is_still_found_by_operator_and_line() -> None:
    def reads_back(x: Tensor) -> Tensor:
        return x if x.detach().sum().item() > 0 else x.exp()

    with pytest.raises(GraphCaptureError, match="_local_scalar_dense") as found:
        dry_run(Stack(act=reads_back))
    assert "test_frugal.py" in found.value.where


def test_all_parameters_get_their_gradients() -> None:
    stack, sink = Stack(), Collect()
    segment = segment_of(stack)
    in_parts(blocks_of([stack]), lambda: segment._run_eagerly({"x": torch.ones(2, 4)}, sink))
    assert len(sink.parameters) == len(list(stack.parameters()))


def test_a_layer_that_computes_something_else_the_second_time_runs_once_more_as_it_is() -> None:
    calls = []

    def changing(x: Tensor) -> Tensor:
        calls.append(1)
        return x.exp().sin() if len(calls) <= LAYERS else x * 1

    dry_run(Stack(act=changing))
    assert len(calls) >= 2 * LAYERS


def test_a_forward_keeps_nothing() -> None:
    stack = Stack()
    forward_only(lambda: stack(torch.ones(2, 4)))
    assert stack.most <= 2


def test_a_forward_with_a_backward_inside_is_given_what_it_needs() -> None:
    def penalty() -> Tensor:
        x = torch.ones(3, requires_grad=True)
        return torch.autograd.grad(x.exp().sum(), x)[0]

    assert torch.equal(forward_only(penalty), torch.ones(3).exp())


def test_the_peak_that_a_capture_makes_torch_forget_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([70, 30, 90])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(peaks))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(cuda, "peaks_before", {})
    backend = object.__new__(cuda.CudaBackend)
    backend.device = torch.device("cuda", 1)
    backend.watch_peak()
    backend.watch_peak()
    assert cuda.peaks_before == {1: 70}
    assert backend.watch_peak()
    assert cuda.peaks_before == {1: 90}
