"""x + gate * y: numbers, gradients, strides, dtypes, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, assert_near, distance, same_bits
from torch import Tensor

import lf_graph
from lf_graph.kernels import gated_residual
from lf_graph.kernels._gated_residual_triton import (
    GATED_BACKWARD,
    GATED_FORWARD,
    gated_residual_backward_op,
    gated_residual_op,
)
from lf_graph.kernels._tunable import Tunable

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1, 1, 1), (3, 19, 128), (2, 2, 3, 63), (2, 5, 1152), (50, 1, 5), (2, 2050), (2, 70, 64))


def leaves(shape: tuple[int, ...], dtype: torch.dtype, shared: bool = False, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (shape, shape, shape[-1:] if shared else (shape[0], shape[-1]))
    return [torch.randn(s, generator=generator).to(DEVICE, dtype).requires_grad_() for s in shapes]


def in_float64(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def results(tensors: list[Tensor], implementation: str) -> tuple[Tensor, ...]:
    """Output and gradients, from the same random one for every dtype."""
    out = gated_residual(*tensors, implementation=implementation)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return out, *torch.autograd.grad(out, tensors, upstream.to(out.device, out.dtype))


def assert_right(shape: tuple[int, ...], dtype: torch.dtype, shared: bool, seed: int = 0) -> None:
    tensors = leaves(shape, dtype, shared, seed)
    found = results(tensors, "triton")
    assert [f.dtype for f in found] == [dtype] * 4
    assert_near(found, results(in_float64(tensors), "plain"), 2, floor=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shared", [False, True])
def test_kernels_equal_float64(shape: tuple[int, ...], dtype: torch.dtype, shared: bool) -> None:
    assert_right(shape, dtype, shared)


@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 300)),
    dtype=st.sampled_from(DTYPES),
    shared=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_kernels_equal_float64_at_any_shape(
    shape: tuple[int, ...], dtype: torch.dtype, shared: bool, seed: int
) -> None:
    assert_right(shape, dtype, shared, seed)


@pytest.mark.parametrize("shared", [False, True])
def test_the_twin_is_the_formula_and_has_its_gradients(shared: bool) -> None:
    x, y, gate = leaves((2, 3, 5), torch.float64, shared)
    expected = x + (gate if shared else gate[:, None]) * y
    torch.testing.assert_close(gated_residual(x, y, gate, implementation="plain"), expected)
    assert torch.autograd.gradcheck(lambda *t: gated_residual(*t, implementation="plain"), (x, y, gate))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0)])
def test_nothing_gives_nothing_and_gradients_of_zero(shape: tuple[int, ...], shared: bool) -> None:
    tensors = leaves(shape, torch.float32, shared)
    out, *grads = results(tensors, "triton")
    assert out.shape == shape
    assert same_bits(grads, [torch.zeros_like(t) for t in tensors])


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_branch_and_stream_of_two_dtypes(dtypes: tuple[torch.dtype, ...], implementation: str) -> None:
    tensors = leaves((2, 9, 48), torch.bfloat16)
    tensors = [
        t.detach().to(d).requires_grad_() for t, d in zip(tensors, (*dtypes, torch.bfloat16), strict=True)
    ]
    found = results(tensors, implementation)
    assert [f.dtype for f in found] == [torch.float32, *dtypes, torch.bfloat16]
    assert_near(found, results(in_float64(tensors), "plain"), 2, floor=1.0)


def test_views_are_read_in_place_and_change_no_bit() -> None:
    base = torch.full((2, 6, 3, 64), float("nan"), device=DEVICE)
    views = base[:, :, 0], base[:, :, 2], torch.full((2, 1, 128), float("nan"), device=DEVICE).chunk(2, -1)[1]
    for v in views:
        v.normal_()
    strided = results([v.detach().requires_grad_() for v in views], "triton")
    dense = results([v.detach().clone().contiguous().requires_grad_() for v in views], "triton")
    assert same_bits(strided, dense)
    assert not any(t.isnan().any() for t in strided)


def test_a_frozen_gate_gets_no_gradient() -> None:
    x, y, gate = leaves((2, 3, 16), torch.float32)
    frozen = gate.detach()
    out = gated_residual(x, y, frozen, implementation="triton")
    dx, dy = torch.autograd.grad(out, (x, y), torch.ones_like(out))
    assert torch.equal(dx, torch.ones_like(x))
    assert torch.equal(dy, frozen[:, None].expand_as(y))


def test_gradients_repeat_bit_for_bit() -> None:
    expected = results(leaves((2, 70, 72), torch.bfloat16), "triton")
    assert all(same_bits(results(leaves((2, 70, 72), torch.bfloat16), "triton"), expected) for _ in range(3))


@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_under_autocast_the_stream_keeps_its_dtype(implementation: str) -> None:
    x, y, gate = leaves((2, 3, 16), torch.float32)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = gated_residual(x, y.bfloat16(), gate.bfloat16(), implementation=implementation)
    assert out.dtype == torch.float32
    assert distance(out, x + gate[:, None].bfloat16().float() * y.bfloat16().float()) < 1e-6


@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_compiled_whole_it_gives_the_same(implementation: str) -> None:
    tensors = leaves((2, 3, 16), torch.float32)
    torch._dynamo.reset()

    def call(*t: Tensor) -> Tensor:
        return gated_residual(*t, implementation=implementation)

    out = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    upstream = torch.randn_like(out)
    torch.testing.assert_close(out, call(*tensors))
    torch.testing.assert_close(
        torch.autograd.grad(out, tensors, upstream), torch.autograd.grad(call(*tensors), tensors, upstream)
    )


def test_a_dry_run_and_a_recorded_graph_know_the_operator() -> None:
    tensors = leaves((2, 5, 16), torch.float32)

    def call(*t: Tensor) -> Tensor:
        return gated_residual(*t, implementation="triton")

    assert lf_graph.check(call, *tensors).ok
    with lf_graph.capture(call, *tensors) as captured:
        replayed, eager = captured(*tensors), call(*tensors)
        upstream = torch.randn_like(eager)
        assert same_bits([replayed], [eager])
        assert same_bits(
            torch.autograd.grad(replayed, tensors, upstream), torch.autograd.grad(eager, tensors, upstream)
        )


@pytest.mark.parametrize("shared", [False, True])
def test_the_operators_keep_the_contract_of_torch(shared: bool) -> None:
    x, y, gate = leaves((2, 3, 16), torch.float32, shared)
    torch.library.opcheck(gated_residual_op, (x, y, gate))
    for wanted in (False, True):
        arguments = (torch.randn_like(x), y.detach(), gate.detach(), wanted)
        torch.library.opcheck(gated_residual_backward_op, arguments)


@pytest.mark.parametrize("tunable", [GATED_FORWARD, GATED_BACKWARD], ids=lambda t: t.name)
@pytest.mark.parametrize("key", [(48, "bfloat16"), (300, "float32"), (2, "float16")])
def test_every_launch_worth_trying_is_right(tunable: Tunable, key: tuple[int | str | bool, ...]) -> None:
    problem, candidates = tunable.problem(key, DEVICE), tunable.candidates(key)
    assert tunable.default(key) in candidates
    for config in {tunable.default(key), *candidates[:: max(1, len(candidates) // 4)]}:
        for out, expected, tolerance in zip(
            problem.run(config), problem.reference, problem.tolerance, strict=True
        ):
            assert distance(out, expected) <= tolerance, config


X = torch.zeros(2, 3, 8)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "integers": (lambda: gated_residual(X, X.int(), X[:, 0]), "y is torch.int32"),
    "another branch": (lambda: gated_residual(X, X[:1], X[:, 0]), r"y is \[1, 3, 8\]: \[2, 3, 8\]"),
    "a narrow gate": (lambda: gated_residual(X, X, torch.ones(7)), r"gate is \[7\]: \[8\]"),
    "a gate per token": (lambda: gated_residual(X, X, X), r"gate is \[2, 3, 8\]: \[2, 8\]"),
    "another device": (lambda: gated_residual(X, X, X[:, 0].to("meta")), "gate is on meta"),
    "no samples": (lambda: gated_residual(X[0, 0], X[0, 0], X[0, 0]), r"\[batch, ..., width\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_cause(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
