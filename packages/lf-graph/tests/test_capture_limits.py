"""capture: what is refused, failed captures, fallback, budget and end."""

from __future__ import annotations

import copy
import gc
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_cases import dropping, mlp, same_gradients, scaled, square, twins
from metered import MeteredBackend
from torch import Tensor, nn

from lf_graph import (
    AddressError,
    BudgetError,
    ClosedError,
    GraphCaptureError,
    GraphError,
    GraphPool,
    SignatureError,
    StaleReplayError,
    capture,
)
from lf_graph._recorder import RecordedGraph

# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(3), 2.0), r"args\[0\]: float32\[2\] on cpu -> float32\[3\] on cpu"),
        ((torch.ones(2, dtype=torch.float64), 2.0), r"float32\[2\] on cpu -> float64\[2\] on cpu"),
        ((torch.ones(2, requires_grad=True), 2.0), r"float32\[2\] on cpu -> float32\[2\] on cpu, grad"),
        ((torch.ones(2), 3.0), r"args\[1\]: 2.0 -> 3.0"),
        ((torch.ones(2), 2), r"args\[1\]: 2.0 -> 2"),
        ((torch.ones(2),), r"args\[1\]: given -> missing"),
    ],
)
def test_other_arguments_are_refused_old_to_new(args: tuple[Any, ...], message: str) -> None:
    graphed = capture(scaled, torch.ones(2), 2.0, name="scaled")
    with pytest.raises(SignatureError, match=message) as caught:
        graphed(*args)
    assert caught.value.name == "scaled"
    assert graphed(torch.ones(2), 2.0).tolist() == [2.0, 2.0]


def test_another_training_mode_is_refused() -> None:
    model = dropping()
    graphed = capture(model, torch.randn(4, 8))
    model.eval()
    with pytest.raises(SignatureError, match=r"training of a Dropout: True -> False"):
        graphed(torch.randn(4, 8))


def test_another_training_mode_of_a_submodule_is_refused() -> None:
    model = dropping()
    graphed = capture(model, torch.randn(4, 8))
    model[1].eval()
    with pytest.raises(SignatureError, match=r"another call: training of a Dropout: True -> False;"):
        graphed(torch.randn(4, 8))


def test_a_moved_parameter_is_refused() -> None:
    model = mlp()
    graphed = capture(model, torch.randn(4, 8))
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(AddressError, match=r"0\.weight lies elsewhere"):
        graphed(torch.randn(4, 8))


def test_new_values_in_place_are_used() -> None:
    ours, theirs = twins(mlp)
    graphed = capture(ours, torch.randn(4, 8))
    torch.manual_seed(9)
    other = mlp().state_dict()
    ours.load_state_dict(other)
    theirs.load_state_dict(other)
    x = torch.randn(4, 8)
    assert torch.equal(graphed(x), theirs(x))


def test_a_backward_after_the_next_forward_is_refused() -> None:
    graphed = capture(mlp(), torch.randn(4, 8))
    early = graphed(torch.randn(4, 8))
    late = graphed(torch.randn(4, 8))
    with pytest.raises(StaleReplayError, match="run each backward before the next forward"):
        early.sum().backward()
    late.sum().backward()


def test_captures_in_one_pool_take_turns() -> None:
    pool = GraphPool("cpu")
    a, b = (capture(mlp(), torch.randn(4, 8), pool=pool) for _ in range(2))
    first = a(torch.randn(4, 8))
    b(torch.randn(4, 8))
    with pytest.raises(StaleReplayError):
        first.sum().backward()


def test_a_function_that_returns_no_tensor_is_refused() -> None:
    with pytest.raises(GraphError, match="returned no tensor"):
        capture(lambda x: None, torch.ones(2))


def test_a_call_without_tensors_is_refused() -> None:
    with pytest.raises(GraphError, match="at least one tensor"):
        capture(lambda n: n, 3)


# -- failed captures --------------------------------------------------------------------------------------------------


class ReadsBack(nn.Module):
    """Cannot be captured: the third operator is a read-back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.linear = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.drop(self.norm(x)))
        return x * x.sum().item()


def living_graphs_and_tensors() -> list[RecordedGraph | Tensor]:
    gc.collect()
    return [o for o in gc.get_objects() if type(o) in (RecordedGraph, Tensor)]


def test_100_failed_captures_leave_nothing() -> None:
    """A7: pytorch#190308, each failed capture kept its pool until exit."""
    model = ReadsBack()
    model.linear.weight.grad = torch.ones(8, 8)
    before, position = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    known: list[Any] = []
    for i in range(100):
        with pytest.raises(GraphCaptureError):
            capture(model, x)
        if i == 0:
            # held on to, so that no newer one gets the address of one that went
            known = living_graphs_and_tensors()
    older = set(map(id, known))
    assert [o for o in living_graphs_and_tensors() if id(o) not in older] == []
    assert torch.equal(torch.get_rng_state(), position)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.linear.weight.grad.eq(1).all()
    assert model.linear.bias.grad is None


