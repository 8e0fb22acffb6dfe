"""The op kinds of the intermediate form: what each computes, its inputs, attributes, and the type of its output.

Words used below: ``...`` any axes; ``[]?`` an optional input (given or left out at the end). Tensors are row major;
images are NCHW. Elementwise kinds broadcast like numpy. No kind converts element types except ``cast``; only the
weights of ``linear`` and ``conv2d`` may be stored narrower (bf16, f16) than the float32 they are multiplied with.

embedding(table[N,...], index[...])          rows of table; an index outside 0..N-1 is an error of the caller
linear(x[...,K], w[N,K], bias[N]?)           x @ w.T + bias
linear_act(same; act)                        act of that, fused
linear_i8(x, w[N,K] of i8, weight_scale[N], bias[N]?; act)   act((x @ w.T) * weight_scale + bias), in this order
matmul(a[...,M,K], b[...,K,N])               leading axes broadcast
attention(q[B,H,T,D], k[B,G,S,D], v[B,G,S,E], mask?)   softmax(scale * q @ k.T + mask) @ v; head h reads head
                                             h // (H/G) of k and v. causal: query t sees keys 0..t. mask broadcasts to
                                             [B,H,T,S]: bool (True = seen) or of q's dtype (added). A row that sees
                                             nothing is zero.
softmax(x)                                   over the last axis
layer_norm(x, weight[D]?, bias[D]?; eps)     over the last axis, variance divided by D
rms_norm(x, weight[D]?; eps)                 x / sqrt(mean(x * x) + eps) * weight, over the last axis
conv2d(x[B,I,H,W], w[O,I/groups,kh,kw], bias[O]?; stride, padding, dilation, groups, act)
conv_affine_act(x, w, scale[O], shift[O]; same)   act(conv2d(x, w) * scale + shift), the middle by one multiply-add
conv_add_act(x, w, residual[like the output], ...; same)   act(conv2d(x, w) + bias + residual), or with scale and shift
conv_i8(x, w of i8, weight_scale[O], ...; same)   conv2d times weight_scale, then a bias or scale and shift, then act
batch_norm(x[B,C,...], weight[C], bias[C], mean[C], var[C]; eps)   of inference; ``fold_batch_norm`` removes it
affine_channel(x[B,C,...], scale[C], shift[C])    x * scale + shift, by one multiply-add
pool2d(x[B,C,H,W]; fn=max|avg, kernel, stride, padding, count_padding)   padding is -inf for max; avg divides by the
                                             kernel's size if count_padding, else by the elements inside the image
reduce(x; fn=sum|mean|max|any, axes, keepdim)
cumsum(x; axis)                              inclusive
unary(x; fn)                                 gelu is the one of erf, gelu_tanh its tanh approximation
binary(a, b; fn) or binary(a; fn, scalar, scalar_left)   with scalar_left the scalar is on the left
compare(a, b; fn) or compare(a; fn, scalar)  to bool
where(condition, a, b)
multiply_add(a, b, c)                        a * b + c, rounded once
rope(x[...,T,D], cos, sin)                   rotary positions: a, b = x[i], x[i + D/2] become a cos - b sin,
                                             b cos + a sin.
                                             Tables broadcast to x; rows of D, or of D/2 for both halves alike
cast(x; dtype)                               float to integer truncates; to bool is x != 0
concat(x, ...; axis)   slice(x; axis, start, end, step)   reshape(x; shape)   permute(x; perm)   broadcast(x; shape)
iota(; dtype, length, start, step)           start + i * step, each by one rounding to dtype
fill(; dtype, shape, value)
gather(x, index; axis)   scatter(x, index, source; axis)   as torch.gather and torch.Tensor.scatter
upsample(x[B,C,H,W]; fn=nearest|bilinear, size, align_corners)
                                             source position of i: nearest floor(i * in / out); bilinear
                                             (i + 0.5) * in / out - 0.5, at least 0; with align_corners
                                             i * (in - 1) / (out - 1)
lstm_cell(x[B,I], h[B,H], c[B,H], w_ih[4H,I], w_hh[4H,H], b_ih[4H]?, b_hh[4H]?)   [2,B,H]: new h, then new c; gates in
                                             torch's order (input, forget, cell, output)
copy_to(x; device)                           the same values on another device
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lf_hal.lir import _rules, _rules_products
from lf_hal.lir.errors import OpRuleError
from lf_hal.lir.graph import DTYPES, Attr, Op, TensorType, Value, freeze

__all__ = [
    "ACTIVATIONS",
    "BINARY",
    "COMPARE",
    "OPS",
    "REDUCE",
    "UNARY",
    "AttrSpec",
    "OpSpec",
    "infer",
    "make_op",
]

UNARY = (
    "abs", "cos", "erf", "exp", "gelu", "gelu_tanh", "log", "neg", "not", "relu", "rsqrt", "sigmoid", "silu", "sin",
    "sqrt", "tanh",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "pow", "max", "min", "and", "or")
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
REDUCE = ("sum", "mean", "max", "any")
ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh")

Rule = Callable[[Sequence[TensorType], dict[str, Any]], TensorType]
MANY = 1 << 20


@dataclass(frozen=True)
class AttrSpec:
    """``type`` is one of int, float, number (either), bool, str, ints, pair; ``choices`` limits a str.

    An attribute without ``default`` must be given, unless it is ``optional`` and may be absent.
    """

    type: str
    default: Attr | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class OpSpec:
    """``least`` to ``most`` inputs, attributes by name, and the rule that gives the output's type."""

    least: int
    most: int
    rule: Rule
    attrs: Mapping[str, AttrSpec] = field(default_factory=dict)


