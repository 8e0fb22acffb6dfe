"""Two devices are compared, never one with itself; types, bits, ULP and bounds are what they say."""

import json
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lf_hal import resolve_target
from lf_hal.consistency import Report, Run, check_consistency
from lf_hal.errors import ConsistencyError
from lf_hal.precision import precision_settings

f32 = np.float32


def compare(x: object, y: object, **more: object) -> Report:
    return check_consistency(Run("cpu:0", {"y": x}), Run("npu:0", {"y": y}), **more)  # type: ignore[arg-type]


def test_case_4_a_device_is_never_compared_with_itself() -> None:
    """As when an explicit npu fell back to the CPU, and a comparison of both compared the CPU with the CPU."""
    x = np.zeros(3, f32)
    with pytest.raises(ConsistencyError, match="both results are of cpu:0"):
        check_consistency(Run("cpu:0", {"y": x}), Run("cpu:0", {"y": x.copy()}))
    with pytest.raises(ConsistencyError, match="same array"):
        compare(x, x)

    def model(inputs: Mapping[str, object]) -> Mapping[str, object]:
        return inputs

    with pytest.raises(ConsistencyError, match="same object"):
        check_consistency(Run("cpu:0", model), Run("npu:0", model), {"x": x})


def test_equal_bits_are_consistent() -> None:
    x = np.array([1.5, -0.0, math.inf, 1e-42], f32)
    found = compare(x, x.copy())
    assert found.ok
    assert found.differences == ()
    assert found.compared == ("y",)
    assert found.devices == ("cpu:0", "npu:0")


def test_a_difference_is_counted_measured_and_placed() -> None:
    x = np.arange(12, dtype=f32).reshape(3, 4) + 1
    y = x.copy()
    y[1, 2] = np.nextafter(y[1, 2], f32(99))
    y[2, 0] = np.nextafter(np.nextafter(y[2, 0], f32(0)), f32(0))
    found = compare(x, y)
    (d,) = found.differences
    assert not found.ok
    assert (d.elements, d.differing, d.max_ulp, d.first) == (12, 2, 2, (1, 2))
    assert (d.a, d.b) == (7.0, float(y[1, 2]))
    assert d.bits == sum(
        int(a ^ b).bit_count() for a, b in zip(x.view("u4").flat, y.view("u4").flat, strict=True)
    )
    json.dumps(found.describe())


def test_all_nans_are_one_and_a_nan_beside_a_number_has_no_distance() -> None:
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(f32)
    assert compare(nans, nans[::-1].copy()).ok
    (d,) = compare(np.array([math.nan], f32), np.array([1], f32)).differences
    assert d.max_ulp is None


def test_zeros_of_both_signs_differ_by_a_bit_and_no_ulp() -> None:
    (d,) = compare(np.array([0.0], f32), np.array([-0.0], f32)).differences
    assert (d.bits, d.max_ulp) == (1, 0)


def test_ulp_counts_across_zero_and_up_to_infinity() -> None:
    tiny = f32(1e-45)
    (d,) = compare(np.array([tiny], f32), np.array([-tiny], f32)).differences
    assert d.max_ulp == 2
    (d,) = compare(np.array([np.finfo(f32).max], f32), np.array([math.inf], f32)).differences
    assert d.max_ulp == 1
    (d,) = compare(np.array([-math.inf]), np.array([math.inf])).differences
    assert d.max_ulp == 2 * (0x7FF << 52)


@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_ulp_is_the_number_of_steps_in_the_order_of_floats(a: float, b: float) -> None:
    def rank(x: float) -> int:
        bits = int(np.array(x, f32).view(np.uint32))
        return bits if bits < 1 << 31 else (1 << 31) - bits

    x, y = np.array([a], f32), np.array([b], f32)
    found = compare(x, y).differences
    assert (found[0].max_ulp if found else 0) == abs(rank(a) - rank(b))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8])
