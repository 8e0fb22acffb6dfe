"""Matrix products, attention, norms, convolution, pooling, upsampling."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from lf_hal.lir._lower import Call, lower
from lf_hal.lir.graph import Value

EPSILON = {"f32": 2.0**-23, "bf16": 2.0**-7, "f16": 2.0**-10}


@lower("linear.default")
def _linear(c: Call) -> Value:
    return c.emit("linear", c.value("input"), c.value("weight"), *c.optional("bias"))


@lower("matmul.default", "mm.default", "bmm.default")
def _matmul(c: Call) -> Value:
    x, y = c.value(), c.args["other"] if "other" in c.args else c.args["mat2"]
    if len(x.type.shape) == 1:
        x = c.reshape(x, (1, *x.type.shape))
    if len(y.type.shape) == 1:
        y = c.reshape(y, (*y.type.shape, 1))
    return c.reshape(c.emit("matmul", x, y), c.shape)


@lower("addmm.default", "baddbmm.default")
def _addmm(c: Call) -> Value:
    c.need(c.get("beta", 1) == 1 and c.get("alpha", 1) == 1, "alpha or beta other than 1")
    x, y = (c.value(a) if a in c.args else c.value(b) for a, b in (("mat1", "batch1"), ("mat2", "batch2")))
    return c.emit("binary", c.emit("matmul", x, y), c.value(), fn="add")


@lower("outer.default")
def _outer(c: Call) -> Value:
    x = c.reshape(c.cast(c.value(), c.dtype), (*c.value().type.shape, 1))
    return c.emit("binary", x, c.cast(c.value("vec2"), c.dtype), fn="mul")


@lower("scaled_dot_product_attention.default")
def _attention(c: Call) -> Value:
    c.need(c.get("dropout_p", 0.0) == 0, "dropout in training: call .eval() first")
    qkv = [c.value(n) for n in ("query", "key", "value")]
    width = qkv[0].type.shape[-1]
    scale = float(c.get("scale", width**-0.5))
    missing = 4 - len(c.shape)
    c.need(missing >= 0, f"{len(c.shape)} axes")
    qkv = [c.reshape(t, (1,) * (4 - len(t.type.shape)) + t.type.shape) for t in qkv]
    batch, heads = qkv[0].type.shape[:2]
    for i in (1, 2):
        b, h, *rest = qkv[i].type.shape
        wanted = heads if h == 1 and not c.get("enable_gqa", False) else h
        qkv[i] = c.broadcast(qkv[i], (batch if b == 1 else b, wanted, *rest))
    out = c.emit(
        "attention", *qkv, *c.optional("attn_mask"), causal=bool(c.get("is_causal", False)), scale=scale
    )
    return c.reshape(out, c.shape)


def _norm(c: Call, kind: str, shape: Sequence[int], vectors: list[Value], eps: float) -> Value:
    x = c.value("input")
    size = prod(shape)
    flat = c.flat_tail(x, len(shape))
    out = c.emit(kind, flat, *(c.reshape(v, (size,)) for v in vectors), eps=eps)
    return c.reshape(out, x.type.shape)


@lower("layer_norm.default")
def _layer_norm(c: Call) -> Value:
    shape, weight, bias = c.args["normalized_shape"], c.get("weight"), c.get("bias")
    if weight is None and bias is not None:
        weight = c.fill(bias.type.dtype, shape, 1)
    return _norm(
        c, "layer_norm", shape, [v for v in (weight, bias) if v is not None], float(c.get("eps", 1e-5))
    )


@lower("rms_norm.default")
def _rms_norm(c: Call) -> Value:
    x = c.value("input")
    eps = float(c.get("eps", EPSILON.get(x.type.dtype, 0.0)))
    return _norm(c, "rms_norm", c.args["normalized_shape"], c.optional("weight"), eps)


@lower("batch_norm.default")
def _batch_norm(c: Call) -> Value:
    c.need(not c.get("training", False), "batch norm in training: call .eval() first")
    x = c.value("input")
    channels = x.type.shape[1]
    ones, zeros = (
        c.constant(x.type.dtype, (channels,), (number,) * channels) if c.get(name) is None else c.value(name)
        for name, number in (("weight", 1.0), ("bias", 0.0))
    )
    moments = [c.value("running_mean"), c.value("running_var")]
    return c.emit("batch_norm", x, ones, zeros, *moments, eps=float(c.args["eps"]))


def _pair(c: Call, given: object) -> tuple[int, int]:
    """One number for both, or two; torch writes either."""
    values = [given] if isinstance(given, int) else list(given)  # type: ignore[call-overload]
    c.need(len(values) in (1, 2), f"{values} where two numbers should be")
    return int(values[0]), int(values[-1])


@lower("conv2d.default", "conv2d.padding")
def _conv2d(c: Call) -> Value:
    x, w = c.value("input"), c.value("weight")
    stride, dilation = _pair(c, c.get("stride", 1)), _pair(c, c.get("dilation", 1))
    given = c.get("padding", 0)
    if given == "valid":
        given = 0
    elif given == "same":
        total = [d * (k - 1) for d, k in zip(dilation, w.type.shape[2:], strict=True)]
        c.need(all(n % 2 == 0 for n in total), "padding 'same' that is uneven")
        given = [n // 2 for n in total]
    images = x if len(x.type.shape) == 4 else c.reshape(x, (1, *x.type.shape))
    out = c.emit(
        "conv2d",
        images,
        w,
        *c.optional("bias"),
        stride=stride,
        padding=_pair(c, given),
        dilation=dilation,
        groups=int(c.get("groups", 1)),
    )
    return c.reshape(out, c.shape)


def _pool(c: Call, fn: str, count_padding: bool) -> Value:
    x = c.value()
    c.need(_pair(c, c.get("dilation", 1)) == (1, 1), "dilation other than 1")
    c.need(not c.get("ceil_mode", False), "ceil_mode")
    c.need(c.get("divisor_override") is None, "divisor_override")
    kernel = _pair(c, c.args["kernel_size"])
    images = x if len(x.type.shape) == 4 else c.reshape(x, (1, *x.type.shape))
    out = c.emit(
        "pool2d",
        images,
        fn=fn,
        kernel=kernel,
        stride=_pair(c, c.get("stride") or kernel),
        padding=_pair(c, c.get("padding", 0)),
        count_padding=count_padding,
    )
    return c.reshape(out, c.shape)


@lower("max_pool2d.default")
def _max_pool2d(c: Call) -> Value:
    return _pool(c, "max", False)


@lower("avg_pool2d.default")
def _avg_pool2d(c: Call) -> Value:
    return _pool(c, "avg", bool(c.get("count_include_pad", True)))


@lower("adaptive_avg_pool2d.default")
def _adaptive_avg_pool2d(c: Call) -> Value:
    x = c.value()
    size, target = x.type.shape[-2:], c.shape[-2:]
    if target == (1, 1):
        rank = len(x.type.shape)
        return c.emit("reduce", x, fn="mean", axes=(rank - 2, rank - 1), keepdim=True)
    c.need(
        all(n % t == 0 for n, t in zip(size, target, strict=True)), f"from {size} to {target}, no multiple"
    )
    kernel = (size[0] // target[0], size[1] // target[1])
    return c.emit("pool2d", x, fn="avg", kernel=kernel, stride=kernel)


def _same_pixels(size: int, target: int, factor: float | None) -> bool:
    """Whether torch, which multiplies in float32, takes the pixels floor(i * size / target)."""
    step = np.float32(1 / factor) if factor is not None else np.float32(size) / np.float32(target)
    i = np.arange(target)
    theirs = np.minimum(np.floor(i.astype(np.float32) * step).astype(np.int64), size - 1)
    return np.array_equal(theirs, i * size // target)


def _upsample(c: Call, fn: str, align_corners: bool) -> Value:
    x = c.args["input"] if "input" in c.args else c.value()
    size, factors = x.type.shape[2:], c.get("scale_factors", (c.get("scales_h"), c.get("scales_w")))
    for n, target, factor in zip(size, c.shape[2:], factors, strict=True):
        c.need(factor is None or n * factor == target, f"scale {factor} of {n} pixels, which is not {target}")
        if fn == "nearest":
            c.need(
                _same_pixels(n, target, factor),
                f"{n} pixels to {target}, where torch's float32 rounds otherwise",
            )
    return c.emit("upsample", x, fn=fn, size=c.shape[2:], align_corners=align_corners)


@lower("upsample_nearest2d.vec", "upsample_nearest2d.default")
def _nearest(c: Call) -> Value:
    return _upsample(c, "nearest", False)


@lower("upsample_bilinear2d.vec", "upsample_bilinear2d.default")
def _bilinear(c: Call) -> Value:
    return _upsample(c, "bilinear", bool(c.args["align_corners"]))


@lower("_upsample_bilinear2d_aa.vec", "_upsample_bilinear2d_aa.default")
def _bilinear_antialias(c: Call) -> Value:
    x = c.args["input"] if "input" in c.args else c.value()
    grows = all(n <= t for n, t in zip(x.type.shape[2:], c.shape[2:], strict=True))
    c.need(grows, "antialias that makes an image smaller")  # where it grows, antialias changes nothing
    return _upsample(c, "bilinear", bool(c.args["align_corners"]))


@lower("conv1d.default", "conv1d.padding")
def _conv1d(c: Call) -> Value:
    """A convolution of images one pixel high."""
    x, w = c.value("input"), c.value("weight")
    given = c.get("padding", 0)
    (stride,), (dilation,) = (_numbers(c.get(n, 1)) for n in ("stride", "dilation"))
    if isinstance(given, str):
        total = dilation * (w.type.shape[2] - 1) if given == "same" else 0
        c.need(total % 2 == 0, "padding 'same' that is uneven")
        given = total // 2
    batched = x.type.shape if len(x.type.shape) == 3 else (1, *x.type.shape)
    out = c.emit(
        "conv2d",
        c.reshape(x, (*batched[:2], 1, batched[2])),
        c.reshape(w, (*w.type.shape[:2], 1, w.type.shape[2])),
        *c.optional("bias"),
        stride=(1, stride),
        padding=(0, *_numbers(given)),
        dilation=(1, dilation),
        groups=int(c.get("groups", 1)),
    )
    return c.reshape(out, c.shape)


def _numbers(given: object) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)  # type: ignore[arg-type]


@lower("group_norm.default")
def _group_norm(c: Call) -> Value:
    return _grouped(c, c.args["num_groups"])


@lower("instance_norm.default")
def _instance_norm(c: Call) -> Value:
    c.need(bool(c.args["use_input_stats"]), "instance norm by running statistics")
    return _grouped(c, c.value("input").type.shape[1])


def _grouped(c: Call, groups: int) -> Value:
    """Each group of channels of each sample normalised, then every channel scaled and shifted."""
    x = c.value("input")
    samples, size = x.type.shape[0], prod(x.type.shape[1:])
    rows = c.reshape(x, (samples, groups, size // groups))
    out = c.reshape(c.emit("layer_norm", rows, eps=float(c.args["eps"])), x.type.shape)
    if c.get("weight") is None and c.get("bias") is None:
        return out
    channels = (x.type.shape[1],)
    scale = c.get("weight") or c.constant(x.type.dtype, channels, (1.0,) * channels[0])
    shift = c.get("bias") or c.constant(x.type.dtype, channels, (0.0,) * channels[0])
    return c.emit("affine_channel", out, scale, shift)