_INT, _BOOL, _INTS = AttrSpec("int"), AttrSpec("bool"), AttrSpec("ints")
_NUMBER, _FLOAT, _PAIR = AttrSpec("number"), AttrSpec("float"), AttrSpec("pair")
_DTYPE = AttrSpec("str", choices=tuple(DTYPES))
_ACT = AttrSpec("str", "none", ACTIVATIONS)
_CONV = {
    "stride": AttrSpec("pair", (1, 1)),
    "padding": AttrSpec("pair", (0, 0)),
    "dilation": AttrSpec("pair", (1, 1)),
    "groups": AttrSpec("int", 1),
    "act": _ACT,
}
_SCALAR = {"scalar": AttrSpec("number", optional=True), "scalar_left": AttrSpec("bool", False)}

OPS: dict[str, OpSpec] = {
    "affine_channel": OpSpec(3, 3, _rules.channels),
    "attention": OpSpec(3, 4, _rules.attention, {"causal": AttrSpec("bool", False), "scale": _FLOAT}),
    "batch_norm": OpSpec(5, 5, _rules.channels, {"eps": _FLOAT}),
    "binary": OpSpec(1, 2, _rules.binary, {"fn": AttrSpec("str", choices=BINARY), **_SCALAR}),
    "broadcast": OpSpec(1, 1, _rules.broadcast, {"shape": _INTS}),
    "cast": OpSpec(1, 1, _rules.cast, {"dtype": _DTYPE}),
    "compare": OpSpec(
        1,
        2,
        _rules.compare,
        {"fn": AttrSpec("str", choices=COMPARE), "scalar": AttrSpec("number", optional=True)},
    ),
    "concat": OpSpec(1, MANY, _rules.concat, {"axis": _INT}),
    "conv2d": OpSpec(2, 3, _rules.conv2d, _CONV),
    "conv_add_act": OpSpec(3, 5, _rules_products.conv_add, _CONV),
    "conv_i8": OpSpec(3, 5, _rules_products.conv_i8, _CONV),
    "conv_affine_act": OpSpec(4, 4, _rules.conv2d, _CONV),
    "copy_to": OpSpec(1, 1, _rules.same, {"device": AttrSpec("str")}),
    "cumsum": OpSpec(1, 1, _rules.cumsum, {"axis": _INT}),
    "embedding": OpSpec(2, 2, _rules.embedding),
    "fill": OpSpec(0, 0, _rules.fill, {"dtype": _DTYPE, "shape": _INTS, "value": _NUMBER}),
    "gather": OpSpec(2, 2, _rules.gather, {"axis": _INT}),
    "iota": OpSpec(
        0,
        0,
        _rules.iota,
        {"dtype": _DTYPE, "length": _INT, "start": AttrSpec("number", 0), "step": AttrSpec("number", 1)},
    ),
    "layer_norm": OpSpec(1, 3, _rules.over_last_axis, {"eps": _FLOAT}),
    "linear": OpSpec(2, 3, _rules.linear),
    "linear_act": OpSpec(2, 3, _rules.linear, {"act": _ACT}),
    "linear_i8": OpSpec(3, 4, _rules_products.linear_i8, {"act": _ACT}),
    "lstm_cell": OpSpec(5, 7, _rules.lstm_cell),
    "matmul": OpSpec(2, 2, _rules.matmul),
    "multiply_add": OpSpec(3, 3, _rules.multiply_add),
    "permute": OpSpec(1, 1, _rules.permute, {"perm": _INTS}),
    "pool2d": OpSpec(
        1,
        1,
        _rules.pool2d,
        {
            "fn": AttrSpec("str", choices=("max", "avg")),
            "kernel": _PAIR,
            "stride": _PAIR,
            "padding": AttrSpec("pair", (0, 0)),
            "count_padding": AttrSpec("bool", True),
        },
    ),
    "reduce": OpSpec(
        1,
        1,
        _rules.reduce,
        {"fn": AttrSpec("str", choices=REDUCE), "axes": _INTS, "keepdim": AttrSpec("bool", False)},
    ),
    "reshape": OpSpec(1, 1, _rules.reshape, {"shape": _INTS}),
    "rms_norm": OpSpec(1, 2, _rules.over_last_axis, {"eps": _FLOAT}),
    "rope": OpSpec(3, 3, _rules.rope),
    "scatter": OpSpec(3, 3, _rules.scatter, {"axis": _INT}),
    "slice": OpSpec(
        1, 1, _rules.slice_, {"axis": _INT, "start": _INT, "end": _INT, "step": AttrSpec("int", 1)}
    ),
    "softmax": OpSpec(1, 1, _rules.over_last_axis),
    "unary": OpSpec(1, 1, _rules.unary, {"fn": AttrSpec("str", choices=UNARY)}),
    "upsample": OpSpec(
        1,
        1,
        _rules.upsample,
        {
            "fn": AttrSpec("str", choices=("nearest", "bilinear")),
            "size": _PAIR,
            "align_corners": AttrSpec("bool", False),
        },
    ),
    "where": OpSpec(3, 3, _rules.where),
}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _fits(value: object, spec: AttrSpec) -> bool:
    if spec.type in ("ints", "pair"):
        whole = isinstance(value, tuple) and all(map(_is_int, value))
        return whole and (spec.type == "ints" or len(value) == 2)  # type: ignore[arg-type]
    if spec.type == "str":
        return isinstance(value, str) and (not spec.choices or value in spec.choices)
    if spec.type == "bool":
        return isinstance(value, bool)
    if spec.type == "int":
        return _is_int(value)
    if isinstance(value, float):
        return value == value
    return spec.type == "number" and _is_int(value)


