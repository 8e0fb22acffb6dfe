"""Grouped products and experts on a GPU: sizes of a model, repeated bits, CUDA graphs and the compiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from grouped_cases import Route, leaf, loop_experts, loop_product, offsets_of, route
from kernel_cases import assert_near, same_bits
from kernel_checks import exact, with_gradients
from moe_cases import plain_loop
from torch import Tensor

import lf_graph
from lf_graph import MoE
from lf_graph.kernels import grouped_experts, grouped_gemm

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def product(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return grouped_gemm(x, weights, offsets, implementation="triton")


def flipped(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return grouped_gemm(x, weights.transpose(1, 2), offsets, implementation="triton")


def experts(r: Route) -> Callable[..., Tensor]:
    def call(x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor) -> Tensor:
        return grouped_experts(x, gate_up, down, weight, r.offsets, r.tokens, r.rows, implementation="triton")

    return call


def inputs(r: Route, hidden: int, ffn: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = r.offsets.shape[0]
    gate_up, down = leaf(count, hidden, 2 * ffn, dtype=dtype), leaf(count, ffn, hidden, dtype=dtype)
    weight = torch.rand(r.tokens.shape[0], device="cuda").requires_grad_()
    return leaf(r.rows.shape[0], hidden, dtype=dtype), gate_up, down, weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(512, 256), (136, 72), (67, 35)])
@pytest.mark.parametrize("load", [(300, 0, 129, 700, 1), (40, 33, 64, 0, 3), (1000,)])
def test_values_and_gradients_equal_float64(
    load: tuple[int, ...], sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    offsets, (depth, columns) = offsets_of(*load), sizes
    x, weights = leaf(sum(load) + 50, depth, dtype=dtype), leaf(len(load), depth, columns, dtype=dtype)
    expected = with_gradients(loop_product, *exact(x, weights, offsets))
    assert_near(with_gradients(product, x, weights, offsets), expected, slack=2)
    stored = weights.detach().transpose(1, 2).contiguous().requires_grad_()
    found = with_gradients(flipped, x, stored, offsets)
    assert_near((*found[:2], found[2].transpose(1, 2)), expected, slack=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(512, 256), (100, 60)])
def test_experts_equal_float64(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    r = route(700, 8, 2, dropped=0.1, idle=1)
    given = inputs(r, *sizes, dtype)
    expected = with_gradients(lambda *a: loop_experts(*a, r), *exact(*given))
    *found, to_weight = with_gradients(experts(r), *given)
    assert_near([*found, to_weight.to(dtype)], expected, slack=4)


def test_thirty_calls_give_the_same_bits() -> None:
    r = route(4096, 32, 2)
    given = inputs(r, 1024, 512, torch.bfloat16)
    first = with_gradients(experts(r), *given)
    assert all(same_bits(with_gradients(experts(r), *given), first) for _ in range(30))


def test_a_replay_follows_offsets_that_change() -> None:
    """One graph for every load: offsets, tokens and rows are inputs of it."""

    def call(x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor, *places: Tensor) -> Tensor:
        return grouped_experts(x, gate_up, down, weight, *places, implementation="triton")

    routes = [
        route(256, 8, 2, dropped=d, seed=s, idle=i) for s, (d, i) in enumerate([(0, 0), (0.5, 3), (1, 0)])
    ]
    given = inputs(routes[0], 128, 64, torch.bfloat16)
    places = [(r.offsets, r.tokens, r.rows) for r in routes]
    captured = lf_graph.capture(call, *given, *places[0])
    for place in places:
        found = with_gradients(captured, *given, *place)
        assert same_bits(found, with_gradients(call, *given, *place))


def test_compiled_whole_it_computes_the_same() -> None:
    r = route(512, 8, 2)
    given = inputs(r, 256, 128, torch.bfloat16)
    compiled = torch.compile(experts(r), fullgraph=True)
    expected = with_gradients(lambda *a: loop_experts(*a, r), *exact(*given))
    *found, to_weight = with_gradients(compiled, *given)
    assert_near([*found, to_weight.bfloat16()], expected, slack=4)


def test_moe_on_triton_equals_the_loop_in_a_graph() -> None:
    torch.manual_seed(0)
    layer = MoE(256, 128, 8, 2, backend="triton").cuda()
    x = leaf(300, 256)
    captured = lf_graph.capture(lambda t: layer(t).y, x, modules=[layer])
    for _ in range(2):
        x = leaf(300, 256)
        assert_near([captured(x).detach()], [plain_loop(layer, x).detach().double()], slack=10)


def test_nothing_waits_for_the_device() -> None:
    torch.manual_seed(0)
    layer = MoE(256, 128, 8, 2, backend="triton").cuda()
    x = leaf(300, 256)
    layer(x).y.sum().backward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).y.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_weights_beyond_2_to_the_31_elements_are_addressed() -> None:
    count, depth, columns = 129, 4096, 4096
    weights = torch.empty(count, depth, columns, dtype=torch.bfloat16, device="cuda")
    weights[-1].normal_(std=depth**-0.5)
    x = leaf(64, depth, dtype=torch.bfloat16)
    offsets = torch.zeros(count, dtype=torch.int32, device="cuda")
    offsets[-1] = 64
    assert_near([product(x, weights, offsets).detach()], [x.detach().double() @ weights[-1].double()])
