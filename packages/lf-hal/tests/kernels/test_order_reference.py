"""The reference itself: its fma is exact, and its functions are what they are named after."""

from __future__ import annotations

import math
from fractions import Fraction

import kernel_cases as cases
import numpy as np
import order_v1 as order
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

f32 = np.float32
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def _round_to_binary32(value: Fraction) -> float:
    """Nearest binary32, ties to even, by integers alone."""
    if value == 0:
        return 0.0
    sign, value = (-1, -value) if value < 0 else (1, value)
    e = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** e > value:
        e -= 1
    quantum = Fraction(2) ** max(e - 23, -149)
    steps = value / quantum
    whole = steps.numerator // steps.denominator
    rest = steps - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    result = whole * quantum
    return sign * (math.inf if result >= Fraction(2) ** 128 else float(result))


@settings(max_examples=600, deadline=None)
@given(FLOATS, FLOATS, FLOATS)
@example(float.fromhex("0x1.000002p0"), float.fromhex("0x1.000002p0"), float.fromhex("-0x1p0"))
@example(float.fromhex("0x1.fffffep-100"), float.fromhex("0x1.8p-49"), float.fromhex("0x1p-149"))
@example(float.fromhex("0x1p-75"), float.fromhex("0x1p-75"), float.fromhex("0x1p0"))
@example(float.fromhex("0x1p-75"), float.fromhex("-0x1p-75"), float.fromhex("0x1.000002p0"))
@example(float.fromhex("0x1.fffffep127"), 2.0, float.fromhex("-0x1.fffffep127"))
def test_fma_rounds_the_exact_value_once(a: float, b: float, c: float) -> None:
    got = float(order.fma(f32(a), f32(b), f32(c)))
    assert got == _round_to_binary32(Fraction(a) * Fraction(b) + Fraction(c))


@settings(max_examples=400, deadline=None)
@given(
    st.integers(-(2**24), 2**24),
    st.integers(-(2**24), 2**24),
    st.integers(-(2**24), 2**24),
    st.integers(-30, 30),
)
def test_fma_is_exact_where_terms_cancel_or_tie(a: int, b: int, c: int, shift: int) -> None:
    x, y, z = (float(f32(v)) for v in (a, b, math.ldexp(c, shift)))
    assert float(order.fma(f32(x), f32(y), f32(z))) == _round_to_binary32(
        Fraction(x) * Fraction(y) + Fraction(z)
    )


@pytest.mark.parametrize("a", [0.0, -0.0, 1.0, -2.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("b", [0.0, -0.0, 1.0, -2.0, math.inf, math.nan])
@pytest.mark.parametrize("c", [0.0, -0.0, 2.0, math.inf, -math.inf, math.nan])
def test_fma_of_zeros_infinities_and_nan_is_that_of_binary64(a: float, b: float, c: float) -> None:
    with np.errstate(all="ignore"):
        expected = np.float64(a) * np.float64(b) + np.float64(c)  # exact for these values
        got = np.float64(order.fma(f32(a), f32(b), f32(c)))
    assert np.isnan(got) if np.isnan(expected) else (got, np.signbit(got)) == (expected, np.signbit(expected))


def _units(got: np.ndarray, exact: np.ndarray) -> float:
    """Largest error in units of the last place of the exact value, subnormals included."""
    quantum = np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 1e-300))) - 23), 2.0**-149)
    return float(np.max(np.abs(got.astype(np.float64) - exact) / quantum))


@pytest.mark.parametrize(
    ("name", "low", "high", "bound"),
    [
        ("exp", -103.0, 88.0, 1.5),
        ("log", 1e-38, 1e38, 1.5),
        ("tanh", -9.0, 9.0, 2.0),
        ("erf", -4.0, 4.0, 2.5),
        ("sigmoid", -80.0, 80.0, 3.0),
        ("sin", -1.5, 1.5, 1.5),
        ("cos", -1.5, 1.5, 1.5),
    ],
)
def test_functions_are_within_units_of_the_last_place(
    name: str, low: float, high: float, bound: float
) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(low, high, 20000).astype(f32)
    if name == "log":
        x = np.exp(rng.uniform(-87, 88, 20000)).astype(f32)
    exact = {
        "erf": lambda v: np.array([math.erf(t) for t in v]),
        "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    }.get(name, getattr(np, name, None))
    assert exact is not None
    with np.errstate(all="ignore"):
        assert _units(order.UNARY[name](x), exact(x.astype(np.float64))) <= bound


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_angles_of_any_size_are_right_to_the_last_bits(name: str) -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(-131072, 131072, 4000), 10.0 ** rng.uniform(5, 38, 2000)]).astype(f32)
    x = np.concatenate([x, -x, f32([131072, 131073, 3.4e38, 16367173 * 2.0**72])])
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workprec(400):
        exact = np.array([float(getattr(mpmath, name)(mpmath.mpf(float(v)))) for v in x])
    assert np.max(np.abs(order.UNARY[name](x).astype(np.float64) - exact)) <= 2.0**-23


def test_special_values_of_the_functions() -> None:
    inf, nan = math.inf, math.nan
    table = {
        "exp": [(-inf, 0.0), (inf, inf), (0.0, 1.0), (89.0, inf), (-104.0, 0.0)],
        "log": [(0.0, -inf), (-0.0, -inf), (-1.0, nan), (inf, inf), (1.0, 0.0)],
        "tanh": [(inf, 1.0), (-inf, -1.0), (-0.0, -0.0)],
        "erf": [(inf, 1.0), (-inf, -1.0), (-0.0, -0.0)],
        "relu": [(-0.0, 0.0), (-inf, 0.0), (inf, inf)],
        "sin": [(inf, nan), (-0.0, -0.0)],
        "sigmoid": [(-inf, 0.0), (inf, 1.0), (0.0, 0.5)],
    }
    with np.errstate(all="ignore"):
        for name, pairs in table.items():
            x, wanted = (np.array(v, f32) for v in zip(*pairs, strict=True))
            assert (order.canonical(order.UNARY[name](x)) == order.canonical(wanted)).all(), name
        for name, function in order.UNARY.items():
            assert np.isnan(function(np.array([nan], f32))).all(), name


def test_cases_hold_subnormals_and_special_values() -> None:
    assert (np.abs(cases.values("subnormal", 999)) < f32(2.0**-126)).mean() > 0.5
    special = cases.values("special", 9999)
    assert np.isnan(special).any()
    assert np.isinf(special).any()
    assert ((special == 0) & np.signbit(special)).any()
