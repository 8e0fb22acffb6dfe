"""Shape and element type of each op kind's output, as functions of its inputs and attributes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from lf_hal.lir.graph import FLOATS, INTEGERS, TensorType

Types = Sequence[TensorType]
Given = dict[str, Any]  # attributes, already of the types that the table says


class RuleError(Exception):
    """What a rule says; :func:`lf_hal.lir.ops.infer` turns it into an ``OpRuleError``."""


def need(condition: bool, reason: str) -> None:
    if not condition:
        raise RuleError(reason)


def floating(t: TensorType, what: str) -> None:
    need(t.dtype in FLOATS, f"{what} is {t}; it must be of {', '.join(FLOATS)}")


def same_dtype(types: Types) -> None:
    names = {t.dtype for t in types}
    need(len(names) <= 1, f"inputs have element types {', '.join(sorted(names))}; cast them to one")


def ranked(t: TensorType, rank: int, what: str) -> None:
    need(len(t.shape) == rank, f"{what} is {t}; it must have {rank} axes")


def shaped(t: TensorType, shape: tuple[int, ...], what: str) -> None:
    need(t.shape == shape, f"{what} is {t}; its shape must be {list(shape)}")


def broadcast_shapes(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of an elementwise result: axes are aligned at the end, and 1 stretches."""
    rank = max(map(len, shapes), default=0)
    out = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            need(
                size == out[axis] or 1 in (size, out[axis]),
                f"shapes {[list(s) for s in shapes]} do not broadcast together",
            )
            out[axis] = size if out[axis] == 1 else out[axis]
    return tuple(out)


def axis_of(axis: int, rank: int) -> int:
    need(0 <= axis < rank, f"axis {axis} is not among the {rank} axes; count from 0")
    return axis


def embedding(types: Types, a: Given) -> TensorType:
    table, index = types
    need(len(table.shape) >= 1, "the table is a scalar; it needs rows")
    need(index.dtype in ("i32", "i64"), f"the index is {index}; it must be of i32 or i64")
    return TensorType(table.dtype, index.shape + table.shape[1:])


def linear(types: Types, a: Given) -> TensorType:
    x, w, *bias = types
    floating(x, "x")
    need(len(x.shape) >= 1, "x is a scalar")
    ranked(w, 2, "w")
    need(
        w.dtype == x.dtype or (x.dtype == "f32" and w.dtype in FLOATS),
        f"w is {w} and x is {x}; cast one of them",
    )
    need(w.shape[1] == x.shape[-1], f"w is {w}, but rows of x have {x.shape[-1]} elements")
    for b in bias:
        shaped(b, (w.shape[0],), "bias")
        same_dtype((x, b))
    return TensorType(x.dtype, (*x.shape[:-1], w.shape[0]))


def matmul(types: Types, a: Given) -> TensorType:
    x, y = types
    same_dtype(types)
    floating(x, "the left factor")
    need(len(x.shape) >= 2 and len(y.shape) >= 2, f"factors {x} and {y} need at least 2 axes each")
    need(x.shape[-1] == y.shape[-2], f"inner sizes of {x} and {y} differ")
    return TensorType(x.dtype, (*broadcast_shapes((x.shape[:-2], y.shape[:-2])), x.shape[-2], y.shape[-1]))


def attention(types: Types, a: Given) -> TensorType:
    q, k, v, *mask = types
    same_dtype((q, k, v))
    for t, what in ((q, "q"), (k, "k"), (v, "v")):
        floating(t, what)
        ranked(t, 4, what)
    need(q.shape[3] == k.shape[3], f"heads of q {q} and k {k} differ in width")
    need(k.shape[:3] == v.shape[:3], f"k {k} and v {v} differ in batch, heads or length")
    need(q.shape[0] == k.shape[0], f"q {q} and k {k} differ in batch")
    need(
        k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0,
        f"{q.shape[1]} heads of q are no multiple of {k.shape[1]} of k",
    )
    scores = (*q.shape[:3], k.shape[2])
    for m in mask:
        need(not a["causal"], "both a mask and causal; put the causal limit into the mask")
        need(m.dtype in ("bool", q.dtype), f"mask is {m}; it must be bool or {q.dtype}")
        need(broadcast_shapes((scores, m.shape)) == scores, f"mask {m} does not broadcast to {list(scores)}")
    return TensorType(q.dtype, (*q.shape[:3], v.shape[3]))


