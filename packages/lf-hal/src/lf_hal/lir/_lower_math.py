"""Elementwise operators, comparisons and reductions."""

from __future__ import annotations

from lf_hal.lir._lower import Call, Rule, lower
from lf_hal.lir.graph import FLOATS, Value


def _scalar_side(c: Call, x: Value, fn: str, number: float, dtype: str, left: bool = False) -> Value:
    x = c.cast(x, dtype)
    return c.emit("binary", x, fn=fn, scalar=c.scalar(dtype, number), scalar_left=left)


def _binary(fn: str) -> Rule:
    def rule(c: Call) -> Value:
        x, other, alpha = c.args["self"], c.args["other"], c.get("alpha", 1)
        c.need(c.get("rounding_mode") is None, "division that rounds")
        dtype = c.dtype
        c.need(dtype != "bool" or fn in ("max", "min"), "arithmetic of truths")
        if not isinstance(other, Value):
            return _scalar_side(c, x, fn, other * alpha, dtype)
        if not isinstance(x, Value):
            return _scalar_side(c, other, fn, x, dtype, left=True)
        if alpha != 1:
            other = _scalar_side(c, other, "mul", alpha, dtype)
        return c.emit("binary", c.cast(x, dtype), c.cast(other, dtype), fn=fn)

    return rule


for _fn, _names in {
    "add": ("add.Tensor", "add.Scalar", "add_.Tensor", "add_.Scalar"),
    "sub": ("sub.Tensor", "sub.Scalar", "sub_.Tensor", "sub_.Scalar"),
    "mul": ("mul.Tensor", "mul.Scalar", "mul_.Tensor", "mul_.Scalar"),
    "div": ("div.Tensor", "div.Scalar", "div_.Tensor", "div_.Scalar", "true_divide.Tensor"),
    "max": ("maximum.default", "max.other"),
    "min": ("minimum.default", "min.other"),
}.items():
    lower(*_names)(_binary(_fn))


@lower("rsub.Scalar", "rsub.Tensor")
def _rsub(c: Call) -> Value:
    c.need(c.get("alpha", 1) == 1, "alpha other than 1")
    x, other, dtype = c.value(), c.args["other"], c.dtype
    if isinstance(other, Value):
        return c.emit("binary", c.cast(other, dtype), c.cast(x, dtype), fn="sub")
    return _scalar_side(c, x, "sub", other, dtype, left=True)