def _checked(spec: OpSpec, kind: str, attrs: Mapping[str, Attr]) -> dict[str, Any]:
    specs = spec.attrs
    unknown = sorted(set(attrs) - set(specs))
    if unknown:
        raise OpRuleError(kind, f"no attribute {unknown[0]!r}; it has {', '.join(specs) or 'none'}")
    for name, wanted in specs.items():
        if name not in attrs:
            if not wanted.optional:
                raise OpRuleError(kind, f"attribute {name} is missing")
        elif not _fits(attrs[name], wanted):
            allowed = " or ".join(map(repr, wanted.choices)) or wanted.type
            raise OpRuleError(kind, f"attribute {name} is {attrs[name]!r}; it must be {allowed}")
    return dict(attrs)


def infer(kind: str, types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    """Type of the output of ``kind`` for inputs of these types; every attribute must be there.

    Raises:
        OpRuleError: no such kind, or inputs or attributes that it does not allow.
    """
    if kind not in OPS:
        raise OpRuleError(kind, "no such op kind; lf_hal.lir.OPS lists them")
    return infer_with(OPS[kind], kind, types, attrs)


def infer_with(spec: OpSpec, kind: str, types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    """As :func:`infer`, for a kind of any table."""
    if not spec.least <= len(types) <= spec.most:
        raise OpRuleError(kind, f"{len(types)} inputs; it takes {spec.least} to {spec.most}")
    given = _checked(spec, kind, attrs)
    try:
        return spec.rule(types, given)
    except _rules.RuleError as e:
        raise OpRuleError(kind, str(e)) from None


def make_op(
    kind: str,
    name: str,
    inputs: Sequence[Value],
    attrs: Mapping[str, Attr] | None = None,
    affinity: str | None = None,
) -> Op:
    """An op with defaults filled in and the type of its output ``name`` found.

    Raises:
        OpRuleError: as :func:`infer`.
    """
    specs = OPS[kind].attrs if kind in OPS else {}
    full = {n: s.default for n, s in specs.items() if s.default is not None} | dict(attrs or {})
    output = Value(name, infer(kind, [v.type for v in inputs], full))
    return Op(kind, tuple(v.name for v in inputs), output, freeze(full), affinity)
