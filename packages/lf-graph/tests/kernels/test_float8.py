"""float8_linear: kernels round as the plain twin does, products come near the exact ones, and layers can be swapped."""

from __future__ import annotations

import copy
import operator
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import sm90
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, same_bits
from kernel_checks import exact, with_gradients
from torch import Tensor, nn
from torch.fx import GraphModule

from lf_graph.kernels import Float8Linear, KernelUnavailableError, float8_linear, to_float8
from lf_graph.kernels import _float8_triton as kernels
from lf_graph.kernels._float8 import GRADIENTS, PLAIN, VALUES, scale_of

float8_linear_module = sys.modules["lf_graph.kernels._float8"]  # the package has the function of that name
# half a step of the fraction, relative: 2^-4 of e4m3, 2^-3 of e5m2; a sum of products with random signs loses less
STEP = {VALUES: 2.0**-4, GRADIENTS: 2.0**-3}
PARTS = {"plain": PLAIN, "triton": kernels.PARTS}


def test_an_import_brings_no_compiler_and_8_bits_come_on_first_use() -> None:
    program = """
import sys
import lf_graph, lf_graph.kernels as kernels
assert not {"torch._dynamo", "triton"} & set(sys.modules), sorted(sys.modules)
import lf_graph.kernels._float8
assert callable(kernels.float8_linear) and isinstance(kernels.Float8Linear, type) and kernels.to_float8
assert set(kernels.__all__) <= set(dir(kernels)) and not hasattr(kernels, "float16_linear")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def inputs(*batch: int, depth: int = 32, columns: int = 48) -> tuple[Tensor, Tensor]:
    x = torch.randn(*batch, depth, device=DEVICE).bfloat16().requires_grad_()
    return x, (torch.randn(columns, depth, device=DEVICE) * depth**-0.5).requires_grad_()


def ours(implementation: str, scaling: str) -> Callable[..., Tensor]:
    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return float8_linear(x, weight, bias, scaling=scaling, implementation=implementation)  # type: ignore[arg-type]

    return call


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def as_bytes(x: Tensor) -> Tensor:
    """8-bit values, all that is not a number as one."""
    return torch.where(x.float().isnan(), 255, x.contiguous().view(torch.uint8))


def spread_out(rows: int, columns: int) -> Tensor:
    """Magnitudes from 1e-6 to 100: normal, subnormal and too small for 8 bits."""
    return torch.randn(rows, columns, device=DEVICE) * torch.logspace(-6, 2, columns, device=DEVICE)


@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["random", "ties", "zero", "not a number", "transposed"])
def test_kernels_round_every_value_as_the_twin(dtype: torch.dtype, source: torch.dtype, kind: str) -> None:
    x = spread_out(21, 40)
    if kind == "ties":
        grid = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(dtype).float()
        grid = grid[grid.isfinite()].sort().values
        middle = torch.cat((grid, (grid[1:] + grid[:-1]) / 2, grid.new_zeros(1)))
        x = middle[: middle.numel() // 16 * 16].view(-1, 16)
    x = x.to(source)
    if kind == "zero":
        x.zero_()
    if kind == "not a number":
        x[3, 4], x[5] = float("nan"), 0
    if kind == "transposed":
        x = x.t()
    for of in ("by_tensor", "by_row"):
        found, expected = (getattr(PARTS[name], of)(x, dtype) for name in ("triton", "plain"))
        assert torch.equal(found.scale, expected.scale)
        assert torch.equal(as_bytes(found.values), as_bytes(expected.values))
        if expected.turned is not None:
            assert found.turned is not None
            assert torch.equal(as_bytes(found.turned), as_bytes(expected.turned))


@given(rows=st.integers(1, 70), columns=st.integers(1, 70), flipped=st.booleans())
@settings(max_examples=8, deadline=None)
def test_any_shape_is_rounded_as_by_the_twin(rows: int, columns: int, flipped: bool) -> None:
    x = spread_out(rows, columns)
    x = x.t() if flipped else x
    found, expected = kernels.PARTS.by_tensor(x, VALUES), PLAIN.by_tensor(x, VALUES)
    assert found.turned is not None
    assert expected.turned is not None
    assert found.scale == expected.scale
    assert same_bits([found.values, found.turned], [expected.values, expected.turned])
    found, expected = kernels.PARTS.by_row(x, VALUES), PLAIN.by_row(x, VALUES)
    assert same_bits([found.values, found.scale], [expected.values, expected.scale])


@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS])
def test_the_largest_value_becomes_the_largest_of_the_format(dtype: torch.dtype) -> None:
    x = torch.tensor([[1e-30, -3.0, 2.0], [0.0, 0.0, 0.0], [1e30, 1.0, -1e30]], device=DEVICE)
    rounded = PLAIN.by_row(x, dtype)
    assert rounded.values.float().abs().amax(dim=1).tolist() == [
        torch.finfo(dtype).max, 0.0, torch.finfo(dtype).max
    ]  # fmt: skip
    assert rounded.scale[1] == 1
    assert scale_of(torch.tensor(1e-37), dtype) == torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("implementation", ["plain", "triton"])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_values_and_gradients_come_near_the_exact_ones(scaling: str, implementation: str) -> None:
    x, weight = inputs(3, 17)
    bias = torch.randn(48, device=DEVICE, requires_grad=True)
    found = with_gradients(ours(implementation, scaling), x, weight, bias)
    expected = with_gradients(F.linear, *exact(x, weight, bias))
    assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    assert relative(found[0], expected[0]) < STEP[VALUES]
    assert relative(found[1], expected[1]) < STEP[GRADIENTS]
    assert relative(found[2], expected[2]) < (STEP[GRADIENTS] if scaling == "tensor" else 2**-7)
    assert relative(found[3], expected[3]) < 2**-7
    assert relative(found[0], expected[0]) > 2**-9  # it is 8 bits


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_kernels_and_twin_agree(scaling: str) -> None:
    given = inputs(5, 7)
    found = with_gradients(ours("triton", scaling), *given)
    for a, b in zip(found, with_gradients(ours("plain", scaling), *given), strict=True):
        assert relative(a, b) < 2**-8  # bfloat16 results


def test_one_scale_a_row_keeps_small_tokens_beside_large_ones() -> None:
    x, weight = inputs(32)
    with torch.no_grad():
        x[0] *= 1e6
    expected = F.linear(x.double(), weight.double())[1:]
    by_row, by_tensor = (ours("plain", s)(x, weight)[1:] for s in ("row", "tensor"))
    assert relative(by_row, expected) < STEP[VALUES]
    assert relative(by_tensor, expected) > 4 * STEP[VALUES]


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_what_is_not_a_number_reaches_the_result_of_its_row_only(scaling: str) -> None:
    x, weight = inputs(6)
    with torch.no_grad():
        x[2, 3] = float("nan")
    out = ours("plain", scaling)(x, weight)
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4, 5]].isfinite().all()


def test_only_8_bit_activations_are_kept_with_one_scale_a_tensor() -> None:
    x, weight = inputs(64)
    sizes: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def pack(t: Tensor) -> Tensor:
        sizes.append((t.dtype, tuple(t.shape)))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ours("plain", "tensor")(x, weight)
    assert (VALUES, (32, 64)) in sizes
    assert all(dtype == VALUES or shape == () for dtype, shape in sizes)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("count", [0, 1, 15])
def test_any_number_of_rows_works(count: int, scaling: str) -> None:
    x, weight = inputs(count)
    for implementation in ("plain", "triton"):
        out, to_x, to_weight = with_gradients(ours(implementation, scaling), x, weight)
        assert (out.shape, to_x.shape) == ((count, 48), (count, 32))
        assert bool(to_weight.any()) == bool(count)


def test_only_wanted_gradients_are_computed() -> None:
    x, weight = inputs(8)
    for scaling in ("tensor", "row"):
        expected = with_gradients(ours("triton", scaling), x, weight)
        assert same_bits(with_gradients(ours("triton", scaling), x, weight.detach()), expected[:2])
        assert same_bits(with_gradients(ours("triton", scaling), x.detach(), weight)[1:], expected[2:])


def test_calls_repeat_bit_for_bit() -> None:
    given = inputs(40)
    for scaling in ("tensor", "row"):
        first = with_gradients(ours("triton", scaling), *given)
        assert all(same_bits(with_gradients(ours("triton", scaling), *given), first) for _ in range(3))


def test_autocast_rounds_the_master_itself() -> None:
    x, weight = inputs(8)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = ours("plain", "tensor")(x.float(), weight)
    assert same_bits([out], [ours("plain", "tensor")(x, weight)])
    with pytest.raises(TypeError, match="use bfloat16 autocast"):
        ours("plain", "tensor")(x.float(), weight)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_in_compiled_code_it_stays_outside_and_computes_the_same(scaling: str) -> None:
    given = inputs(8)
    for implementation in ("plain", "triton"):
        fn = ours(implementation, scaling)
        compiled = torch.compile(fn, backend="aot_eager")
        assert same_bits(with_gradients(compiled, *given), with_gradients(fn, *given))


def test_compiled_code_around_it_holds_nothing_of_it() -> None:
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x, w: ours("plain", "tensor")(x, w) * 2, backend=keep)
    compiled(*inputs(8)).sum().backward()
    called = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert called == [operator.mul]


def test_operators_keep_their_promises_to_torch() -> None:
    for dtype in (VALUES, GRADIENTS):
        torch.library.opcheck(kernels.by_row, (spread_out(5, 7), dtype))
        torch.library.opcheck(kernels.by_tensor, (spread_out(5, 7), dtype))


def test_inputs_that_do_not_fit_are_refused() -> None:
    x, weight = inputs(4)
    with pytest.raises(ValueError, match="tensor or row"):
        ours("plain", "block")(x, weight)
    with pytest.raises(ValueError, match=r"must be \[\.\.\., K\] and \[N, K\]"):
        float8_linear(x[:, :16], weight)
    with pytest.raises(ValueError, match="multiples of 16"):
        float8_linear(x, weight[:40])
    with pytest.raises(ValueError, match="bias"):
        float8_linear(x, weight, torch.zeros(3))
    with pytest.raises(KernelUnavailableError, match="meta"):
        float8_linear(x.to("meta"), weight.to("meta"), implementation="triton")


# -- modules


def model() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 20))
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), inner).to(DEVICE)


def test_layers_are_swapped_under_their_names_and_share_their_parameters() -> None:
    net = model()
    before = dict(net.named_parameters())
    assert to_float8(net) == ("0", "2.0")
    assert [type(net[0]), type(net[2][0]), type(net[2][1])] == [Float8Linear, Float8Linear, nn.Linear]  # type: ignore[index]
    assert all(p is before[name] for name, p in net.named_parameters())
    assert net.state_dict().keys() == model().state_dict().keys()
    assert "scaling=tensor" in repr(net)


def test_a_filter_chooses_layers_and_the_scaling_is_kept() -> None:
    net = model()
    assert to_float8(net, lambda name, linear: linear.bias is None, scaling="row") == ("2.0",)
    assert net[2][0].scaling == "row"  # type: ignore[index]
    assert copy.deepcopy(net)[2][0].scaling == "row"  # type: ignore[index]


def test_a_layer_used_twice_stays_one() -> None:
    shared = nn.Linear(32, 32)
    net = nn.Sequential(shared, nn.Sequential(shared), nn.Linear(32, 32))
    net.eval()
    assert to_float8(net) == ("0", "2")
    assert net[0] is net[1][0]  # type: ignore[index]
    assert not net[0].training


def test_swaps_that_would_lose_something_are_refused_whole() -> None:
    net = model()
    net[2][0].register_forward_hook(lambda *args: None)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"2\.0 has hooks"):
        to_float8(net)
    assert type(net[0]) is nn.Linear
    with pytest.raises(ValueError, match=r"use Float8Linear\.of"):
        to_float8(nn.Linear(16, 16))
    with pytest.raises(ValueError, match="tensor or row"):
        to_float8(net, scaling="block")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiples of 16"):
        Float8Linear.of(nn.Linear(16, 20))


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_model_on_8_bits_learns(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_linear_module, "_parts", lambda *_: PLAIN)  # the interpreter takes a minute
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)).to(DEVICE)
    assert len(to_float8(net, scaling=scaling)) == 2  # type: ignore[arg-type]
    x = torch.randn(128, 32, device=DEVICE)
    y = torch.sin(x[:, :16] * 2)
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    for _ in range(60):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = (net(x).float() - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


def test_an_h200_converts_two_values_at_once() -> None:
    types = dict.fromkeys(("rows", "columns", "x_row", "count", "turned_rows"), "i32")
    types |= {"values": "*fp8e4nv", "turned": "*fp8e4nv", "scale": "*fp32", "partials": "*fp32"}
    constants = {"LIMIT": 448.0, "x_column": 1}
    module, options = "lf_graph.kernels._float8_triton", {"num_warps": 4}
    tiles = {
        "round_by_row": {"BLOCK_R": 4, "BLOCK_C": 512},
        "round_by_tensor": {"BLOCK_R": 64, "BLOCK_C": 64, "PARTIALS": 512},
    }
    for kernel, tile in tiles.items():
        ptx = sm90.ptx(module, kernel, types, {**constants, **tile}, options)
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
        assert "ld.global.v4" in ptx
