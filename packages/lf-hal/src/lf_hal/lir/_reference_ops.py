"""What each op kind computes, in plain numpy. Arrays of floats have the working precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lf_hal.lir import _reference_nn as nn
from lf_hal.lir.graph import FLOATS, Op

Array = NDArray[Any]
Arrays = Sequence[Array]

INTEGERS: dict[str, Any] = {"i8": np.int8, "i32": np.int32, "i64": np.int64, "bool": np.bool_}
_erf = np.vectorize(math.erf, otypes=[np.float64])


def compute(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    """The op's output; the caller rounds it to its element type."""
    return np.asarray(_KINDS[op.kind](op, x, work))


def _gelu_tanh(x: Array) -> Array:
    inner = x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x * x * x)
    return np.asarray(x * x.dtype.type(0.5) * (1 + np.tanh(inner)))


def _gelu(x: Array) -> Array:
    if not x.size:
        return x
    return np.asarray(0.5 * x * (1 + _erf(x.astype(np.float64) / math.sqrt(2))), x.dtype)


def _relu(x: Array) -> Array:
    return np.where(x < 0, x.dtype.type(0), x)


UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "cos": np.cos,
    "erf": lambda x: np.asarray(_erf(x), x.dtype) if x.size else x,
    "exp": np.exp,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "log": np.log,
    "neg": np.negative,
    "not": np.logical_not,
    "relu": _relu,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": nn.sigmoid,
    "silu": lambda x: x * nn.sigmoid(x),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.logical_and,
    "or": np.logical_or,
}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def activate(act: str, x: Array) -> Array:
    return x if act == "none" else UNARY[act](x)


def _sides(op: Op, x: Arrays) -> tuple[Array, Array]:
    if not op.has("scalar"):
        return x[0], x[1]
    scalar = np.asarray(op.attr("scalar"), x[0].dtype)
    left = op.has("scalar_left") and op.attr("scalar_left")
    return (scalar, x[0]) if left else (x[0], scalar)


