"""swiglu: kernels and plain twin equal float64, whatever the shape, strides, dtype and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sm90
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, assert_near, same_bits
from kernel_checks import exact, with_gradients
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lf_graph.kernels import KernelUnavailableError, swiglu
from lf_graph.kernels import _swiglu_triton as kernels
from lf_graph.kernels._tunable import Config

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def by_torch(gate: Tensor, up: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    first, second = (gate, up) if up is not None else gate.chunk(2, dim=-1)
    out = F.silu(first) * second
    return out if weight is None else out * weight[..., None]


def ours(implementation: str, **options: Any) -> Callable[..., Tensor]:
    def call(gate: Tensor, up: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        return swiglu(gate, up, weight=weight, implementation=implementation, **options)  # type: ignore[arg-type]

    return call


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def inputs(rows: int, columns: int, dtype: torch.dtype, packed: bool, weighted: bool) -> tuple[Any, ...]:
    gate = leaf(rows, 2 * columns if packed else columns, dtype=dtype)
    return gate, None if packed else leaf(rows, columns, dtype=dtype), leaf(rows) if weighted else None


@pytest.mark.parametrize("implementation", ["triton", "plain"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_equal_float64(
    dtype: torch.dtype, packed: bool, weighted: bool, implementation: str
) -> None:
    given = inputs(5, 1030, dtype, packed, weighted)
    expected = with_gradients(by_torch, *exact(*given))
    assert_near(with_gradients(ours(implementation), *given), expected)


@given(
    rows=st.integers(0, 9),
    columns=st.one_of(st.integers(0, 40), st.sampled_from([1023, 1024, 1025])),
    dtype=st.sampled_from(DTYPES),
    packed=st.booleans(),
    weighted=st.booleans(),
    overwrite=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_equals_float64(
    rows: int, columns: int, dtype: torch.dtype, packed: bool, weighted: bool, overwrite: bool
) -> None:
    given = inputs(rows, columns, dtype, packed, weighted)
    expected = with_gradients(by_torch, *exact(*given))
    fresh = [None if t is None else t.detach().clone().requires_grad_() for t in given]
    assert_near(with_gradients(ours("triton", overwrite=overwrite), *fresh), expected)


def test_halves_of_a_packed_tensor_and_transposed_inputs_give_the_same() -> None:
    packed = leaf(3, 4, 2 * 33)
    expected = with_gradients(ours("triton"), packed)
    found = with_gradients(lambda x: swiglu(*x.chunk(2, -1), implementation="triton"), packed)
    assert same_bits(found, expected)
    columns_first = packed.detach().mT.contiguous().mT.requires_grad_()
    assert same_bits(with_gradients(ours("triton"), columns_first), expected)


def test_weights_that_are_a_column_of_others_are_read_as_such() -> None:
    gate, up, column = leaf(7, 33), leaf(7, 33), leaf(7, 3).detach()[:, 1].requires_grad_()
    alone = column.detach().clone().requires_grad_()
    found = with_gradients(ours("triton"), gate, up, column)
    assert same_bits(found, with_gradients(ours("triton"), gate, up, alone))


def test_rows_of_more_dimensions_are_rows() -> None:
    gate, up, weight = leaf(2, 3, 4, 7), leaf(2, 3, 4, 7), leaf(2, 3, 4)
    assert_near(
        with_gradients(ours("triton"), gate, up, weight),
        with_gradients(by_torch, *exact(gate, up, weight)),
    )
    one = leaf(6)
    assert_near(with_gradients(ours("triton"), one), with_gradients(by_torch, *exact(one)))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_launch_changes_the_gradient_of_the_weight_alone(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(3, 300, torch.float32, False, weighted)
    expected = with_gradients(ours("triton"), *given)
    monkeypatch.setattr(kernels, "config_of", lambda *_: Config((("BLOCK", 128),), 1))
    found = with_gradients(ours("triton"), *given)
    assert same_bits(found[:3], expected[:3])
    assert_near(found[3:], expected[3:])


def test_overwriting_puts_the_gradients_where_the_halves_were() -> None:
    source = leaf(6, 2 * 50)
    expected = with_gradients(ours("triton"), source)[1]
    packed = source * 1
    (grad,) = torch.autograd.grad(
        swiglu(packed, overwrite=True, implementation="triton"), packed, _upstream(6, 50)
    )
    assert grad.data_ptr() == packed.data_ptr()
    assert torch.equal(packed, expected)


def _upstream(*shape: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return drawn.bfloat16().float().to(DEVICE)


def test_a_second_backward_over_overwritten_halves_is_an_error() -> None:
    packed = leaf(6, 2 * 50) * 1
    out = swiglu(packed, overwrite=True, implementation="triton").sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("kind", ["one tensor twice", "expanded", "transposed"])
def test_what_cannot_be_overwritten_gets_fresh_gradients(kind: str) -> None:
    source = leaf(4, 8)
    made: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "one tensor twice": lambda x: (x, x),
        "expanded": lambda x: (x[:1].expand(4, 8), x[1:2].expand(4, 8)),
        "transposed": lambda x: (x.mT[:, :2], x.mT[:, 2:]),
    }
    expected = with_gradients(lambda x: by_torch(*made[kind](x)), *exact(source))
    found = with_gradients(
        lambda x: swiglu(*made[kind](x * 1), overwrite=True, implementation="triton"), source
    )
    assert_near(found, expected)


def test_the_plain_twin_has_exact_gradients() -> None:
    gate, up = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours("plain"), (gate, up, weight))
    assert torch.autograd.gradcheck(ours("plain"), (gate,))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter's numpy
def test_large_gates_do_not_overflow() -> None:
    gate = torch.tensor([[-1e30, -100.0, 0.0, 100.0, 1e30]], device=DEVICE, requires_grad=True)
    up = torch.ones(1, 5, device=DEVICE, requires_grad=True)
    out, to_gate, to_up = with_gradients(ours("triton"), gate, up)
    assert out.tolist() == [[0.0, pytest.approx(0, abs=1e-30), 0.0, 100.0, pytest.approx(1e30)]]
    assert to_gate.isfinite().all()
    assert to_up.isfinite().all()


def test_calls_repeat_bit_for_bit() -> None:
    given = inputs(7, 60, torch.bfloat16, True, True)
    first = with_gradients(ours("triton"), *given)
    assert all(same_bits(with_gradients(ours("triton"), *given), first) for _ in range(5))


def test_autocast_changes_nothing() -> None:
    given = inputs(3, 20, torch.float32, True, True)
    expected = with_gradients(ours("triton"), *given)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert same_bits(with_gradients(ours("triton"), *given), expected)


def test_compiled_whole_it_computes_the_same() -> None:
    given = inputs(4, 24, torch.float32, True, True)
    for implementation in ("plain", "triton"):
        fn = torch.compile(ours(implementation), fullgraph=True, backend="aot_eager")
        assert_near(with_gradients(fn, *given), with_gradients(ours("plain"), *given))


def test_operators_keep_their_promises_to_torch() -> None:
    gate, up, weight = inputs(3, 6, torch.float32, False, True)
    for sample, columns in [((gate, up, weight), 6), ((leaf(3, 6), None, None), 3)]:
        torch.library.opcheck(kernels.forward, sample)
        detached = (None if t is None else t.detach() for t in sample)
        torch.library.opcheck(kernels.backward, (torch.ones(3, columns, device=DEVICE), *detached))


def test_meta_and_fake_tensors_have_the_right_shapes() -> None:
    assert swiglu(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 4)
    with FakeTensorMode():
        x = torch.empty(2, 8, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        out = swiglu(x, weight=torch.empty(2, device=DEVICE), implementation="triton")
        out.sum().backward()
        assert out.shape == (2, 4)
        assert x.grad is not None


def test_inputs_that_do_not_fit_are_refused() -> None:
    x = torch.randn(2, 6)
    with pytest.raises(ValueError, match="does not hold gate and up"):
        swiglu(x[:, :5])
    with pytest.raises(ValueError, match="must be one shape"):
        swiglu(x, x[:1])
    with pytest.raises(TypeError, match="gate is"):
        swiglu(x, x.double())
    with pytest.raises(ValueError, match="weight"):
        swiglu(x, weight=torch.ones(3))
    with pytest.raises(TypeError, match=r"weight must be torch\.float32"):
        swiglu(x, weight=torch.ones(2, dtype=torch.float64))
    with pytest.raises(TypeError, match="floats"):
        swiglu(torch.ones(2, 6, dtype=torch.int32))
    with pytest.raises(KernelUnavailableError, match="float64"):
        swiglu(x.double(), implementation="triton")


def test_accesses_are_16_bytes_wide_on_an_h200() -> None:
    sizes = dict.fromkeys(("columns", "gate_stride", "up_stride", "grad_stride"), "i32")
    sizes |= dict.fromkeys(("grad_gate_stride", "grad_up_stride"), "i32")
    constants, options = {"WEIGHTED": False, "BLOCK": 1024}, {"num_warps": 4}
    module = "lf_graph.kernels._swiglu_triton"
    forward = sm90.ptx(module, "swiglu_forward", sizes, constants, options)
    backward = sm90.ptx(module, "swiglu_backward", sizes, constants, options)
    wide = (forward.count("ld.global.v4"), forward.count("st.global.v4"))
    assert wide == (2, 1)
    assert (backward.count("ld.global.v4"), backward.count("st.global.v4")) == (3, 2)