def over_last_axis(types: Types, a: Given) -> TensorType:
    """softmax and the norms: x, then vectors as long as its last axis."""
    x, *vectors = types
    floating(x, "x")
    need(len(x.shape) >= 1, "x is a scalar")
    same_dtype(types)
    for v in vectors:
        shaped(v, (x.shape[-1],), "weight or bias")
    return x


def _windows(x: TensorType, kernel: tuple[int, ...], a: Given, dilation: tuple[int, int]) -> tuple[int, int]:
    need(min((*kernel, *a["stride"], *dilation)) > 0, "kernel, stride and dilation must be positive")
    need(min(a["padding"]) >= 0, "padding is negative")
    out = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], kernel, a["stride"], a["padding"], dilation, strict=True)
    ]
    need(min(out) > 0, f"kernel {list(kernel)} is larger than the padded image of {x}")
    return out[0], out[1]


def conv2d(types: Types, a: Given) -> TensorType:
    x, w, *bias = types
    ranked(x, 4, "x")
    ranked(w, 4, "w")
    floating(x, "x")
    need(
        w.dtype == x.dtype or (x.dtype == "f32" and w.dtype in FLOATS),
        f"w is {w} and x is {x}; cast one of them",
    )
    groups = a["groups"]
    need(
        groups > 0 and x.shape[1] % groups == 0 and w.shape[0] % groups == 0, f"{groups} groups do not divide"
    )
    need(w.shape[1] * groups == x.shape[1], f"w is {w} with {groups} groups, but x has {x.shape[1]} channels")
    for b in bias:
        shaped(b, (w.shape[0],), "a vector of channels")
        same_dtype((x, b))
    return TensorType(x.dtype, (x.shape[0], w.shape[0], *_windows(x, w.shape[2:], a, a["dilation"])))


def channels(types: Types, a: Given) -> TensorType:
    """affine_channel and batch_norm: x with channels on axis 1, then vectors of channels."""
    x, *vectors = types
    floating(x, "x")
    need(len(x.shape) >= 2, f"x is {x}; channels are its axis 1")
    same_dtype(types)
    for v in vectors:
        shaped(v, (x.shape[1],), "a vector of channels")
    return x


def pool2d(types: Types, a: Given) -> TensorType:
    (x,) = types
    ranked(x, 4, "x")
    floating(x, "x")
    kernel = a["kernel"]
    out = _windows(x, kernel, a, (1, 1))
    need(
        all(2 * p <= k for p, k in zip(a["padding"], kernel, strict=True)), "padding is over half the kernel"
    )
    return TensorType(x.dtype, (*x.shape[:2], *out))


def reduce(types: Types, a: Given) -> TensorType:
    (x,) = types
    axes, rank = a["axes"], len(x.shape)
    need(len(axes) > 0 and list(axes) == sorted(set(axes)), f"axes {list(axes)} must be ascending, each once")
    for axis in axes:
        axis_of(axis, rank)
    fn = a["fn"]
    if fn == "any":
        need(x.dtype == "bool", f"any of {x}; it must be bool")
    elif fn == "mean":
        floating(x, "x")
    else:
        need(x.dtype != "bool", f"{fn} of {x}; cast it first")
    if fn in ("max", "mean"):
        need(all(x.shape[i] for i in axes), f"{fn} over no elements of {x}")
    shape = [1 if i in axes else n for i, n in enumerate(x.shape) if a["keepdim"] or i not in axes]
    return TensorType(x.dtype, tuple(shape))


def cumsum(types: Types, a: Given) -> TensorType:
    (x,) = types
    axis_of(a["axis"], len(x.shape))
    need(x.dtype != "bool", f"cumsum of {x}; cast it first")
    return x


