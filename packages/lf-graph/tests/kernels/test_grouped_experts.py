"""grouped_experts: one operator equals Mixtral's loop, forward and backward, and so does MoE on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from grouped_cases import Route, leaf, loop_experts, route
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, assert_near, same_bits
from kernel_checks import exact, with_gradients
from moe_cases import NoReadBack, plain_loop
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lf_graph import GraphError, MoE
from lf_graph.kernels import _grouped_gemm_launch as kernels
from lf_graph.kernels import grouped_experts
from lf_graph.kernels.swiglu import swiglu_value

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SLACK = 4  # roundings: gate and up, the hidden rows, their product, and the sum


def ours(r: Route, implementation: str) -> Callable[..., Tensor]:
    def call(x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor) -> Tensor:
        places = (r.offsets, r.tokens, r.rows)
        return grouped_experts(x, gate_up, down, weight, *places, implementation=implementation)  # type: ignore[arg-type]

    return call


def loop(r: Route) -> Callable[..., Tensor]:
    """Rows beyond the last expert are zero whatever their weight."""
    return lambda x, gate_up, down, weight: loop_experts(x, gate_up, down, weight, r)


def inputs(
    r: Route, hidden: int, ffn: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    experts, count = r.offsets.shape[0], r.rows.shape[0]
    weight = torch.rand(r.tokens.shape[0], device=DEVICE).requires_grad_()
    gate_up, down = leaf(experts, hidden, 2 * ffn, dtype=dtype), leaf(experts, ffn, hidden, dtype=dtype)
    return leaf(count, hidden, dtype=dtype), gate_up, down, weight


@pytest.mark.parametrize("implementation", ["triton", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_equal_the_loop(dtype: torch.dtype, implementation: str) -> None:
    r = route(40, 5, 2, dropped=0.2, idle=1)
    given = inputs(r, 24, 40, dtype)
    expected = with_gradients(loop(r), *exact(*given))
    *found, to_weight = with_gradients(ours(r, implementation), *given)
    # the gradient of the weight is fp32, and made of rounded rows
    assert_near([*found, to_weight.to(dtype)], expected, SLACK)


@given(
    count=st.integers(0, 36),
    experts=st.integers(1, 5),
    hidden=st.integers(1, 34),
    ffn=st.integers(1, 34),
    dropped=st.sampled_from([0.0, 0.5, 1.0]),
    data=st.data(),
)
@settings(max_examples=8, deadline=None)
def test_any_shape_equals_the_loop(
    count: int, experts: int, hidden: int, ffn: int, dropped: float, data: Any
) -> None:
    r = route(count, experts, data.draw(st.integers(1, experts)), dropped)
    given = inputs(r, hidden, ffn)
    expected = with_gradients(loop(r), *exact(*given))
    assert_near(with_gradients(ours(r, "triton"), *given), expected, SLACK)


@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_tokens_of_no_expert_may_hold_anything(implementation: str) -> None:
    r = route(30, 4, 2, dropped=0.4)
    x, gate_up, down, weight = inputs(r, 16, 24)
    kept = torch.zeros(30, dtype=torch.bool, device=DEVICE)
    kept[r.tokens[: int(r.offsets[-1])]] = True
    expected = with_gradients(ours(r, implementation), x, gate_up, down, weight)
    with torch.no_grad():
        x[~kept] = float("nan")
        weight[int(r.offsets[-1]) :] = float("nan")
    found = with_gradients(ours(r, implementation), x, gate_up, down, weight)
    assert not found[0][~kept].any()
    used = int(r.offsets[-1])
    assert same_bits(found[:4], expected[:4])
    assert same_bits([found[4][:used]], [expected[4][:used]])


def test_swiglu_behind_the_product_has_the_bits_of_the_two_kernels() -> None:
    r = route(40, 5, 2)
    x, gate_up, _, weight = (t.detach() for t in inputs(r, 48, 33, torch.bfloat16))
    product, hidden = kernels.product_swiglu(x, gate_up, weight, r.offsets, r.tokens)
    assert same_bits([product], [kernels.product(x, gate_up, r.offsets, r.tokens)])
    assert_near([hidden], [swiglu_value(*product.double().chunk(2, -1), weight.double())])


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    r = route(12, 3, 2)
    given = inputs(r, 8, 8)
    out = ours(r, "triton")(*given).square().sum()
    first = torch.autograd.grad(out, given, retain_graph=True)
    assert same_bits(first, torch.autograd.grad(out, given, retain_graph=True))
    assert same_bits(first, torch.autograd.grad(out, given))  # over gate and up


def in_columns(t: Tensor) -> Tensor:
    """The same numbers, not side by side."""
    return torch.stack((t.detach(), t.detach() * 0), 1)[:, 0].requires_grad_(t.requires_grad)


def test_lists_that_are_columns_of_others_are_read_as_such() -> None:
    r = route(20, 4, 2, dropped=0.2)
    *given, weight = inputs(r, 9, 8)
    apart = r._replace(tokens=in_columns(r.tokens), offsets=in_columns(r.offsets))
    found = with_gradients(ours(apart, "triton"), *given, in_columns(weight))
    assert same_bits(found, with_gradients(ours(r, "triton"), *given, weight))


def test_the_plain_twin_has_exact_gradients() -> None:
    r = route(5, 3, 2, dropped=0.2)
    shapes = [(5, 4), (3, 4, 6), (3, 3, 4), (10,)]
    given = [torch.rand(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    on_cpu = Route(*(t.cpu() for t in r))
    assert torch.autograd.gradcheck(ours(on_cpu, "plain"), given)


def test_compiled_whole_it_computes_the_same() -> None:
    r = route(20, 3, 2)
    given = inputs(r, 16, 24)
    for implementation in ("plain", "triton"):
        compiled = torch.compile(ours(r, implementation), fullgraph=True, backend="aot_eager")
        assert_near(with_gradients(compiled, *given), with_gradients(ours(r, implementation), *given), SLACK)


def test_fake_tensors_have_the_right_shapes() -> None:
    r = route(12, 3, 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, gate_up = (
            torch.empty(12, 8, device=DEVICE, requires_grad=True),
            torch.empty(3, 8, 12, device=DEVICE),
        )
        weight = torch.empty(24, device=DEVICE)
        ours(r, "triton")(x, gate_up, torch.empty(3, 6, 8, device=DEVICE), weight).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (12, 8)


def test_inputs_that_do_not_fit_are_refused() -> None:
    r = route(6, 3, 2)
    x, gate_up, down, weight = inputs(r, 8, 4)
    call = ours(r, "plain")
    with pytest.raises(ValueError, match=r"must be \[E, H, 2 F\] and \[E, F, H\]"):
        call(x, gate_up, down[:, :3], weight)
    with pytest.raises(TypeError, match="down torch"):
        call(x, gate_up, down.double(), weight)
    with pytest.raises(ValueError, match="weight is"):
        call(x, gate_up, down, weight[:5])
    with pytest.raises(ValueError, match="weight is"):
        call(x, gate_up, down, weight.double())


def moe(backend: str, **options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(24, 40, 6, 2, backend=backend, **options).to(DEVICE)


@pytest.mark.parametrize("padded", [False, True])
def test_moe_on_triton_equals_the_loop(padded: bool) -> None:
    layer, x = moe("triton"), leaf(50, 24)
    keep = torch.rand(50, device=DEVICE) < 0.7 if padded else None
    twin = moe("masked_dense").double()
    exact_x = x.detach().double().requires_grad_()
    found, expected = layer(x, keep).y, plain_loop(twin, exact_x, keep)
    upstream = torch.randn_like(expected)
    assert_near([found.detach()], [expected.detach()], SLACK)
    ours_all = torch.autograd.grad(found, [x, *layer.parameters()], upstream.float())
    loop_all = torch.autograd.grad(expected, [exact_x, *twin.parameters()], upstream)
    assert_near(ours_all, loop_all, 2 * SLACK)


def test_moe_on_triton_reads_nothing_back_and_copies_no_rows() -> None:
    layer, x = moe("triton"), leaf(50, 24)
    with NoReadBack() as seen:
        layer(x).y.sum().backward()
    assert not [s for op, s in seen.shapes if "index_select" in op and s == (100, 24)]


def test_moe_on_triton_runs_under_autocast_in_its_dtype() -> None:
    layer, x = moe("triton"), leaf(50, 24)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = layer(x).y
    assert out.dtype == torch.bfloat16
    assert_near([out.detach()], [layer(x).y.detach()], SLACK)


def test_moe_names_its_backend_and_refuses_what_it_cannot_run() -> None:
    layer = moe("triton")
    assert layer.expert_backend(DEVICE, torch.bfloat16).reason == "requested"
    with pytest.raises(GraphError, match="float64"):
        layer.double()(torch.randn(4, 24, dtype=torch.float64, device=DEVICE))
