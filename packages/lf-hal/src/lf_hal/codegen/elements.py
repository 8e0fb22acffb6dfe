"""Lowering of what works element by element, and of what only moves elements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from lf_hal.codegen.lowering import C_TYPES, SMALL, Lowering, array, collapse, literal, loop, split_rows
from lf_hal.codegen.view import View, memory_order
from lf_hal.lir.graph import Op

__all__ = [
    "affine_channel", "alias", "binary", "cast", "compare", "concat", "fill", "gather", "iota", "move",
    "multiply_add", "scatter", "unary", "where",
]  # fmt: skip

_UNARY = {
    "abs": "LF_ABS", "cos": "LF_COS", "erf": "LF_ERF", "exp": "LF_EXP", "gelu": "LF_GELU_ERF",
    "gelu_tanh": "LF_GELU_TANH", "log": "LF_LOG", "neg": "LF_NEG", "relu": "LF_RELU", "rsqrt": "LF_RSQRT",
    "sigmoid": "LF_SIGMOID", "silu": "LF_SILU", "sin": "LF_SIN", "sqrt": "LF_SQRT", "tanh": "LF_TANH",
}  # fmt: skip
_BINARY = {"add": "LF_ADD", "sub": "LF_SUB", "mul": "LF_MUL", "div": "LF_DIV", "pow": "LF_POW", "max": "LF_MAXIMUM",
           "min": "LF_MINIMUM"}  # fmt: skip
_UNARY_INTEGER = {
    "not": "!x_[0]",
    "neg": "-x_[0]",
    "abs": "x_[0] < 0 ? -x_[0] : x_[0]",
    "relu": "x_[0] < 0 ? 0 : x_[0]",
}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _grain(width: int) -> int:
    return max(1, SMALL // max(width, 1))


def _order(views: Sequence[View], shape: Sequence[int]) -> tuple[int, ...]:
    """The memory order of the first operand that is as large as the result, else the axes as they stand."""
    for v in views:
        if v.shape == tuple(shape) and v.is_dense(memory_order(v)):
            return memory_order(v)
    return tuple(range(len(shape)))


def _spread(
    low: Lowering, op: Op, views: Sequence[View]
) -> tuple[View, list[int], list[list[int]], list[View]]:
    """Result, row shape, strides of (result, operands), operands: all broadcast, in memory order, collapsed."""
    shape = op.output.type.shape
    order = _order(views, shape)
    y = low.result(op, order)
    spread = [v.broadcast(shape).permute(order) for v in views]
    sizes, strides = collapse(
        y.permute(order).shape, [y.permute(order).strides, *(v.strides for v in spread)]
    )
    sizes, strides = split_rows(sizes, strides)
    return y, sizes, strides, spread


def unary(low: Lowering, op: Op) -> None:
    (x,) = low.inputs_of(op)
    fn = op.get_str("fn")
    if x.dtype != "f32":
        expressions = {
            "not": "!x_[0]",
            "neg": "-x_[0]",
            "abs": "x_[0] < 0 ? -x_[0] : x_[0]",
            "relu": "x_[0] < 0 ? 0 : x_[0]",
        }
        if x.dtype in ("bf16", "f16"):
            low.only_f32(x)
        _elements(low, op, [x], expressions[fn])
        return
    order = _order([x], x.shape)
    x = low.materialise(x, order)
    y = low.result(op, order)
    low.step(
        f"lf_unary_f32({_UNARY[fn]}, {low.at(y)}, {low.read(x)}, begin, end);",
        prod(x.shape),
        [x],
        y,
        grain=2048,
    )


def _elements(low: Lowering, op: Op, views: Sequence[View], expression: str) -> None:
    """y = expression of ``x_[0]``, ``z_[0]``, ``w_[0]`` (the operands), as a plain loop."""
    y, sizes, strides, spread = _spread(low, op, views)
    names = ["y", "x", "z", "w"][: 1 + len(spread)]
    places = [low.at(y), *map(low.read, spread)]
    operands = dict(zip(names, zip(places, strides, strict=True), strict=True))
    types = [C_TYPES[v.dtype] for v in (y, *spread)]
    text = loop(sizes, operands, f"y_[0] = {expression};", *types)
    low.step(text, prod(sizes[:-1]), spread, y, grain=_grain(sizes[-1]))


def _scalar(op: Op, dtype: str) -> str:
    value = op.attr("scalar")
    if isinstance(value, (tuple, str)):
        raise TypeError(f"scalar {value!r}")
    return literal(float(value)) if dtype == "f32" else f"(({C_TYPES[dtype]}){int(value)}LL)"


def binary(low: Lowering, op: Op) -> None:
    views = low.inputs_of(op)
    fn, dtype = op.get_str("fn"), views[0].dtype
    if dtype == "f32":
        _binary_f32(low, op, views, _BINARY[fn])
        return
    if dtype in ("bf16", "f16"):
        low.only_f32(*views)
    other = "z_[0]" if len(views) == 2 else _scalar(op, dtype)
    a, b = ("x_[0]", other) if not op.attr("scalar_left") else (other, "x_[0]")
    kind = C_TYPES[dtype]
    wrap = f"({kind})((u{kind}){a} {{}} (u{kind}){b})"  # integers wrap around
    expressions = {
        "and": f"{a} & {b}", "or": f"{a} | {b}", "max": f"{a} > {b} ? {a} : {b}", "min": f"{a} < {b} ? {a} : {b}",
        "add": wrap.format("+"), "sub": wrap.format("-"), "mul": wrap.format("*"),
    }  # fmt: skip
    _elements(low, op, views, expressions[fn])


def _binary_f32(low: Lowering, op: Op, views: Sequence[View], name: str) -> None:
    y, sizes, strides, spread = _spread(low, op, views)
    prologue = f"{array('shape', sizes)}{array('as', strides[1])}"
    places = [low.read(v) for v in spread]
    if len(views) == 1:
        prologue += f"static const float scalar = {literal(float(_scalar_number(op)))};\n"
        prologue += array("bs", [0] * len(sizes))
        places.append("&scalar")
    else:
        prologue += array("bs", strides[2])
    operands = [(places[0], "as"), (places[1], "bs")]
    if op.attr("scalar_left"):
        operands.reverse()
    words = ", ".join(f"{p}, {s}" for p, s in operands)
    call = f"lf_binary_f32({name}, {low.at(y)}, {words}, shape, {len(sizes)}, begin, end);"
    low.step(prologue + call, prod(sizes[:-1]), spread, y, grain=_grain(sizes[-1]))


def _scalar_number(op: Op) -> float:
    value = op.attr("scalar")
    if isinstance(value, (tuple, str)):
        raise TypeError(f"scalar {value!r}")
    return float(value)


def _multiply_add(low: Lowering, op: Op, views: Sequence[View]) -> None:
    low.only_f32(*views)
    y, sizes, strides, spread = _spread(low, op, views)
    names = ("as", "bs", "cs")
    prologue = array("shape", sizes) + "".join(array(n, s) for n, s in zip(names, strides[1:], strict=True))
    words = ", ".join(f"{low.read(v)}, {n}" for v, n in zip(spread, names, strict=True))
    call = f"lf_multiply_add_f32({low.at(y)}, {words}, shape, {len(sizes)}, begin, end);"
    low.step(prologue + call, prod(sizes[:-1]), spread, y, grain=_grain(sizes[-1]))


def multiply_add(low: Lowering, op: Op) -> None:
    _multiply_add(low, op, low.inputs_of(op))


def affine_channel(low: Lowering, op: Op) -> None:
    x, scale, shift = low.inputs_of(op)
    after = (1,) * (len(x.shape) - 2)
    vectors = [low.materialise(v).reshape((v.shape[0], *after)) for v in (scale, shift)]
    _multiply_add(low, op, [x, *(v for v in vectors if v is not None)])


def compare(low: Lowering, op: Op) -> None:
    views = low.inputs_of(op)
    if views[0].dtype in ("bf16", "f16"):
        low.only_f32(*views)
    other = "z_[0]" if len(views) == 2 else _scalar(op, views[0].dtype)
    _elements(low, op, views, f"x_[0] {_COMPARE[op.get_str('fn')]} {other}")


def where(low: Lowering, op: Op) -> None:
    _elements(low, op, low.inputs_of(op), "x_[0] ? z_[0] : w_[0]")


def cast(low: Lowering, op: Op) -> None:
    (x,) = low.inputs_of(op)
    source, target = x.dtype, op.output.type.dtype
    if source == target:
        low.views[op.output.name] = x
        return
    if (source, target) == ("f16", "f32"):
        _elements(low, op, [x], "lf_widen_f16(x_[0])")
        return
    if "f16" in (source, target):
        low.refuse(f"cast from {source} to {target} is not compiled; f16 is widened to f32 only")
    if target == "bf16" or source == "bf16":
        if {source, target} != {"f32", "bf16"}:
            low.refuse(f"cast from {source} to {target} is not compiled; go through f32")
        _elements(low, op, [x], "lf_widen_bf16(x_[0])" if source == "bf16" else "lf_narrow_bf16(x_[0])")
        return
    if target == "bool":
        expression = "x_[0] != 0"
    elif source == "f32":
        expression = f"lf_truncate_{target}(x_[0])"
    else:
        expression = f"({C_TYPES[target]})x_[0]"
    _elements(low, op, [x], expression)


def iota(low: Lowering, op: Op) -> None:
    y = low.result(op)
    start, step, dtype = op.attr("start"), op.attr("step"), op.output.type.dtype
    if isinstance(start, (str, tuple)) or isinstance(step, (str, tuple)):
        raise TypeError("iota of no number")
    if dtype == "f32":
        # start + i * step, rounded once: computed here, so that no machine has to
        values = [literal(start + i * step) for i in range(y.shape[0])]
        text = (
            f"static const float values[] = {{{', '.join(values) or '0'}}};\n"
            f"for (int64_t i = begin; i < end; i++) {low.at(y)}[i] = values[i];"
        )
    else:
        text = f"for (int64_t i = begin; i < end; i++) {low.at(y)}[i] = ({C_TYPES[dtype]})({start}LL + i * {step}LL);"
    low.step(text, y.shape[0], [], y, grain=SMALL)


def fill(low: Lowering, op: Op) -> None:
    y = low.result(op)
    value, dtype = op.attr("value"), y.dtype
    if isinstance(value, (str, tuple)):
        raise TypeError(f"fill with {value!r}")
    if dtype == "f32":
        text = literal(float(value))
    elif dtype == "bf16":
        bits = int(np.float32(value).view(np.uint32))
        text = str((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    elif dtype == "f16":
        text = str(int(np.float16(value).view(np.uint16)))
    else:
        text = f"({C_TYPES[dtype]}){int(value)}LL"
    loop_text = f"for (int64_t i = begin; i < end; i++) {low.at(y)}[i] = {text};"
    low.step(loop_text, prod(y.shape), [], y, grain=SMALL)


def move(low: Lowering, op: Op) -> None:
    """reshape, permute, slice, broadcast: views, and a copy only where no strides can say it."""
    (x,) = low.inputs_of(op)
    shape = op.output.type.shape
    found: View | None
    if op.kind == "permute":
        found = x.permute(op.get_ints("perm"))
    elif op.kind == "slice":
        axis, step = op.get_int("axis"), op.get_int("step")
        found = x.slice(axis, op.get_int("start"), shape[axis], step)
    elif op.kind == "broadcast":
        found = x.broadcast(shape)
    else:
        found = x.reshape(shape) or low.materialise(x).reshape(shape)
    if found is None:
        low.refuse("its shape has no view")
    low.views[op.output.name] = found


def alias(low: Lowering, op: Op) -> None:
    low.views[op.output.name] = low.views[op.inputs[0]]


def concat(low: Lowering, op: Op) -> None:
    views, axis = low.inputs_of(op), op.get_int("axis")
    y = low.result(op, _order(views, views[0].shape))
    start = 0
    for v in views:
        if v.shape[axis]:
            low.copy(v, y.slice(axis, start, v.shape[axis], 1))
        start += v.shape[axis]


def gather(low: Lowering, op: Op) -> None:
    x, index = low.inputs_of(op)
    axis, shape = op.get_int("axis"), op.output.type.shape
    y = low.result(op)
    along = list(x.strides)
    along[axis] = 0
    text = _indexed(low, shape, {"y": y, "n": index}, along) + (
        f"  int64_t k = n_[0];\n  if (k < 0 || k >= {x.shape[axis]}) {{ lf_report(x, \x03, t); continue; }}\n"
        f"  y_[0] = {low.read(x)}[at + k * {x.strides[axis]}];\n}}"
    )
    low.step(text, prod(shape), [x, index], y, grain=SMALL)


def scatter(low: Lowering, op: Op) -> None:
    """x, then the source in ascending order: of two for one place the later one stays. One thread."""
    x, index, source = low.inputs_of(op)
    axis = op.get_int("axis")
    y = low.result(op)
    low.copy(x, y)
    along = list(y.strides)
    along[axis] = 0
    text = _indexed(low, index.shape, {"s": source, "n": index}, along) + (
        f"  int64_t k = n_[0];\n  if (k < 0 || k >= {x.shape[axis]}) {{ lf_report(x, \x03, t); continue; }}\n"
        f"  {low.at(y)}[at + k * {y.strides[axis]}] = s_[0];\n}}"
    )
    low.step(text, prod(index.shape), [index, source, y], y, grain=max(prod(index.shape), 1))


def _indexed(low: Lowering, shape: Sequence[int], views: dict[str, View], along: Sequence[int]) -> str:
    out = ["for (int64_t t = begin; t < end; t++) {", "  int64_t rest = t, at = 0; (void)rest;"]
    out += [
        f"  {'' if n == 'y' else 'const '}{C_TYPES[v.dtype]} *{n}_ = {low.at(v)};" for n, v in views.items()
    ]
    for axis in range(len(shape) - 1, -1, -1):
        adds = " ".join(f"{n}_ += i * {v.strides[axis]};" for n, v in views.items())
        out.append(
            f"  {{ int64_t i = rest % {shape[axis]}; rest /= {shape[axis]}; at += i * {along[axis]}; {adds} }}"
        )
    return "\n".join(out) + "\n"
