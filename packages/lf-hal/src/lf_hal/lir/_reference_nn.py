"""The larger ops in plain numpy: attention, norms, convolution, pooling, upsampling, LSTM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lf_hal.lir.graph import Op

Array = NDArray[Any]
Arrays = Sequence[Array]


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True)) if x.shape[-1] else x
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def attention(op: Op, x: Arrays) -> Array:
    q, k, v, *mask = x
    repeat = q.shape[1] // k.shape[1]
    k, v = (np.repeat(t, repeat, axis=1) for t in (k, v))
    scores = (q @ k.swapaxes(-1, -2)) * q.dtype.type(op.get_float("scale"))
    seen = np.ones(scores.shape, np.bool_)
    if op.attr("causal"):
        seen = np.broadcast_to(np.tri(*scores.shape[-2:], dtype=np.bool_), scores.shape)
    elif mask and mask[0].dtype == np.bool_:
        seen = np.broadcast_to(mask[0], scores.shape)
    elif mask:
        scores = scores + mask[0]
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = e.sum(axis=-1, keepdims=True)
    out = (e / np.where(total == 0, 1, total)).astype(q.dtype) @ v
    return np.asarray(out)


def layer_norm(op: Op, x: Arrays) -> Array:
    centred = x[0] - x[0].mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    out = centred / np.sqrt(variance + x[0].dtype.type(op.get_float("eps")))
    for v, apply in zip(x[1:], (np.multiply, np.add), strict=False):
        out = apply(out, v)
    return np.asarray(out)


def rms_norm(op: Op, x: Arrays) -> Array:
    square = (x[0] * x[0]).mean(axis=-1, keepdims=True)
    out = x[0] / np.sqrt(square + x[0].dtype.type(op.get_float("eps")))
    return np.asarray(out * x[1] if len(x) > 1 else out)


def rope(x: Arrays) -> Array:
    t, cos, sin = x
    half = t.shape[-1] // 2
    if cos.shape[-1] == half:
        cos, sin = (np.concatenate((c, c), axis=-1) for c in (cos, sin))
    turned = np.concatenate((-t[..., half:], t[..., :half]), axis=-1)
    return np.asarray(t * cos + turned * sin)


def _windows(op: Op, x: Array, kernel: tuple[int, ...], dilation: tuple[int, ...], pad: float) -> Array:
    """[N, C, H', W', kh, kw]: the padded image under every position of the kernel."""
    (ph, pw), (sh, sw) = op.get_ints("padding"), op.get_ints("stride")
    x = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=pad)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    views = np.lib.stride_tricks.sliding_window_view(x, reach, axis=(2, 3))
    return views[:, :, ::sh, ::sw, :: dilation[0], :: dilation[1]]


def conv2d(op: Op, x: Array, w: Array) -> Array:
    groups = op.get_int("groups")
    windows = _windows(op, x, w.shape[2:], op.get_ints("dilation"), 0)
    n, c, h, wide = windows.shape[:4]
    parts = []
    for g in range(groups):
        mine = windows[:, g * (c // groups) : (g + 1) * (c // groups)]
        rows = mine.transpose(0, 2, 3, 1, 4, 5).reshape(n * h * wide, -1)
        some = w[g * (w.shape[0] // groups) : (g + 1) * (w.shape[0] // groups)]
        parts.append(rows @ some.reshape(some.shape[0], -1).T)
    return np.concatenate(parts, axis=1).reshape(n, h, wide, -1).transpose(0, 3, 1, 2)


def pool2d(op: Op, x: Array) -> Array:
    kernel = op.get_ints("kernel")
    if op.get_str("fn") == "max":
        return np.asarray(_windows(op, x, kernel, (1, 1), -np.inf).max(axis=(4, 5)))
    total = _windows(op, x, kernel, (1, 1), 0).sum(axis=(4, 5))
    if op.attr("count_padding"):
        return np.asarray(total / x.dtype.type(kernel[0] * kernel[1]))
    return np.asarray(total / _windows(op, np.ones_like(x), kernel, (1, 1), 0).sum(axis=(4, 5)))


def _places(size: int, target: int, align_corners: bool) -> tuple[Array, Array, Array]:
    """Lower and upper source index of each target pixel, and the weight of the upper one (float64)."""
    i = np.arange(target, dtype=np.float64)
    if align_corners:
        at = i * ((size - 1) / (target - 1)) if target > 1 else i * 0
    else:
        at = np.maximum((i + 0.5) * (size / target) - 0.5, 0)
    low = np.minimum(np.floor(at).astype(np.int64), size - 1)
    return low, np.minimum(low + 1, size - 1), at - low


def upsample(op: Op, x: Array) -> Array:
    height, width = op.get_ints("size")
    if op.get_str("fn") == "nearest":
        rows, columns = ((np.arange(t) * s) // t for t, s in ((height, x.shape[2]), (width, x.shape[3])))
        return x[:, :, rows][:, :, :, columns]
    align = bool(op.attr("align_corners"))
    low, high, share = _places(x.shape[2], height, align)
    share = share.astype(x.dtype)[:, None]
    x = x[:, :, low] * (1 - share) + x[:, :, high] * share
    low, high, share = _places(x.shape[3], width, align)
    share = share.astype(x.dtype)
    return np.asarray(x[..., low] * (1 - share) + x[..., high] * share)


def lstm_cell(x: Arrays) -> Array:
    given, h, c, w_ih, w_hh, *bias = x
    gates = given @ w_ih.T + h @ w_hh.T
    for b in bias:
        gates = gates + b
    i, f, g, o = np.split(gates, 4, axis=1)
    cell = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return np.stack((sigmoid(o) * np.tanh(cell), cell))
