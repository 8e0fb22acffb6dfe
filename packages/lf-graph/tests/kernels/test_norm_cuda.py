"""The norms on a GPU: numbers at the widths of our models, bits, graphs, compilation."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_near, same_bits
from norm_cases import CASES, gradients, in_float64, inputs, run
from torch import Tensor

import lf_graph
from lf_graph.kernels import layer_norm_modulate, rms_norm
from lf_graph.kernels._choice import choices

pytestmark = pytest.mark.gpu

# q and k heads, vision tower, action head, language model, connector, the widest
SHAPES = ((4, 300, 16, 128), (6, 256, 1152), (16, 51, 1536), (4, 777, 2048), (2, 64, 4608), (3, 33, 8192))


def everything(case: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    leaves = inputs(case, shape, dtype)
    outputs = run(case, leaves, "auto")
    return *outputs, *gradients(outputs, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_float64(case: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = everything(case, shape, dtype)
    exact = in_float64(inputs(case, shape, dtype))
    outputs = run(case, exact, "plain")
    number = len(outputs)
    assert_near(found[:number], outputs, 2)
    assert_near(found[number:], gradients(outputs, exact), 4, floor=1.0)


def test_a_gpu_takes_the_kernels_by_itself() -> None:
    x = torch.randn(2, 64, device="cuda")
    assert same_bits([rms_norm(x)], [rms_norm(x, implementation="triton")])
    assert choices()["rms_norm"]["triton"] >= 1


@pytest.mark.parametrize("case", CASES)
def test_thirty_runs_give_the_same_bits(case: str) -> None:
    shape = (16, 51, 1536) if "modulate" in case else (4, 2048, 2048)
    expected = everything(case, shape, torch.bfloat16)
    for _ in range(30):
        assert same_bits(everything(case, shape, torch.bfloat16), expected)


@pytest.mark.parametrize("case", CASES)
def test_inside_a_captured_graph_it_gives_the_same_bits(case: str) -> None:
    leaves = inputs(case, (4, 37, 1152), torch.bfloat16)
    names = list(leaves)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return run(case, dict(zip(names, tensors, strict=True)), "triton")

    with lf_graph.capture(call, *leaves.values()) as captured:
        for seed in range(3):
            fresh = inputs(case, (4, 37, 1152), torch.bfloat16, seed)
            replayed, eager = captured(*fresh.values()), call(*fresh.values())
            assert same_bits(replayed, eager)
            assert same_bits(gradients(replayed, fresh), gradients(eager, fresh))


@pytest.mark.parametrize("case", CASES)
def test_compiled_whole_it_gives_the_same_bits(case: str) -> None:
    leaves = inputs(case, (2, 37, 1152), torch.bfloat16)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return run(case, dict(zip(leaves, tensors, strict=True)), "triton")

    torch._dynamo.reset()
    outputs, expected = torch.compile(call, fullgraph=True)(*leaves.values()), call(*leaves.values())
    assert same_bits(outputs, expected)
    assert same_bits(gradients(outputs, leaves), gradients(expected, leaves))


def test_rows_beyond_2_to_the_31_elements() -> None:
    """4.3 GB in, 4.3 GB out."""
    x = torch.ones(1 << 20, 2049, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.arange(2049, device="cuda") % 7 - 3.0
    y = rms_norm(x, eps=0.0)
    assert torch.equal(y[0], torch.ones_like(y[0]))
    assert torch.equal(y[-1], rms_norm(x[-1:].clone(), eps=0.0)[0])


def test_halves_of_one_projection_modulate_without_a_copy() -> None:
    x = torch.randn(16, 51, 1536, device="cuda", dtype=torch.bfloat16)
    projected = torch.randn(16, 1, 3072, device="cuda", dtype=torch.bfloat16)
    scale, shift = projected.chunk(2, dim=-1)
    layer_norm_modulate(x, shift, scale)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = layer_norm_modulate(x, shift, scale)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= y.numel() * 2 + 2 * 4 * 16 * 51 + 4096  # output and statistics