def test_integers_differ_by_their_difference(dtype: type) -> None:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    (d,) = compare(np.array([low, 5], dtype), np.array([high, 5], dtype)).differences
    assert (d.differing, d.max_ulp) == (1, int(high) - int(low))


def test_another_type_or_shape_is_a_problem_and_not_an_equality() -> None:
    """sglang #34861: a router's product came back in bf16 on an NPU."""
    found = compare(torch.ones(2, dtype=torch.bfloat16), torch.ones(2))
    assert not found.ok
    assert found.problems == ("y: cpu:0 gives bf16, npu:0 gives f32",)
    assert not compare(np.zeros(2, f32), np.zeros((1, 2), f32)).ok
    assert not compare(
        np.zeros(2, f32), np.zeros((1, 2), f32), mode="bound", reference=Run("ref", {"y": np.zeros(2)})
    ).ok


def test_bf16_and_half_have_their_own_bits() -> None:
    x = torch.tensor([1.0, 2.0, math.nan], dtype=torch.bfloat16)
    y = x.clone()
    y[1] = 2.0 + 2**-6
    (d,) = compare(x, y).differences
    assert (d.max_ulp, d.first) == (1, (1,))
    (d,) = compare(np.array([1], np.float16), np.array([1 + 2**-10], np.float16)).differences
    assert d.max_ulp == 1


def test_functions_get_the_inputs() -> None:
    a = Run("cpu:0", lambda inputs: {"y": inputs["x"] + 1})
    b = Run("loongarch64-lasx", lambda inputs: {"y": 1 + inputs["x"]})
    assert check_consistency(a, b, {"x": np.ones(3, f32)}).ok
    with pytest.raises(ConsistencyError, match="give it inputs"):
        check_consistency(a, b)
    with pytest.raises(ConsistencyError, match="returned a list"):
        check_consistency(Run("cpu:0", lambda _: []), b, {"x": np.ones(3, f32)})  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({"y": np.zeros(1)}, {"z": np.zeros(1)}, "y, z"),
        ({}, {}, "no outputs"),
        ({"y": np.array(["a"])}, {"y": np.array(["b"])}, "not compared"),
        ({"y": np.zeros(1, complex)}, {"y": np.zeros(1, complex)}, "not compared"),
    ],
)
def test_what_cannot_be_compared_is_an_error(a: dict[str, object], b: dict[str, object], said: str) -> None:
    with pytest.raises(ConsistencyError, match=said):
        check_consistency(Run("cpu:0", a), Run("npu:0", b))


def test_a_mode_nobody_knows_is_an_error() -> None:
    with pytest.raises(ConsistencyError, match="neither"):
        compare(np.zeros(1), np.zeros(1), mode="close")


