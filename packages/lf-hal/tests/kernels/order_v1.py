"""Order of operations, version 1, in numpy: written from ORDER.md alone, a term at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

F = npt.NDArray[np.float32]
f32 = np.float32
LANES, CHUNK = 16, 128
MAGIC = f32(12582912.0)
MAGIC_BITS = MAGIC.view(np.int32)
NAN_BITS = 0x7FC00000


def h(text: str) -> np.float32:
    """A hexadecimal literal, which has to be exact."""
    value = f32(float.fromhex(text))
    if float(value) != float.fromhex(text):
        raise ValueError(f"{text} is no binary32 number")
    return value


def fma(a: Any, b: Any, c: Any) -> F:
    """``a * b + c`` rounded once. The product is exact in binary64; the sum is rounded to odd there, then to binary32.

    Proof that this is right: a value rounded to odd with p >= q + 2 bits rounds to q bits as the exact value does; here
    p = 53 and q <= 24. ``test_order_reference`` holds it to exact fractions.
    """
    a, b, c = (np.asarray(v, f32).astype(np.float64) for v in (a, b, c))
    product = a * b
    total = product + c
    part = total - product
    error = np.atleast_1d((product - (total - part)) + (c - part))
    word = np.atleast_1d(total).view(np.int64).copy()
    away = np.signbit(error) == np.signbit(np.atleast_1d(total))
    move = np.isfinite(error) & (error != 0) & (word % 2 == 0)
    word[move] += np.where(away, 1, -1)[move]
    return word.view(np.float64).astype(f32).reshape(np.shape(total))


def bits(x: F) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(x, f32).view(np.int32)


def power_of_two(n: npt.NDArray[np.int32]) -> F:
    return ((n.astype(np.int64) + 127) << 23).astype(np.uint32).view(f32)


def poly(z: F, *coefficients: str) -> F:
    p: Any = np.full(np.shape(z), h(coefficients[-1]), f32)
    for c in reversed(coefficients[:-1]):
        p = fma(p, z, h(c))
    return np.asarray(p, f32)


def with_sign(magnitude: F, x: F) -> F:
    return np.copysign(magnitude, x)


def exp(x: F) -> F:
    x = np.where(x > 89, f32(89), x)
    x = np.where(x < -104, f32(-104), x)
    t = fma(x, h("0x1.715476p+0"), MAGIC)
    n = t - MAGIC
    i = bits(t) - MAGIC_BITS
    r = fma(n, h("-0x1.63p-1"), x)
    r = fma(n, h("0x1.bd0106p-13"), r)
    q = poly(r, "0x1p-1", "0x1.55548ep-3", "0x1.55545ep-5", "0x1.123be0p-7", "0x1.6db4e6p-10")
    p = fma(q, r * r, r) + f32(1)
    half = i >> 1
    return (p * power_of_two(half)) * power_of_two(i - half)


def log(x: F) -> F:
    tiny = x < h("0x1p-126")
    y = np.where(tiny, x * h("0x1p+23"), x)
    i = bits(y) - np.int32(0x3F3504F3)
    e = ((i >> 23) + np.where(tiny, -23, 0)).astype(f32)
    f = ((i & 0x7FFFFF) + 0x3F3504F3).astype(np.int32).view(f32) - f32(1)
    z = f * f
    q = poly(
        f,
        *("0x1.555546p-2", "-0x1.ffffecp-3", "0x1.99a588p-3", "-0x1.55634ep-3", "0x1.232d74p-3"),
        *("-0x1.fb2cb4p-4", "0x1.e68d5ep-4", "-0x1.e39202p-4", "0x1.1b847cp-4"),
    )
    w = (z * f) * q
    w = fma(e, h("-0x1.bd0106p-13"), w)
    w = fma(z, f32(-0.5), w)
    w = w + f
    w = fma(e, h("0x1.63p-1"), w)
    w = np.where(x == np.inf, x, w)
    w = np.where(x == 0, f32(-np.inf), w)
    return np.where((x < 0) | np.isnan(x), f32(np.nan), w)


def tanh(x: F) -> F:
    a = np.abs(x)
    z = x * x
    q = poly(z, "-0x1.555534p-2", "0x1.110768p-3", "-0x1.b84446p-5", "0x1.5256cap-6", "-0x1.76abe4p-8")
    large = f32(1) - f32(2) / (exp(a + a) + f32(1))
    return with_sign(np.where(a < 0.625, fma(x * z, q, x), large), x)


def erf(x: F) -> F:
    a = np.abs(x)
    small = x * poly(
        x * x,
        *("0x1.20dd74p+0", "-0x1.8126d4p-2", "0x1.ce17a6p-4", "-0x1.b66324p-6", "0x1.464ff2p-8"),
        "-0x1.365910p-11",
    )
    b = np.where(a > 3.953125, f32(3.953125), a)
    g = poly(
        b,
        *("-0x1.77fc3ap-13", "0x1.212956p+0", "0x1.44403cp-1", "0x1.bbb6e4p-4", "-0x1.9c11fep-6"),
        *("0x1.1221fap-8", "-0x1.ca212ep-12", "0x1.657482p-16"),
    )
    return np.where(a < 0.9375, small, with_sign(f32(1) - exp(-g), x))


TWO_OVER_PI = int("a2f9836e4e441529fc2757d1f534ddc0db6295993c439041fe5163abdebbc561", 16)


def _quarter_turns(x: np.float32) -> tuple[np.float32, int]:
    """(r, j) of a large finite x, by exact integers."""
    word = int(abs(x).view(np.uint32))
    m, e = (word & 0x7FFFFF) | 0x800000, (word >> 23) - 150
    last = e + 94
    window = (TWO_OVER_PI >> (256 - last) if last <= 256 else 0) & ((1 << 96) - 1)
    u = ((m * window) % (1 << 96)) >> 32
    j = ((u >> 61) + 1) >> 1
    d = (u - (j << 62)) % (1 << 64)
    d = d - (1 << 64) if d >> 63 else d
    r = f32(np.int64(d)) * h("0x1.921fb6p-62")
    return (-r, -j) if x < 0 else (r, j)


def _sin_shifted(x: F, shift: int) -> F:
    t = fma(x, h("0x1.45f306p-1"), MAGIC)
    n = t - MAGIC
    j = (bits(t) - MAGIC_BITS).astype(np.int64)
    r = fma(n, h("-0x1.921fb6p+0"), x)
    r = fma(n, h("0x1.777a5cp-25"), r)
    r = np.array(fma(n, h("0x1.ee59dap-50"), r))
    for at in np.argwhere(~(np.abs(x) <= 131072)):
        where = tuple(at)
        r[where], j[where] = _quarter_turns(x[where]) if np.isfinite(x[where]) else (f32(np.nan), 0)
    z = r * r
    s = fma(z * r, poly(z, "-0x1.555556p-3", "0x1.111108p-7", "-0x1.a00f32p-13", "0x1.6cbeccp-19"), r)
    c = fma(
        z * z,
        poly(z, "0x1.555556p-5", "-0x1.6c16b8p-10", "0x1.a010c4p-16", "-0x1.2417dep-22"),
        fma(z, f32(-0.5), f32(1)),
    )
    k = (j + shift) % 4
    v = np.where(k % 2 == 1, c, s)
    return np.where(k >= 2, -v, v)


def relu(x: F) -> F:
    return np.where(x <= 0, f32(0), x)


def silu(x: F) -> F:
    return x / (f32(1) + exp(-x))


def gelu_tanh(x: F) -> F:
    u = fma((x * x) * x, h("0x1.6e4e26p-5"), x) * h("0x1.988454p+0")
    return x / (f32(1) + exp(-u))


def gelu_erf(x: F) -> F:
    return (x * f32(0.5)) * (f32(1) + erf(x * h("0x1.6a09e6p-1")))


UNARY: dict[str, Callable[[F], F]] = {
    "neg": lambda x: -x,
    "rsqrt": lambda x: f32(1) / np.sqrt(x),
    "sin": lambda x: np.where(x == 0, x, _sin_shifted(x, 0)),
    "cos": lambda x: _sin_shifted(x, 1),
    "tanh": tanh,
    "sigmoid": lambda x: f32(1) / (f32(1) + exp(-x)),
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "gelu_erf": gelu_erf,
    "relu": relu,
    "exp": exp,
    "erf": erf,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "log": log,
}
ACTS: list[Callable[[F], F]] = [lambda x: x, relu, silu, gelu_tanh, gelu_erf]


def _power(a: F, b: F) -> F:
    w = exp(b * log(np.abs(a)))
    large = np.abs(b) >= 2**24
    whole = np.where(large | np.isnan(b), f32(0), b).astype(np.int32)
    integer = large | (whole.astype(f32) == b)
    odd = ~large & (whole % 2 == 1)
    w = np.where(a < 0, np.where(integer, np.where(odd, -w, w), f32(np.nan)), w)
    special: list[tuple[float, F]] = [
        (-0.5, f32(1) / np.sqrt(a)),
        (0.5, np.sqrt(a)),
        (-1, f32(1) / a),
        (3, (a * a) * a),
        (2, a * a),
        (1, a),
        (0, np.ones_like(a)),
    ]
    for exponent, value in special:
        w = np.where(b == exponent, value, w)
    return w


def max_nan(m: F, x: F) -> F:
    return np.where((x > m) | np.isnan(x), x, m)


BINARY: dict[str, Callable[[F, F], F]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": _power,
    "maximum": max_nan,
    "minimum": lambda a, b: np.where((b < a) | np.isnan(b), b, a),
}


def product(a: F, b: F) -> F:
    """``a[M, K] @ b[K, N]``, every output by chunks of 128 terms."""
    m, k = a.shape
    total = np.zeros((m, b.shape[1]), f32)
    for begin in range(0, k, CHUNK):
        part = np.zeros_like(total)
        for i in range(begin, min(begin + CHUNK, k)):
            part = fma(a[:, i, None], b[None, i, :], part)
        total = part if begin == 0 else total + part
    return total


def epilogue(s: F, bias: F | None = None, scale: F | None = None, shift: F | None = None, act: int = 0) -> F:
    if bias is not None:
        s = s + bias
    if scale is not None:
        s = fma(s, scale, shift)
    return ACTS[act](s)


def conv2d(
    x: F, w: F, stride: tuple[int, int], pad: tuple[int, int], dilation: tuple[int, int], groups: int
) -> F:
    """x[B, H, W, C] and w[O, C / groups, kh, kw] to y[B, oh, ow, O]."""
    batch, height, width, _ = x.shape
    outputs, ci, k_h, k_w = w.shape
    padded = np.pad(x, ((0, 0), (pad[0], pad[0]), (pad[1], pad[1]), (0, 0)))
    out_h = (height + 2 * pad[0] - dilation[0] * (k_h - 1) - 1) // stride[0] + 1
    out_w = (width + 2 * pad[1] - dilation[1] * (k_w - 1) - 1) // stride[1] + 1
    share = outputs // groups
    y = np.zeros((batch, out_h, out_w, outputs), f32)
    for g in range(groups):
        columns = [
            padded[
                :,
                kh * dilation[0] : kh * dilation[0] + (out_h - 1) * stride[0] + 1 : stride[0],
                kw * dilation[1] : kw * dilation[1] + (out_w - 1) * stride[1] + 1 : stride[1],
                g * ci : (g + 1) * ci,
            ]
            for kh in range(k_h)
            for kw in range(k_w)
        ]
        a = np.concatenate(columns, -1).reshape(-1, k_h * k_w * ci)
        b = w[g * share : (g + 1) * share].transpose(2, 3, 1, 0).reshape(-1, share)
        y[..., g * share : (g + 1) * share] = product(a, b).reshape(batch, out_h, out_w, share)
    return y


def fold(rows: F, start: float, step: Callable[[F, F], F], join: Callable[[F, F], F]) -> F:
    """Reduces the last axis over 16 lanes."""
    lanes = np.full((*rows.shape[:-1], LANES), start, f32)
    for i in range(rows.shape[-1]):
        lanes[..., i % LANES] = step(lanes[..., i % LANES], rows[..., i])
    half = LANES // 2
    while half:
        lanes = join(lanes[..., :half], lanes[..., half : 2 * half])
        half //= 2
    return lanes[..., 0]


def _add(a: F, b: F) -> F:
    return a + b


def _larger(m: F, x: F) -> F:
    return np.where(x > m, x, m)


def row_sum(x: F) -> F:
    return fold(x, 0.0, _add, _add)


def row_squares(x: F) -> F:
    return fold(x, 0.0, lambda lane, d: fma(d, d, lane), _add)


def reduce(op: str, x: F) -> F:
    if op == "max":
        return fold(x, -np.inf, max_nan, max_nan)
    return row_sum(x) / f32(x.shape[-1]) if op == "mean" else row_sum(x)


def softmax(x: F) -> F:
    m = fold(x, -np.inf, _larger, _larger)
    e = exp(x - m[..., None])
    return e * (f32(1) / row_sum(e))[..., None]


def layer_norm(x: F, weight: F | None, bias: F | None, eps: np.float32) -> F:
    n = f32(x.shape[-1])
    d = x - (row_sum(x) / n)[..., None]
    t = d * (f32(1) / np.sqrt(row_squares(d) / n + eps))[..., None]
    if weight is not None:
        return t * weight if bias is None else fma(t, weight, bias)
    return t if bias is None else t + bias


def rms_norm(x: F, weight: F | None, eps: np.float32) -> F:
    t = x * (f32(1) / np.sqrt(row_squares(x) / f32(x.shape[-1]) + eps))[..., None]
    return t if weight is None else t * weight


def attention(
    q: F,
    k: F,
    v: F,
    scale: np.float32,
    causal: bool,
    q_offset: int,
    lengths: list[int] | None,
    mask: F | None,
) -> F:
    """q[B, H, T, D], k[B, G, S, D], v[B, G, S, V]; mask broadcasts to [B, H, T, S]."""
    batch, heads, length, _ = q.shape
    groups, keys, width = k.shape[1], k.shape[2], v.shape[3]
    y = np.zeros((batch, heads, length, width), f32)
    for b, head, t in np.ndindex(batch, heads, length):
        seen = min(keys, q_offset + t + 1) if causal else keys
        seen = max(0, seen if lengths is None else min(seen, lengths[b]))
        if seen == 0:
            continue
        g = head // (heads // groups)
        z = product(q[b, head, t : t + 1], k[b, g, :seen].T) * scale
        if mask is not None:
            z = z + np.broadcast_to(mask, (batch, heads, length, keys))[b, head, t, :seen]
        y[b, head, t] = product(softmax(z), v[b, g, :seen])[0]
    return y


def pool2d(op: str, x: F, kernel: int, stride: int, pad: int, count_pad: bool) -> F:
    """x[B, H, W, C], square windows."""
    batch, height, width, channels = x.shape
    out_h, out_w = (height + 2 * pad - kernel) // stride + 1, (width + 2 * pad - kernel) // stride + 1
    y = np.zeros((batch, out_h, out_w, channels), f32)
    for b, oy, ox in np.ndindex(batch, out_h, out_w):
        s = np.full(channels, -np.inf if op == "max" else 0.0, f32)
        taps = 0
        for kh, kw in np.ndindex(kernel, kernel):
            iy, ix = oy * stride - pad + kh, ox * stride - pad + kw
            if 0 <= iy < height and 0 <= ix < width:
                s = max_nan(s, x[b, iy, ix]) if op == "max" else s + x[b, iy, ix]
                taps += 1
        y[b, oy, ox] = s if op == "max" else s / f32(kernel * kernel if count_pad else taps)
    return y


def rope(x: F, cosine: F, sine: F, inner: int, length: int, interleaved: bool) -> F:
    rows, dim = x.shape
    y = np.empty_like(x)
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, None))
    )
    position = np.arange(rows) // inner % length
    c, s = cosine[position], sine[position]
    y[:, first] = fma(x[:, first], c, -(x[:, second] * s))
    y[:, second] = fma(x[:, second], c, x[:, first] * s)
    return y


def canonical(x: F) -> npt.NDArray[np.uint32]:
    """Bits with every NaN replaced by the one quiet NaN."""
    words = np.ascontiguousarray(x, f32).view(np.uint32).copy()
    words[np.isnan(x)] = NAN_BITS
    return words
