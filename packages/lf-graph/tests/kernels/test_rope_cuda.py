"""Rotary positions on a GPU: numbers, bits, graphs, compilation."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_near, same_bits
from test_rope import exact, heads, results, tables
from torch import Tensor

import lf_graph
from lf_graph.kernels import packed_positions, rope

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "kv", "half"),
    [
        ((8, 512, 16, 128), 8, 64),
        ((8, 512, 32, 64), 32, 32),
        ((4, 300, 16, 80), 4, 20),
        ((777, 3, 96), 1, 48),
    ],
)
@pytest.mark.parametrize("positions", [False, True])
def test_kernels_equal_float64(
    shape: tuple[int, ...], kv: int, half: int, positions: bool, dtype: torch.dtype
) -> None:
    q, k = heads(shape, kv, dtype)
    cos, sin = tables(1024, half)
    where = torch.randint(1024, shape[:-2], device="cuda") if positions else None
    assert_near(
        results(q, k, cos, sin, where, "auto"), results(*exact(q, k, cos, sin), where, "plain"), 1, floor=1.0
    )


def test_thirty_runs_give_the_same_bits() -> None:
    q, k = heads((8, 512, 16, 128), 8, torch.bfloat16)
    cos, sin = tables(512, 64)
    expected = results(q, k, cos, sin, None, "triton")
    for _ in range(30):
        assert same_bits(results(q, k, cos, sin, None, "triton"), expected)


def test_a_captured_graph_follows_lengths_in_device_memory() -> None:
    q, k = heads((96, 4, 64), 2, torch.bfloat16)
    cos, sin = tables(96, 32)

    def call(a: Tensor, b: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        return rope(a, b, cos, sin, packed_positions(cu_seqlens, 96), implementation="triton")

    starts = torch.tensor([0, 40, 90], device="cuda", dtype=torch.int32)
    with lf_graph.capture(call, q, k, starts) as captured:
        for first, last in ((40, 90), (1, 96), (90, 90)):
            cu_seqlens = torch.tensor([0, first, last], device="cuda", dtype=torch.int32)
            replayed, eager = captured(q, k, cu_seqlens), call(q, k, cu_seqlens)
            upstream = [torch.randn_like(e) for e in eager]
            assert same_bits(replayed, eager)
            assert same_bits(
                torch.autograd.grad(replayed, (q, k), upstream), torch.autograd.grad(eager, (q, k), upstream)
            )


def test_compiled_whole_it_gives_the_same_bits() -> None:
    q, k = heads((2, 37, 4, 64), 2, torch.bfloat16)
    cos, sin = tables(96, 32)
    positions = torch.randint(96, (2, 37), device="cuda")
    torch._dynamo.reset()

    def call(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return rope(a, b, cos, sin, positions, implementation="triton")

    outputs, eager = torch.compile(call, fullgraph=True)(q, k), call(q, k)
    upstream = [torch.randn_like(e) for e in eager]
    assert same_bits(outputs, eager)
    assert same_bits(
        torch.autograd.grad(outputs, (q, k), upstream), torch.autograd.grad(eager, (q, k), upstream)
    )
