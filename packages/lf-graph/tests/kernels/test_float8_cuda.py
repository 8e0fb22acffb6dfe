"""float8_linear on a GPU with 8-bit products: cuBLASLt's and CUTLASS's, graphs, the compiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import same_bits
from kernel_checks import exact, with_gradients
from torch import Tensor, nn

import lf_graph
from lf_graph.kernels import _float8_triton as kernels
from lf_graph.kernels import float8_linear, to_float8
from lf_graph.kernels._float8 import GRADIENTS, PLAIN, VALUES

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _eight_bits() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with 8-bit products: sm_89 or later")


def ours(scaling: str, implementation: str = "triton") -> Callable[..., Tensor]:
    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return float8_linear(x, weight, bias, scaling=scaling, implementation=implementation)  # type: ignore[arg-type]

    return call


def inputs(rows: int, depth: int, columns: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, depth, device="cuda").bfloat16().requires_grad_()
    return x, (torch.randn(columns, depth, device="cuda") * depth**-0.5).requires_grad_()


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS])
@pytest.mark.parametrize("shape", [(1000, 2048), (4097, 33), (1, 5632)])
def test_kernels_round_every_value_as_the_twin(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape, device="cuda") * torch.logspace(-6, 2, shape[1], device="cuda")).bfloat16()
    for t in (x, x.t()):
        found, expected = kernels.PARTS.by_tensor(t, dtype), PLAIN.by_tensor(t, dtype)
        assert found.scale == expected.scale
        assert found.turned is not None
        assert expected.turned is not None
        assert same_bits([found.values, found.turned], [expected.values, expected.turned])
        found, expected = kernels.PARTS.by_row(t, dtype), PLAIN.by_row(t, dtype)
        assert same_bits([found.values, found.scale], [expected.values, expected.scale])


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("sizes", [(816, 1536, 6144), (17, 64, 48), (1, 2048, 2048), (4096, 2048, 5632)])
def test_values_and_gradients_come_near_the_twin_and_the_exact_ones(
    sizes: tuple[int, int, int], scaling: str
) -> None:
    given = inputs(*sizes)
    found, twin = with_gradients(ours(scaling), *given), with_gradients(ours(scaling, "plain"), *given)
    expected = with_gradients(F.linear, *exact(*given))
    for a, b, e in zip(found, twin, expected, strict=True):
        assert relative(a, b) < 1e-2  # bfloat16 results, and shorter sums in the forward
        assert relative(a, e) < 2**-3


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_thirty_calls_give_the_same_bits(scaling: str) -> None:
    given = inputs(816, 1536, 1536)
    first = with_gradients(ours(scaling), *given)
    assert all(same_bits(with_gradients(ours(scaling), *given), first) for _ in range(30))


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_graph_computes_the_same_and_scales_anew(scaling: str) -> None:
    samples = [inputs(256, 512, 512) for _ in range(2)]
    with torch.no_grad():
        samples[1][0].mul_(100)
    captured = lf_graph.capture(ours(scaling), *samples[0])
    for given in samples:
        assert same_bits(with_gradients(captured, *given), with_gradients(ours(scaling), *given))


def test_float32_matrices_which_triton_turns_wrongly_are_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        kernels.PARTS.by_tensor(torch.randn(64, 64, device="cuda"), VALUES)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_in_compiled_code_it_stays_outside_and_computes_the_same(scaling: str) -> None:
    given = inputs(256, 512, 1024)
    compiled = torch.compile(ours(scaling))
    for a, b in zip(with_gradients(compiled, *given), with_gradients(ours(scaling), *given), strict=True):
        assert relative(a, b) < 1e-2


def test_nothing_waits_for_the_device() -> None:
    net = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).cuda()
    assert len(to_float8(net)) == 2
    x = torch.randn(64, 512, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            net(x).float().square().mean().backward()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