def product(dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    source = np.random.default_rng(3)
    a, b = source.standard_normal((8, 512)), source.standard_normal((512, 8))
    a, b = a.astype(f32).astype(float), b.astype(f32).astype(float)
    rows = a.astype(dtype) @ b.astype(dtype)
    steps = np.zeros((8, 8), dtype)
    for k in range(512):
        steps += np.outer(a[:, k], b[k]).astype(dtype)
    return rows, steps, a @ b, np.abs(a) @ np.abs(b)


def test_two_orders_of_one_sum_lie_in_the_bound_and_a_wrong_term_does_not() -> None:
    rows, steps, exact, magnitude = product(np.float32)
    more = {
        "mode": "bound",
        "reference": Run("float64", {"y": exact}),
        "k": 512,
        "magnitude": {"y": magnitude},
    }
    found = compare(rows, steps, **more)
    assert found.ok
    assert found.differences[0].differing > 0  # the bits are others, which this mode does not mind
    assert {(b.device, b.name) for b in found.bounds} == {("cpu:0", "y"), ("npu:0", "y")}
    steps[3, 4] += 0.5
    found = compare(rows, steps, **more)
    assert not found.ok
    (outside,) = (b for b in found.bounds if b.worst > 1)
    assert (outside.device, outside.first) == ("npu:0", (3, 4))
    assert outside.error == pytest.approx(0.5, abs=1e-3)


def test_the_bound_is_that_of_the_type_of_the_result() -> None:
    rows, _, exact, _ = product(np.float32)
    halves = torch.from_numpy(rows).bfloat16()
    found = compare(rows, halves, mode="bound", reference=Run("float64", {"y": exact}), k={"y": 4})
    assert found.bounds[1].bound == found.bounds[0].bound * 2**16
    assert found.problems  # and the types are others


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_in_no_bound_unless_the_reference_is(bad: float) -> None:
    exact = np.array([1.0, 2.0])
    reference = Run("float64", {"y": exact})
    found = compare(np.array([1, 2], f32), np.array([1, bad], f32), mode="bound", reference=reference)
    assert not found.ok
    assert found.bounds[1].first == (1,)
    both = Run("float64", {"y": np.array([1.0, bad])})
    assert compare(np.array([1, bad], f32), np.array([1, bad], f32), mode="bound", reference=both).ok


def test_a_bound_needs_a_float64_reference_of_the_same_shape() -> None:
    x, y = np.zeros(2, f32), np.zeros(2, f32)
    for reference, said in [
        (None, "needs a reference"),
        (Run("r", {"z": np.zeros(2)}), "no output y"),
        (Run("r", {"y": np.zeros(2, f32)}), "compute it in float64"),
        (Run("r", {"y": np.zeros(3)}), "shape"),
    ]:
        with pytest.raises(ConsistencyError, match=said):
            compare(x, y, mode="bound", reference=reference)


@pytest.mark.parametrize(
    ("name", "value", "reduces"),
    [
        ("torch.backends.cuda.matmul.allow_tf32", True, True),
        ("torch.npu.matmul.allow_hf32", True, True),
        ("fp32_precision", "tf32", True),
        ("torch.backends.cuda.matmul.allow_tf32", False, False),
        ("threads", 8, False),
    ],
)
def test_tf32_and_hf32_are_named_and_have_no_exact_bits(name: str, value: object, reduces: bool) -> None:
    """pytorch #79270: they hide in float32 results."""
    x, y = np.ones(2, f32), np.ones(2, f32)
    a, b = Run("cpu:0", {"y": x}), Run("cuda:0", {"y": y}, {name: value})
    found = check_consistency(a, b)
    assert found.ok == (not reduces)
    assert any(name in problem and "cuda:0" in problem for problem in found.problems) == reduces
    loose = check_consistency(a, b, mode="bound", reference=Run("float64", {"y": np.ones(2)}))
    assert loose.ok
    assert bool(loose.notes) == reduces


def test_settings_of_torch_are_read_by_device_type() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for value in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = value
            assert precision_settings("cuda:0")["torch.backends.cuda.matmul.allow_tf32"] is value
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert precision_settings("cpu:0") == {}
    assert precision_settings("npu:0") == {}  # this torch has no npu


class Compiled:
    """Stands for two artefacts of one graph; the real ones are compared by the tests of the compiler."""

    def __init__(self, name: str) -> None:
        self.target = resolve_target(name)

    def run(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return {"y": inputs["x"] * f32(2)}


def test_compiled_models_are_compared_by_their_targets() -> None:
    a, b = Run.of(Compiled("x86-64-sse2")), Run.of(Compiled("loongarch64-lasx"))
    found = check_consistency(a, b, {"x": np.ones(3, f32)})
    assert found.ok
    assert found.devices == ("x86-64-sse2", "loongarch64-lasx")
    with pytest.raises(ConsistencyError, match="both results are of x86-64-sse2"):
        check_consistency(a, Run.of(Compiled("x86-64-sse2")), {"x": np.ones(3, f32)})
