"""x + gate * y on a GPU: numbers, bits, graphs, compilation."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_near, same_bits
from test_gated_residual import in_float64, leaves, results
from torch import Tensor

import lf_graph
from lf_graph.kernels import gated_residual

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 51, 1536), (4, 777, 2048), (2, 3, 8193), (300, 2, 70)])
@pytest.mark.parametrize("shared", [False, True])
def test_kernels_equal_float64(shape: tuple[int, ...], dtype: torch.dtype, shared: bool) -> None:
    tensors = leaves(shape, dtype, shared)
    assert_near(results(tensors, "auto"), results(in_float64(tensors), "plain"), 4, floor=1.0)


def test_thirty_runs_give_the_same_bits() -> None:
    expected = results(leaves((16, 51, 1536), torch.bfloat16), "triton")
    for _ in range(30):
        assert same_bits(results(leaves((16, 51, 1536), torch.bfloat16), "triton"), expected)


def call(*t: Tensor) -> Tensor:
    return gated_residual(*t, implementation="triton")


def test_inside_a_captured_graph_it_gives_the_same_bits() -> None:
    with lf_graph.capture(call, *leaves((4, 37, 1152), torch.bfloat16)) as captured:
        for seed in range(3):
            tensors = leaves((4, 37, 1152), torch.bfloat16, seed=seed)
            replayed, eager = captured(*tensors), call(*tensors)
            upstream = torch.randn_like(eager)
            assert same_bits([replayed], [eager])
            assert same_bits(
                torch.autograd.grad(replayed, tensors, upstream),
                torch.autograd.grad(eager, tensors, upstream),
            )


def test_compiled_whole_it_gives_the_same_bits() -> None:
    tensors = leaves((4, 37, 1152), torch.bfloat16)
    torch._dynamo.reset()
    out, expected = torch.compile(call, fullgraph=True)(*tensors), call(*tensors)
    upstream = torch.randn_like(out)
    assert same_bits([out], [expected])
    assert same_bits(
        torch.autograd.grad(out, tensors, upstream), torch.autograd.grad(expected, tensors, upstream)
    )
