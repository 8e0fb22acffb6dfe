"""The pass that puts a GELU into the product before it."""

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
    epilogue: Any, model: nn.Module, monkeypatch: pytest.MonkeyPatch, *args: Any
) -> tuple[Tensor, int]:
    """The compiled result, and how often the fused function was traced without a gradient."""
    calls: list[bool] = []
    own = torch._addmm_activation
    monkeypatch.setattr(torch, "_addmm_activation", lambda *a, **k: (calls.append(True), own(*a, **k))[1])
    torch._dynamo.reset()
    fast = torch.compile(
        model.forward,
        dynamic=False,
        options={"pre_grad_custom_pass": epilogue.GeluInProduct(), "fx_graph_cache": False},
    )
    return fast(*args), len(calls)


@pytest.mark.parametrize("autocast", [False, True])
def test_without_gradients_one_product_gives_what_two_steps_give(
    bench: Any, monkeypatch: pytest.MonkeyPatch, autocast: bool
) -> None:
    epilogue, model, x = importlib.import_module("epilogue"), Half(), torch.randn(2, 5, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result, calls = compiled_calls(epilogue, model, monkeypatch, x)
        expected = model(x)
    assert calls
    assert result.dtype is expected.dtype
    torch.testing.assert_close(
        result, expected, rtol=0, atol=2e-2 if autocast else 1e-3
    )  # CPUs take the erf form


def test_with_gradients_nothing_changes(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    epilogue, model, x = importlib.import_module("epilogue"), Half(), torch.randn(2, 5, 8)
    result, calls = compiled_calls(epilogue, model, monkeypatch, x)
    assert not calls
    torch.testing.assert_close(result, model(x))
    result.sum().backward()
    assert model.f1.weight.grad is not None


@pytest.mark.parametrize("other", ["no bias", "erf"])
def test_other_layers_are_left_alone(bench: Any, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    epilogue, model, x = importlib.import_module("epilogue"), Half(bias=other != "no bias"), torch.randn(3, 8)
    with torch.no_grad():
        result, calls = compiled_calls(epilogue, model, monkeypatch, x, "none" if other == "erf" else "tanh")
        torch.testing.assert_close(result, model(x, "none" if other == "erf" else "tanh"))
    assert not calls