def unary(types: Types, a: Given) -> TensorType:
    (x,) = types
    if a["fn"] == "not":
        need(x.dtype == "bool", f"not of {x}; it must be bool")
    elif a["fn"] in ("neg", "abs", "relu"):
        need(x.dtype != "bool", f"{a['fn']} of {x}; cast it first")
    else:
        floating(x, "x")
    return x


def cast(types: Types, a: Given) -> TensorType:
    return TensorType(a["dtype"], types[0].shape)


def _check_scalar(types: Types, a: Given) -> None:
    need((len(types) == 1) == ("scalar" in a), "give two inputs, or one and the attribute scalar")
    need(len(types) == 1 or not a.get("scalar_left", False), "scalar_left without a scalar")
    if "scalar" in a and types[0].dtype not in FLOATS:
        whole = isinstance(a["scalar"], int)
        need(whole, f"scalar {a['scalar']!r} with elements of {types[0].dtype}; cast the tensor first")


def binary(types: Types, a: Given) -> TensorType:
    _check_scalar(types, a)
    same_dtype(types)
    dtype, fn = types[0].dtype, a["fn"]
    if fn in ("and", "or"):
        need(dtype == "bool", f"{fn} of {types[0]}; it must be bool")
    elif fn in ("div", "pow"):
        floating(types[0], "the left side")
    else:
        need(dtype != "bool", f"{fn} of {types[0]}; cast it first")
    return TensorType(dtype, broadcast_shapes([t.shape for t in types]))


def compare(types: Types, a: Given) -> TensorType:
    _check_scalar(types, a)
    same_dtype(types)
    return TensorType("bool", broadcast_shapes([t.shape for t in types]))


def where(types: Types, a: Given) -> TensorType:
    condition, x, y = types
    need(condition.dtype == "bool", f"the condition is {condition}; it must be bool")
    same_dtype((x, y))
    return TensorType(x.dtype, broadcast_shapes([t.shape for t in types]))


def multiply_add(types: Types, a: Given) -> TensorType:
    floating(types[0], "the first factor")
    same_dtype(types)
    return TensorType(types[0].dtype, broadcast_shapes([t.shape for t in types]))


def rope(types: Types, a: Given) -> TensorType:
    x, cos, sin = types
    floating(x, "x")
    same_dtype(types)
    need(len(x.shape) >= 2 and x.shape[-1] % 2 == 0, f"x is {x}; it needs two axes, the last of even size")
    need(cos.shape == sin.shape, f"tables {cos} and {sin} differ")
    need(
        len(cos.shape) >= 1 and cos.shape[-1] in (x.shape[-1], x.shape[-1] // 2),
        f"tables are {cos}; their rows must have {x.shape[-1]} elements, or half of them",
    )
    lead = broadcast_shapes((x.shape[:-1], cos.shape[:-1]))
    need(lead == x.shape[:-1], f"tables {cos} do not broadcast to {x}")
    return x


def concat(types: Types, a: Given) -> TensorType:
    same_dtype(types)
    first = types[0]
    axis = axis_of(a["axis"], len(first.shape))
    rest = [t.shape[:axis] + t.shape[axis + 1 :] for t in types if len(t.shape) == len(first.shape)]
    need(
        len(rest) == len(types) and len(set(rest)) == 1,
        "inputs differ in more than the axis they are joined on",
    )
    total = sum(t.shape[axis] for t in types)
    return TensorType(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :]))