def test_a_failed_capture_names_operator_file_and_line() -> None:
    with pytest.raises(GraphCaptureError) as caught:
        capture(ReadsBack(), torch.randn(4, 8))
    line = ReadsBack.forward.__code__.co_firstlineno + 2
    assert caught.value.op == "aten._local_scalar_dense"
    assert caught.value.where == f"{__file__}:{line}"
    assert caught.value.fix


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda x: x[x > 0].sum(), "aten.nonzero|aten.index"),
        (lambda x: x * (1 if x.sum() > 0 else 2), "aten.is_nonzero|aten._local_scalar_dense"),
        (lambda x: x.nonzero().sum(), "aten.nonzero"),
        (lambda x: torch.unique(x), "aten._unique2"),
        (lambda x: torch.bincount(x.long()), "aten.bincount"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_by_name(fn: Any, op: str) -> None:
    with pytest.raises(GraphCaptureError, match=op):
        capture(fn, torch.ones(4))


def test_an_error_of_the_function_itself_is_raised_as_it_is() -> None:
    def broken(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        capture(broken, torch.ones(2), fallback="eager")


# -- fallback, budget, end --------------------------------------------------------------------------------------------


def test_a_fallback_runs_eagerly_counts_and_says_why() -> None:
    ours, theirs = twins(ReadsBack)
    graphed = capture(ours, torch.randn(4, 8), fallback="eager")
    assert "aten._local_scalar_dense" in graphed.reason
    x = torch.randn(3, 8)  # any arguments: there is no graph
    for run in (graphed, theirs):
        torch.manual_seed(0)
        run(x).sum().backward()
    same_gradients(ours, theirs)
    stats = graphed.stats()
    assert (stats.eager, stats.graphs, stats.reason) == (1, 0, graphed.reason)
    assert json.loads(stats.to_json())["reason"] == graphed.reason


def test_a_fallback_keeps_the_autocast() -> None:
    def fn(x: Tensor) -> Tensor:
        return F.linear(x, x) * x.sum().item()

    graphed = capture(
        fn, torch.ones(2, 2), fallback="eager", autocast=lambda: torch.autocast("cpu", torch.bfloat16)
    )
    assert graphed(torch.ones(2, 2)).dtype == torch.bfloat16


def test_a_capture_that_succeeds_has_no_reason_and_no_eager_calls() -> None:
    graphed = capture(square, torch.ones(2), fallback="eager")
    graphed(torch.ones(2))
    assert (graphed.reason, graphed.stats().eager, graphed.stats().reason) == ("", 0, "")


def test_an_unknown_fallback_is_refused() -> None:
    with pytest.raises(GraphError, match="fallback='silent'"):
        capture(square, torch.ones(2), fallback="silent")  # type: ignore[arg-type]


def test_a_capture_over_the_budget_is_refused_before_it_is_made() -> None:
    backend = MeteredBackend()
    backend.needs = 500
    pool = GraphPool(backend, max_bytes=400)
    with pytest.raises(BudgetError, match=r"square needs about 500 bytes.*of 400"):
        capture(square, torch.ones(2), pool=pool)
    assert backend.captures == 0
    assert capture(square, torch.ones(2), pool=pool, fallback="eager").reason.startswith("BudgetError")


def test_stats_count_what_happened() -> None:
    graphed = capture(mlp(), torch.randn(4, 8), name="mlp")
    for _ in range(3):
        graphed(torch.randn(4, 8)).sum().backward()
    stats = graphed.stats()
    assert (stats.name, stats.backend, stats.graphs, stats.captures) == ("mlp", "recorder", 2, 1)
    assert (stats.replays, stats.copies) == (6, 3)
    assert stats.operations > 6


def test_an_input_at_its_static_place_is_not_copied() -> None:
    graphed = capture(square, torch.ones(2))
    (place,) = graphed.static_inputs
    place.fill_(4)
    assert graphed(place).tolist() == [16.0, 16.0]
    assert graphed.stats().copies == 0


def test_use_after_close_is_refused_and_gradients_stay() -> None:
    model = mlp()
    with capture(model, torch.randn(4, 8)) as graphed:
        out = graphed(torch.randn(4, 8))
        out.sum().backward()
        pending = graphed(torch.randn(4, 8))
    with pytest.raises(ClosedError):
        graphed(torch.randn(4, 8))
    with pytest.raises(ClosedError):
        pending.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    graphed.close()
    assert graphed.stats().graphs == 0