@lower("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "pow_.Scalar")
def _pow(c: Call) -> Value:
    base, exponent, dtype = c.args["self"], c.args["exponent"], c.dtype
    if not isinstance(base, Value):
        return _scalar_side(c, exponent, "pow", base, dtype, left=True)
    base = c.cast(base, dtype)
    if isinstance(exponent, Value):
        return c.emit("binary", base, c.cast(exponent, dtype), fn="pow")
    if exponent == 2:
        return c.emit("binary", base, base, fn="mul")
    if exponent == 0.5:
        return c.emit("unary", base, fn="sqrt")
    if exponent == -0.5:
        return c.emit("unary", base, fn="rsqrt")
    return _scalar_side(c, base, "pow", exponent, dtype)


@lower("square.default")
def _square(c: Call) -> Value:
    return c.emit("binary", c.value(), c.value(), fn="mul")


@lower("reciprocal.default")
def _reciprocal(c: Call) -> Value:
    return _scalar_side(c, c.value(), "div", 1.0, c.dtype, left=True)


def _unary(fn: str) -> Rule:
    return lambda c: c.emit("unary", c.cast(c.value(), c.dtype), fn=fn)


for _fn in (
    "abs",
    "cos",
    "erf",
    "exp",
    "log",
    "neg",
    "relu",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "sqrt",
    "tanh",
):
    lower(f"{_fn}.default", f"{_fn}_.default")(_unary(_fn))
lower("bitwise_not.default", "logical_not.default")(_unary("not"))


@lower("gelu.default", "gelu_.default")
def _gelu(c: Call) -> Value:
    return c.emit("unary", c.value(), fn="gelu_tanh" if c.get("approximate") == "tanh" else "gelu")


def _between(c: Call, x: Value, low: float | None, high: float | None) -> Value:
    for fn, limit in (("max", low), ("min", high)):
        if limit is not None:
            x = _scalar_side(c, x, fn, limit, c.dtype)
    return x


@lower("clamp.default", "clamp_.default", "clamp_min.default", "clamp_max.default")
def _clamp(c: Call) -> Value:
    return _between(c, c.value(), c.get("min"), c.get("max"))


@lower("hardtanh.default", "hardtanh_.default")
def _hardtanh(c: Call) -> Value:
    return _between(c, c.value(), c.args["min_val"], c.args["max_val"])


@lower("relu6.default", "relu6_.default")
def _relu6(c: Call) -> Value:
    return _between(c, c.value(), 0, 6)


@lower("leaky_relu.default", "leaky_relu_.default")
def _leaky_relu(c: Call) -> Value:
    slope, x = float(c.get("negative_slope", 0.01)), c.value()
    c.need(0 <= slope <= 1, f"negative_slope {slope} outside 0..1")
    return c.emit("binary", x, c.emit("binary", x, fn="mul", scalar=slope), fn="max")


@lower("prelu.default")
def _prelu(c: Call) -> Value:
    x, weight = c.value(), c.value("weight")
    along = (
        (weight.type.elements, *[1] * (len(x.type.shape) - 2)) if len(x.type.shape) > 1 else weight.type.shape
    )
    lower_side = c.emit("binary", x, c.reshape(weight, along), fn="mul")
    return c.emit("where", c.emit("compare", x, fn="gt", scalar=0.0), x, lower_side)


@lower("elu.default", "elu_.default")
def _elu(c: Call) -> Value:
    c.need(c.get("scale", 1) == 1 and c.get("input_scale", 1) == 1, "scales other than 1")
    x = c.value()
    grown = c.emit("binary", c.emit("unary", _between(c, x, None, 0), fn="exp"), fn="sub", scalar=1.0)
    below = _scalar_side(c, grown, "mul", c.get("alpha", 1), c.dtype)
    return c.emit("where", c.emit("compare", x, fn="gt", scalar=0.0), x, below)


@lower("hardsigmoid.default", "hardsigmoid_.default")
def _hardsigmoid(c: Call) -> Value:
    x = _between(c, c.emit("binary", c.value(), fn="add", scalar=3.0), 0, 6)
    return c.emit("binary", x, fn="div", scalar=6.0)


@lower("glu.default")
def _glu(c: Call) -> Value:
    x = c.value()
    axis = c.axis(x, c.args["dim"])
    half = x.type.shape[axis] // 2
    gate = c.emit("unary", c.slice(x, axis, half, 2 * half), fn="sigmoid")
    return c.emit("binary", c.slice(x, axis, 0, half), gate, fn="mul")


@lower("diff.default")
def _diff(c: Call) -> Value:
    x = c.value()
    c.need(c.get("n", 1) == 1, "differences of higher order")
    axis = c.axis(x, c.get("dim", -1))
    ends = c.optional("prepend"), c.optional("append")
    if ends[0] or ends[1]:
        x = c.emit("concat", *ends[0], x, *ends[1], axis=axis)
    size = x.type.shape[axis]
    after, before = c.slice(x, axis, 1, size), c.slice(x, axis, 0, size - 1)
    if x.type.dtype == "bool":
        return c.emit("compare", after, before, fn="ne")
    return c.emit("binary", after, before, fn="sub")


@lower("hardswish.default", "hardswish_.default")
def _hardswish(c: Call) -> Value:
    x = c.value()
    gate = _between(c, c.emit("binary", x, fn="add", scalar=3.0), 0, 6)
    return c.emit("binary", c.emit("binary", x, gate, fn="mul"), fn="div", scalar=6.0)


def _logical(fn: str) -> Rule:
    def rule(c: Call) -> Value:
        c.need(c.dtype == "bool", "bits of integers")
        x, y = c.value(), c.value("other")
        return c.emit("binary", c.cast(x, "bool"), c.cast(y, "bool"), fn=fn)

    return rule


for _fn in ("and", "or"):
    lower(f"__{_fn}__.Tensor", f"bitwise_{_fn}.Tensor", f"logical_{_fn}.default")(_logical(_fn))


def _promoted(c: Call, x: Value, y: Value) -> str:
    """The element type in which two tensors are compared, as torch promotes."""
    a, b = x.type, y.type
    if a.dtype == b.dtype:
        return a.dtype
    order = ("bool", "i8", "i32", "i64", "f16", "bf16", "f32")
    kinds = [0 if t.dtype == "bool" else 2 if t.dtype in FLOATS else 1 for t in (a, b)]
    if bool(a.shape) != bool(b.shape) and kinds[0] == kinds[1]:  # a scalar tensor yields to one with axes
        return a.dtype if a.shape else b.dtype
    c.need({a.dtype, b.dtype} != {"f16", "bf16"}, "float16 compared with bfloat16")
    return max(a.dtype, b.dtype, key=order.index)


def _compare(fn: str) -> Rule:
    def rule(c: Call) -> Value:
        x, other = c.value(), c.args["other"]
        if isinstance(other, Value):
            dtype = _promoted(c, x, other)
            return c.emit("compare", c.cast(x, dtype), c.cast(other, dtype), fn=fn)
        if x.type.dtype not in FLOATS and isinstance(other, float):
            x = c.cast(x, "f32")
        if x.type.dtype == "bool":
            x = c.cast(x, "i32")
        return c.emit("compare", x, fn=fn, scalar=c.scalar(x.type.dtype, other))

    return rule


for _fn in ("eq", "ne", "lt", "le", "gt", "ge"):
    lower(f"{_fn}.Tensor", f"{_fn}.Scalar")(_compare(_fn))


@lower("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(c: Call) -> Value:
    sides = [c.args["self"], c.args["other"]]
    x, y = (c.cast(s, c.dtype) if isinstance(s, Value) else c.fill(c.dtype, (), s) for s in sides)
    return c.emit("where", c.value("condition"), x, y)


@lower("masked_fill.Scalar", "masked_fill.Tensor", "masked_fill_.Scalar")
def _masked_fill(c: Call) -> Value:
    given = c.args["value"]
    put = c.cast(given, c.dtype) if isinstance(given, Value) else c.fill(c.dtype, (), given)
    return c.emit("where", c.value("mask"), put, c.value())


def _axes(c: Call, x: Value) -> tuple[int, ...]:
    given = c.get("dim", [])
    given = [given] if isinstance(given, int) else given
    every = range(len(x.type.shape))
    return tuple(sorted(c.axis(x, d) for d in given)) or tuple(every)


def _reduce(fn: str) -> Rule:
    def rule(c: Call) -> Value:
        x = c.value()
        x = c.cast(x, c.dtype)
        axes = _axes(c, x)
        if not axes:
            return x
        return c.emit("reduce", x, fn=fn, axes=axes, keepdim=bool(c.get("keepdim", False)))

    return rule


for _fn, _names in {
    "sum": ("sum.default", "sum.dim_IntList"),
    "mean": ("mean.default", "mean.dim"),
    "max": ("amax.default", "max.default"),
    "any": ("any.default", "any.dim", "any.dims"),
}.items():
    lower(*_names)(_reduce(_fn))


@lower("cumsum.default")
def _cumsum(c: Call) -> Value:
    x = c.cast(c.value(), c.dtype)
    return c.emit("cumsum", x, axis=c.axis(x, c.args["dim"]))


@lower("softmax.int", "_softmax.default")
def _softmax(c: Call) -> Value:
    x = c.cast(c.value(), c.dtype)
    axis, last = c.axis(x, c.args["dim"]), len(x.type.shape) - 1
    perm = list(range(last + 1))
    perm[axis], perm[last] = last, axis
    return c.permute(c.emit("softmax", c.permute(x, perm)), perm)


@lower("log_softmax.int", "_log_softmax.default")
def _log_softmax(c: Call) -> Value:
    x = c.cast(c.value(), c.dtype)
    axes = (c.axis(x, c.args["dim"]),)
    below = c.emit("binary", x, c.emit("reduce", x, fn="max", axes=axes, keepdim=True), fn="sub")
    total = c.emit("reduce", c.emit("unary", below, fn="exp"), fn="sum", axes=axes, keepdim=True)
    return c.emit("binary", below, c.emit("unary", total, fn="log"), fn="sub")


def _soft(c: Call, x: Value, beta: float, threshold: float) -> Value:
    """log(1 + exp(beta x)) / beta, and x itself beyond the threshold."""
    steep = c.emit("binary", x, fn="mul", scalar=beta)
    grown = c.emit(
        "binary", c.emit("unary", _between(c, steep, None, threshold), fn="exp"), fn="add", scalar=1.0
    )
    bent = c.emit("binary", c.emit("unary", grown, fn="log"), fn="div", scalar=beta)
    return c.emit("where", c.emit("compare", steep, fn="gt", scalar=threshold), x, bent)


@lower("softplus.default")
def _softplus(c: Call) -> Value:
    return _soft(c, c.value(), float(c.get("beta", 1)), float(c.get("threshold", 20)))


@lower("mish.default", "mish_.default")
def _mish(c: Call) -> Value:
    x = c.value()
    return c.emit("binary", x, c.emit("unary", _soft(c, x, 1.0, 20.0), fn="tanh"), fn="mul")