def slice_(types: Types, a: Given) -> TensorType:
    (x,) = types
    axis = axis_of(a["axis"], len(x.shape))
    start, end, step = a["start"], a["end"], a["step"]
    need(step > 0, f"step {step} must be positive")
    need(
        0 <= start <= end <= x.shape[axis],
        f"[{start}:{end}] is not within the {x.shape[axis]} elements of axis {axis}",
    )
    return TensorType(x.dtype, (*x.shape[:axis], (end - start + step - 1) // step, *x.shape[axis + 1 :]))


def sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    need(all(n >= 0 for n in shape), f"shape {list(shape)} has a negative size")
    return shape


def reshape(types: Types, a: Given) -> TensorType:
    shape = sizes(a["shape"])
    need(prod(shape) == types[0].elements, f"{types[0]} does not have the elements of {list(shape)}")
    return TensorType(types[0].dtype, shape)


def permute(types: Types, a: Given) -> TensorType:
    (x,) = types
    perm = a["perm"]
    need(sorted(perm) == list(range(len(x.shape))), f"{list(perm)} is no permutation of the axes of {x}")
    return TensorType(x.dtype, tuple(x.shape[i] for i in perm))


def broadcast(types: Types, a: Given) -> TensorType:
    shape = sizes(a["shape"])
    need(
        broadcast_shapes((types[0].shape, shape)) == shape, f"{types[0]} does not broadcast to {list(shape)}"
    )
    return TensorType(types[0].dtype, shape)


def iota(types: Types, a: Given) -> TensorType:
    need(a["dtype"] in ("f32", "i32", "i64"), f"dtype {a['dtype']}; it must be f32, i32 or i64")
    need(a["length"] >= 0, f"length {a['length']} is negative")
    whole = isinstance(a["start"], int) and isinstance(a["step"], int)
    need(whole or a["dtype"] == "f32", f"fractions in an iota of {a['dtype']}")
    return TensorType(a["dtype"], (a["length"],))


def fill(types: Types, a: Given) -> TensorType:
    need(
        a["dtype"] in FLOATS or isinstance(a["value"], int),
        f"value {a['value']!r} for elements of {a['dtype']}",
    )
    return TensorType(a["dtype"], sizes(a["shape"]))


def _indexed(x: TensorType, index: TensorType, a: Given) -> int:
    axis = axis_of(a["axis"], len(x.shape))
    need(index.dtype in (*INTEGERS[1:],), f"the index is {index}; it must be of i32 or i64")
    need(len(index.shape) == len(x.shape), f"x is {x} and the index {index}; they need as many axes")
    return axis


def gather(types: Types, a: Given) -> TensorType:
    x, index = types
    axis = _indexed(x, index, a)
    fits = all(n <= m for i, (n, m) in enumerate(zip(index.shape, x.shape, strict=True)) if i != axis)
    need(fits, f"the index {index} is larger than x {x} outside axis {axis}")
    return TensorType(x.dtype, index.shape)


def scatter(types: Types, a: Given) -> TensorType:
    x, index, source = types
    axis = _indexed(x, index, a)
    same_dtype((x, source))
    need(
        index.shape == source.shape, f"the index is {index} and the source {source}; their shapes must agree"
    )
    fits = all(n <= m for i, (n, m) in enumerate(zip(index.shape, x.shape, strict=True)) if i != axis)
    need(fits, f"the index {index} is larger than x {x} outside axis {axis}")
    return x


def upsample(types: Types, a: Given) -> TensorType:
    (x,) = types
    ranked(x, 4, "x")
    floating(x, "x")
    need(min(a["size"]) > 0 and min(x.shape[2:]) > 0, "an image without pixels")
    need(a["fn"] == "bilinear" or not a["align_corners"], "align_corners is for bilinear only")
    return TensorType(x.dtype, (*x.shape[:2], *a["size"]))


def lstm_cell(types: Types, a: Given) -> TensorType:
    x, h, c, w_ih, w_hh, *bias = types
    same_dtype(types)
    floating(x, "x")
    for t, what in ((x, "x"), (h, "h"), (w_ih, "w_ih"), (w_hh, "w_hh")):
        ranked(t, 2, what)
    need(len(bias) != 1, "one bias; give both or none")
    batch, hidden = h.shape
    shaped(x, (batch, x.shape[1]), "x")
    shaped(c, (batch, hidden), "c")
    shaped(w_ih, (4 * hidden, x.shape[1]), "w_ih")
    shaped(w_hh, (4 * hidden, hidden), "w_hh")
    for b in bias:
        shaped(b, (4 * hidden,), "a bias")
    return TensorType(x.dtype, (2, batch, hidden))


def same(types: Types, a: Given) -> TensorType:
    return types[0]
