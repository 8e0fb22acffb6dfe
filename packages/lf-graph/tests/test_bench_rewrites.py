"""The passes that put a GELU into the product before it, and products of one input together."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bench_modules import loaded
from torch import Tensor, nn

bench = pytest.fixture(scope="module")(loaded)


class Half(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.f1, self.f2 = nn.Linear(8, 24, bias=bias), nn.Linear(24, 8)

    def forward(self, x: Tensor, approximate: str = "tanh") -> Tensor:
        return x + self.f2(F.gelu(self.f1(x), approximate=approximate))


def compiled_calls(
    rewrites: Any, model: nn.Module, monkeypatch: pytest.MonkeyPatch, *args: Any
) -> tuple[Tensor, int]:
    """The compiled result, and how often the fused function was traced without a gradient."""
    calls: list[bool] = []
    own = torch._addmm_activation
    monkeypatch.setattr(torch, "_addmm_activation", lambda *a, **k: (calls.append(True), own(*a, **k))[1])
    torch._dynamo.reset()
    fast = torch.compile(
        model.forward,
        dynamic=False,
        options={"pre_grad_custom_pass": rewrites.GeluInProduct(), "fx_graph_cache": False},
    )
    return fast(*args), len(calls)


@pytest.mark.parametrize("autocast", [False, True])
def test_without_gradients_one_product_gives_what_two_steps_give(
    bench: Any, monkeypatch: pytest.MonkeyPatch, autocast: bool
) -> None:
    rewrites, model, x = importlib.import_module("rewrites"), Half(), torch.randn(2, 5, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result, calls = compiled_calls(rewrites, model, monkeypatch, x)
        expected = model(x)
    assert calls
    assert result.dtype is expected.dtype
    torch.testing.assert_close(
        result, expected, rtol=0, atol=2e-2 if autocast else 1e-3
    )  # CPUs take the erf form


def test_with_gradients_nothing_changes(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrites, model, x = importlib.import_module("rewrites"), Half(), torch.randn(2, 5, 8)
    result, calls = compiled_calls(rewrites, model, monkeypatch, x)
    assert not calls
    torch.testing.assert_close(result, model(x))
    result.sum().backward()
    assert model.f1.weight.grad is not None


@pytest.mark.parametrize("other", ["no bias", "erf"])
def test_other_layers_are_left_alone(bench: Any, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    rewrites, model, x = importlib.import_module("rewrites"), Half(bias=other != "no bias"), torch.randn(3, 8)
    with torch.no_grad():
        result, calls = compiled_calls(rewrites, model, monkeypatch, x, "none" if other == "erf" else "tanh")
        torch.testing.assert_close(result, model(x, "none" if other == "erf" else "tanh"))
    assert not calls


class Projections(nn.Module):
    def __init__(self, bias: bool, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({str(i): nn.Linear(8, w, bias=bias) for i, w in enumerate(widths)})
        self.other = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (*(part(x).relu() for part in self.parts.values()), self.other(y))


def count_products(rewrites: Any, model: nn.Module, *args: Tensor) -> tuple[tuple[Tensor, ...], list[int]]:
    """The compiled result, and how many outputs each product has that was put together."""
    widths: list[int] = []

    class Counting(rewrites.OneProductForOneInput):  # type: ignore[misc]
        def __call__(self, graph: torch.fx.Graph) -> None:
            super().__call__(graph)
            calls = [n for n in graph.nodes if n.target is rewrites.linears]
            widths.extend(sum(a.meta["example_value"].shape[0] for a in n.args[1:4]) for n in calls)

    torch._dynamo.reset()
    options = {"pre_grad_custom_pass": Counting(), "fx_graph_cache": False}
    return torch.compile(model.forward, dynamic=False, options=options)(*args), widths


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_products_of_one_input_become_one(bench: Any, bias: bool, gradients: bool) -> None:
    rewrites = importlib.import_module("rewrites")
    model, x, y = Projections(bias, (8, 8, 4)), torch.randn(2, 5, 8), torch.randn(3, 8)
    with torch.set_grad_enabled(gradients):
        results, widths = count_products(rewrites, model, x, y)
        expected = model(x, y)
    assert widths == [20]
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_wide_products_stay_apart(bench: Any) -> None:
    rewrites = importlib.import_module("rewrites")
    model, x = Projections(True, (24, 24, 24)), torch.randn(5, 8)
    with torch.no_grad():
        results, widths = count_products(rewrites, model, x, x + 1)
    assert widths == []
    assert [r.shape[-1] for r in results] == [24, 24, 24, 8]
