"""Element functions of order v1 (ORDER.md) in numpy: the bits of the kernels, whatever libm the host has.

Arrays are float32. Only + - * / and square root of IEEE arithmetic and integer operations occur; a fused multiply-add
is made exact in float64 by rounding to odd (Boldo and Melquiond, 2008).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BINARY", "UNARY", "fma"]

F = NDArray[np.float32]
f32 = np.float32
MAGIC = f32(12582912)
MAGIC_BITS = int(MAGIC.view(np.int32))
TWO_OVER_PI = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561


def fma(a: Any, b: Any, c: Any) -> F:
    """``a * b + c`` rounded once, with broadcasting."""
    product = np.float64(1) * np.asarray(a, f32) * np.asarray(b, f32)
    other = np.asarray(c, np.float64)
    total = np.asarray(product + other)
    part = total - product
    error = (product - (total - part)) + (other - part)
    even = np.atleast_1d(total).view(np.int64).reshape(total.shape) % 2 == 0
    inexact = np.isfinite(error) & (error != 0)
    odd = np.where(inexact & even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return np.asarray(odd.astype(f32))


def _horner(z: F, *coefficients: str) -> F:
    numbers = [f32(float.fromhex(c)) for c in coefficients]
    p = np.full(z.shape, numbers[-1], f32)
    for c in reversed(numbers[:-1]):
        p = fma(p, z, c)
    return p


def _hex(text: str) -> np.float32:
    return f32(float.fromhex(text))


def _bits(x: F) -> NDArray[np.int32]:
    return np.ascontiguousarray(x).view(np.int32).reshape(x.shape)


def _float(words: NDArray[Any]) -> F:
    return np.ascontiguousarray(words.astype(np.uint32)).view(f32).reshape(words.shape)


def exp(x: F) -> F:
    x = np.clip(x, f32(-104), f32(89))
    t = fma(x, _hex("0x1.715476p+0"), MAGIC)
    n, i = t - MAGIC, _bits(t).astype(np.int64) - MAGIC_BITS
    r = fma(n, _hex("0x1.bd0106p-13"), fma(n, _hex("-0x1.63p-1"), x))
    q = _horner(r, "0x1p-1", "0x1.55548ep-3", "0x1.55545ep-5", "0x1.123be0p-7", "0x1.6db4e6p-10")
    half = i >> 1
    return ((fma(q, r * r, r) + f32(1)) * _float(half + 127 << 23)) * _float(i - half + 127 << 23)


def log(x: F) -> F:
    small = x < _hex("0x1p-126")
    i = _bits(np.where(small, x * f32(2**23), x)).astype(np.int64) - 0x3F3504F3
    e = ((i >> 23) - 23 * small).astype(f32)
    f = _float((i & 0x7FFFFF) + 0x3F3504F3) - f32(1)
    z = f * f
    q = _horner(
        f,
        *("0x1.555546p-2", "-0x1.ffffecp-3", "0x1.99a588p-3", "-0x1.55634ep-3", "0x1.232d74p-3"),
        *("-0x1.fb2cb4p-4", "0x1.e68d5ep-4", "-0x1.e39202p-4", "0x1.1b847cp-4"),
    )
    w = fma(z, f32(-0.5), fma(e, _hex("-0x1.bd0106p-13"), (z * f) * q)) + f
    w = fma(e, _hex("0x1.63p-1"), w)
    w = np.where(x == 0, f32(-np.inf), np.where(x == np.inf, x, w))
    return np.where((x < 0) | np.isnan(x), f32(np.nan), w)


def tanh(x: F) -> F:
    a, z = np.abs(x), x * x
    q = _horner(z, "-0x1.555534p-2", "0x1.110768p-3", "-0x1.b84446p-5", "0x1.5256cap-6", "-0x1.76abe4p-8")
    far = f32(1) - f32(2) / (exp(a + a) + f32(1))
    return np.copysign(np.where(a < f32(0.625), fma(x * z, q, x), far), x)


def erf(x: F) -> F:
    a = np.abs(x)
    inner = (
        "0x1.20dd74p+0",
        "-0x1.8126d4p-2",
        "0x1.ce17a6p-4",
        "-0x1.b66324p-6",
        "0x1.464ff2p-8",
        "-0x1.365910p-11",
    )
    outer = (
        *("-0x1.77fc3ap-13", "0x1.212956p+0", "0x1.44403cp-1", "0x1.bbb6e4p-4", "-0x1.9c11fep-6"),
        *("0x1.1221fap-8", "-0x1.ca212ep-12", "0x1.657482p-16"),
    )
    far = f32(1) - exp(-_horner(np.where(a > f32(3.953125), f32(3.953125), a), *outer))
    return np.where(a < f32(0.9375), x * _horner(x * x, *inner), np.copysign(far, x))


def _large_angle(x: float) -> tuple[np.float32, int]:
    """What is left of a large finite angle after quarter turns, and their number: exact integers."""
    word = int(f32(abs(x)).view(np.uint32))
    mantissa, last = (word & 0x7FFFFF) | 0x800000, (word >> 23) - 150 + 94
    window = (TWO_OVER_PI >> 256 - last) & (1 << 96) - 1
    u = (mantissa * window) % (1 << 96) >> 32
    turns = (u >> 61) + 1 >> 1
    left = (u - (turns << 62)) % (1 << 64)
    left -= (left >> 63) << 64
    r = f32(np.int64(left)) * _hex("0x1.921fb6p-62")
    return (-r, -turns) if x < 0 else (r, turns)


def _turned(x: F, shift: int) -> F:
    t = fma(x, _hex("0x1.45f306p-1"), MAGIC)
    n, j = t - MAGIC, _bits(t).astype(np.int64) - MAGIC_BITS
    r = fma(n, _hex("0x1.777a5cp-25"), fma(n, _hex("-0x1.921fb6p+0"), x))
    r = np.array(fma(n, _hex("0x1.ee59dap-50"), r))
    for at in zip(*np.nonzero(~(np.abs(x) <= 131072)), strict=True):
        r[at], j[at] = _large_angle(float(x[at])) if np.isfinite(x[at]) else (f32(np.nan), 0)
    z = r * r
    s = fma(z * r, _horner(z, "-0x1.555556p-3", "0x1.111108p-7", "-0x1.a00f32p-13", "0x1.6cbeccp-19"), r)
    c = _horner(z, "0x1.555556p-5", "-0x1.6c16b8p-10", "0x1.a010c4p-16", "-0x1.2417dep-22")
    c = fma(z * z, c, fma(z, f32(-0.5), f32(1)))
    k = j + shift
    v = np.where(k & 1, c, s)
    return np.where(k & 2, -v, v)


def _pow(a: F, b: F) -> F:
    a, b = np.broadcast_arrays(a, b)
    w = exp(b * log(np.abs(a)))
    huge = np.abs(b) >= 2**24
    whole = np.where(huge | np.isnan(b), f32(0), b).astype(np.int64)
    integer, odd = huge | (whole == b), ~huge & (whole % 2 == 1)
    w = np.where(a < 0, np.where(integer, np.where(odd, -w, w), f32(np.nan)), w)
    one = f32(1)
    powers = (-0.5, one / np.sqrt(a)), (0.5, np.sqrt(a)), (-1, one / a), (3, (a * a) * a), (2, a * a), (1, a)
    for exponent, value in powers:
        w = np.where(b == exponent, value, w)
    return np.where(b == 0, one, w)


def _sigmoid(x: F) -> F:
    return np.asarray(f32(1) / (f32(1) + exp(-x)), f32)


def _silu(x: F) -> F:
    return x / (f32(1) + exp(-x))


def _gelu_tanh(x: F) -> F:
    u = fma((x * x) * x, _hex("0x1.6e4e26p-5"), x) * _hex("0x1.988454p+0")
    return x / (f32(1) + exp(-u))


UNARY: dict[str, Callable[[F], F]] = {
    "abs": np.abs,
    "cos": lambda x: _turned(x, 1),
    "erf": erf,
    "exp": exp,
    "gelu": lambda x: (x * f32(0.5)) * (f32(1) + erf(x * _hex("0x1.6a09e6p-1"))),
    "gelu_tanh": _gelu_tanh,
    "log": log,
    "neg": np.negative,
    "relu": lambda x: np.where(x <= 0, f32(0), x),
    "rsqrt": lambda x: np.asarray(f32(1) / np.sqrt(x), f32),
    "sigmoid": _sigmoid,
    "silu": _silu,
    "sin": lambda x: np.where(x == 0, x, _turned(x, 0)),
    "sqrt": np.sqrt,
    "tanh": tanh,
}
"""By the names of LIR."""

BINARY: dict[str, Callable[[F, F], F]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": _pow,
    "max": lambda a, b: np.where((b > a) | np.isnan(b), b, a),
    "min": lambda a, b: np.where((b < a) | np.isnan(b), b, a),
}