def _cast(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    dtype = op.get_str("dtype")
    return x[0].astype(work if dtype in FLOATS else INTEGERS[dtype])


def _reduce(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    fn = {"sum": np.sum, "mean": np.mean, "max": np.max, "any": np.any}[op.get_str("fn")]
    keepdims = bool(op.attr("keepdim"))
    if op.get_str("fn") == "sum" and x[0].dtype.kind == "i":
        return np.sum(x[0], axis=op.get_ints("axes"), keepdims=keepdims, dtype=x[0].dtype)
    return np.asarray(fn(x[0], axis=op.get_ints("axes"), keepdims=keepdims))  # type: ignore[operator]


def _slice(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    cut = slice(op.get_int("start"), op.get_int("end"), op.get_int("step"))
    return np.asarray(x[0][(*(slice(None),) * op.get_int("axis"), cut)])


def _iota(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    dtype = work if op.get_str("dtype") in FLOATS else INTEGERS[op.get_str("dtype")]
    exact: Array = np.arange(op.get_int("length"), dtype=np.int64 if dtype != work else np.float64)
    start, step = (np.asarray(op.attr(name), exact.dtype) for name in ("start", "step"))
    return np.asarray(start + exact * step, dtype)


def _fill(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    dtype = work if op.get_str("dtype") in FLOATS else INTEGERS[op.get_str("dtype")]
    return np.full(op.get_ints("shape"), op.attr("value"), dtype)


def _scatter(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    out = x[0].copy()
    places: list[Array] = list(np.indices(x[1].shape, sparse=True))
    places[op.get_int("axis")] = x[1]
    out[tuple(places)] = x[2]
    return out


def _gather(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    places: list[Array] = list(np.indices(x[1].shape, sparse=True))
    places[op.get_int("axis")] = x[1]
    return np.asarray(x[0][tuple(places)])


def _multiply_add(a: Array, b: Array, c: Array) -> Array:
    """Of float32 rounded once, but for the rare case that float64's own rounding decides."""
    return np.asarray(a.astype(np.float64) * b + c, a.dtype)


def _linear(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    out = x[0] @ x[1].T
    out = out + x[2] if len(x) > 2 else out
    return activate(op.get_str("act"), out) if op.has("act") else out


def _conv(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    out = nn.conv2d(op, x[0], x[1])
    if len(x) == 3:
        out = out + x[2].reshape(-1, 1, 1)
    if len(x) == 4:
        out = _multiply_add(out, x[2].reshape(-1, 1, 1), x[3].reshape(-1, 1, 1))
    return activate(op.get_str("act"), out)


def _linear_i8(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    out = (x[0] @ x[1].astype(work).T) * x[2]
    return activate(op.get_str("act"), out + x[3] if len(x) > 3 else out)


def _conv_add(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    out = nn.conv2d(op, x[0], x[1])
    if len(x) == 4:
        out = out + x[3].reshape(-1, 1, 1)
    if len(x) == 5:
        out = _multiply_add(out, x[3].reshape(-1, 1, 1), x[4].reshape(-1, 1, 1))
    return activate(op.get_str("act"), out + x[2])


def _conv_i8(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    out = nn.conv2d(op, x[0], x[1].astype(work)) * x[2].reshape(-1, 1, 1)
    if len(x) == 4:
        out = out + x[3].reshape(-1, 1, 1)
    if len(x) == 5:
        out = _multiply_add(out, x[3].reshape(-1, 1, 1), x[4].reshape(-1, 1, 1))
    return activate(op.get_str("act"), out)


def _batch_norm(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    along = (-1, *[1] * (x[0].ndim - 2))
    weight, bias, mean, var = (v.reshape(along) for v in x[1:])
    return np.asarray((x[0] - mean) / np.sqrt(var + work.type(op.get_float("eps"))) * weight + bias)


def _affine(op: Op, x: Arrays, work: np.dtype[Any]) -> Array:
    along = (-1, *[1] * (x[0].ndim - 2))
    return _multiply_add(x[0], x[1].reshape(along), x[2].reshape(along))


_KINDS: dict[str, Callable[[Op, Arrays, np.dtype[Any]], Array]] = {
    "affine_channel": _affine,
    "attention": lambda op, x, work: nn.attention(op, x),
    "batch_norm": _batch_norm,
    "binary": lambda op, x, work: BINARY[op.get_str("fn")](*_sides(op, x)),
    "broadcast": lambda op, x, work: np.broadcast_to(x[0], op.get_ints("shape")),
    "cast": _cast,
    "compare": lambda op, x, work: COMPARE[op.get_str("fn")](*_sides(op, x)),
    "concat": lambda op, x, work: np.concatenate(x, op.get_int("axis")),
    "conv2d": _conv,
    "conv_affine_act": _conv,
    "conv_add_act": _conv_add,
    "conv_i8": _conv_i8,
    "copy_to": lambda op, x, work: x[0],
    "cumsum": lambda op, x, work: np.cumsum(x[0], op.get_int("axis"), dtype=x[0].dtype),
    "embedding": lambda op, x, work: x[0][x[1]],
    "fill": _fill,
    "gather": _gather,
    "iota": _iota,
    "layer_norm": lambda op, x, work: nn.layer_norm(op, x),
    "linear": _linear,
    "linear_act": _linear,
    "linear_i8": _linear_i8,
    "lstm_cell": lambda op, x, work: nn.lstm_cell(x),
    "matmul": lambda op, x, work: x[0] @ x[1],
    "multiply_add": lambda op, x, work: _multiply_add(*x),
    "permute": lambda op, x, work: x[0].transpose(op.get_ints("perm")),
    "pool2d": lambda op, x, work: nn.pool2d(op, x[0]),
    "reduce": _reduce,
    "reshape": lambda op, x, work: x[0].reshape(op.get_ints("shape")),
    "rms_norm": lambda op, x, work: nn.rms_norm(op, x),
    "rope": lambda op, x, work: nn.rope(x),
    "scatter": _scatter,
    "slice": _slice,
    "softmax": lambda op, x, work: nn.softmax(x[0]),
    "unary": lambda op, x, work: UNARY[op.get_str("fn")](x[0]),
    "upsample": lambda op, x, work: nn.upsample(op, x[0]),
    "where": lambda op, x, work: np.where(x[0], x[1], x[2]),
}
