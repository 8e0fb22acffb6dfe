"""Activations, grouped products and 8-bit layers inside graphs: replays have the bits of calls, whatever changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from grouped_cases import route
from kernel_cases import DEVICE, same_bits
from kernel_checks import with_gradients
from torch import Tensor

import lf_graph
from lf_graph import MoE
from lf_graph.kernels import float8_linear, gelu_tanh, grouped_experts, swiglu

SEED = torch.tensor([3, 4], device=DEVICE)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def experts(*inputs: Tensor) -> Tensor:
    return grouped_experts(*inputs, implementation="triton")


def routed(dropped: float, seed: int) -> tuple[Tensor, ...]:
    r = route(12, 3, 2, dropped=dropped, seed=seed)
    return leaf(12, 16), leaf(3, 16, 24), leaf(3, 12, 16), leaf(24), r.offsets, r.tokens, r.rows


def layers() -> list[tuple[Tensor, ...]]:
    """Activations a hundred times as large in the second call: scales are made anew."""
    small, large = (torch.randn(5, 16, device=DEVICE) * s for s in (1, 100))
    return [(x.bfloat16().requires_grad_(), leaf(32, 16)) for x in (small, large)]


CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], list[tuple[Tensor, ...]]]]] = {
    "swiglu": (
        lambda x, w: swiglu(x * 2, weight=w, implementation="triton"),
        lambda: [(leaf(4, 16), leaf(4)) for _ in range(3)],
    ),
    "swiglu over its inputs": (
        lambda x, w: swiglu(x * 2, weight=w, overwrite=True, implementation="triton"),
        lambda: [(leaf(4, 16), leaf(4)) for _ in range(3)],
    ),
    "gelu_tanh": (
        lambda x, b: gelu_tanh(x, b, dropout_p=0.3, seed=SEED, implementation="triton"),
        lambda: [(leaf(9, 16), leaf(16)) for _ in range(2)],
    ),
    "grouped_experts": (experts, lambda: [routed(0, 0), routed(0.5, 1), routed(1, 2)]),
    "float8 by tensor": (lambda x, w: float8_linear(x, w, implementation="triton"), layers),
    "float8 by row": (lambda x, w: float8_linear(x, w, scaling="row", implementation="triton"), layers),
}


@pytest.mark.parametrize("name", CASES)
def test_replays_have_the_bits_of_calls(name: str) -> None:
    fn, make = CASES[name]
    samples = make()
    captured = lf_graph.capture(fn, *samples[0])
    for sample in samples:
        assert same_bits(with_gradients(captured, *sample), with_gradients(fn, *sample))
    assert captured.stats().replays == 2 * len(samples)


def test_a_layer_of_experts_is_one_graph() -> None:
    torch.manual_seed(0)
    layer = MoE(16, 24, 4, 2, backend="triton").to(DEVICE)

    def call(x: Tensor) -> Any:
        return layer(x).y

    captured = lf_graph.capture(call, leaf(10, 16), modules=[layer])
    for _ in range(2):
        x = leaf(10, 16)
        assert same_bits(with_gradients(captured, x), with_gradients(call, x))
    assert captured.stats().graphs == 2  # forward and backward


def test_a_dry_run_finds_nothing_to_object_to() -> None:
    torch.manual_seed(0)
    layer = MoE(16, 24, 4, 2, backend="triton").to(DEVICE)
    found = lf_graph.check(
        lambda x: swiglu(layer(x).y, overwrite=True, implementation="triton"), leaf(10, 16)
    )
    assert "nothing found" in str(found)
