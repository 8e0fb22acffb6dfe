"""swiglu on a GPU: sizes of a model, repeated bits, CUDA graphs and the compiler."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_near, same_bits
from kernel_checks import exact, with_gradients
from torch import Tensor

import lf_graph
from lf_graph.kernels import _swiglu_triton as kernels
from lf_graph.kernels import swiglu

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def call(gate: Tensor, up: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    return swiglu(gate, up, weight=weight, implementation="triton")


def plain(gate: Tensor, up: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    return swiglu(gate, up, weight=weight, implementation="plain")


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(512, 5632), (4096, 1024), (3, 1), (7, 12289), (2, 300, 2048)])
def test_values_and_gradients_equal_float64(
    shape: tuple[int, ...], weighted: bool, dtype: torch.dtype
) -> None:
    weight = leaf(*shape[:-1]) if weighted else None
    halves = (leaf(*shape, dtype=dtype), leaf(*shape, dtype=dtype), weight)
    assert_near(with_gradients(call, *halves), with_gradients(plain, *exact(*halves)))
    packed = (leaf(*shape[:-1], 2 * shape[-1], dtype=dtype), None, weight)
    assert_near(with_gradients(call, *packed), with_gradients(plain, *exact(*packed)))


def test_thirty_calls_give_the_same_bits() -> None:
    given = (leaf(4096, 2 * 1024, dtype=torch.bfloat16), None, leaf(4096))
    first = with_gradients(call, *given)
    assert all(same_bits(with_gradients(call, *given), first) for _ in range(30))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_graph_computes_the_same(overwrite: bool) -> None:
    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        return swiglu(x * 2, weight=weight, overwrite=overwrite, implementation="triton")

    samples = [(leaf(128, 2 * 512, dtype=torch.bfloat16), leaf(128)) for _ in range(3)]
    captured = lf_graph.capture(scaled, *samples[0])
    for given in samples:
        assert same_bits(with_gradients(captured, *given), with_gradients(scaled, *given))


def test_compiled_whole_it_computes_the_same() -> None:
    given = (leaf(256, 2 * 1024, dtype=torch.bfloat16), None, leaf(256))
    compiled = torch.compile(call, fullgraph=True)
    assert_near(with_gradients(compiled, *given), with_gradients(plain, *exact(*given)))


def test_more_than_2_to_the_31_elements_are_addressed() -> None:
    rows, columns = 2**17 + 1, 2**13
    packed = torch.empty(rows, 2 * columns, dtype=torch.bfloat16, device="cuda")
    packed[-1] = 1.0
    last = packed[-1:].clone()
    assert torch.equal(call(packed)[-1:], call(last))
    grad = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    grad[-1] = 1.0
    assert torch.equal(
        kernels.backward(grad, packed, None, None)[0][-1:], kernels.backward(grad[-1:], last, None, None)[0]
    )
