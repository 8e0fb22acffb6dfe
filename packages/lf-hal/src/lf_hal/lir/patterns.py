"""Groups of ops that are one op: rms_norm, rope, and heads repeated before attention.

Each function is a graph to an equal graph (up to rounding: a norm or rotation then is one kernel with one order of
operations). What is not recognised stays as it was, and computes the same.
"""

from __future__ import annotations

from lf_hal.lir.graph import Graph, Op, Value
from lf_hal.lir.ops import make_op
from lf_hal.lir.rewrite import Editor

__all__ = ["recognise", "recognise_grouped_heads", "recognise_rms_norm", "recognise_rope"]


def recognise(graph: Graph) -> Graph:
    """All patterns of this file, in order."""
    return recognise_grouped_heads(recognise_rope(recognise_rms_norm(graph)))


def _factors(e: Editor, name: str, fn: str) -> list[tuple[str, str]]:
    """Both orders of the operands of a binary op of two tensors; nothing if the value is made otherwise."""
    op = e.producer(name, "binary", fn)
    if op is None or len(op.inputs) != 2:
        return []
    a, b = op.inputs
    return [(a, b), (b, a)]


def recognise_rms_norm(graph: Graph) -> Graph:
    """x * rsqrt(mean(x * x) + eps), and that times a vector of the last axis (pow or square, / sqrt too)."""
    e = Editor(graph)
    for op in e.graph.ops:
        found = _normalised(e, op.output.name)
        if found is not None:
            x, eps = found
            e.replace(op, make_op("rms_norm", op.output.name, [x], {"eps": eps}, op.hardware_affinity))
            continue
        for normed, w in _factors(e, op.output.name, "mul"):
            inner = e.producer(normed, "rms_norm")
            if inner is None or len(inner.inputs) != 1:
                continue
            x, weight = e.values[inner.inputs[0]], e.values[w]
            if weight.type.shape == x.type.shape[-1:] and weight.type.dtype == x.type.dtype:
                attrs = dict(inner.attrs)
                e.replace(op, make_op("rms_norm", op.output.name, [x, weight], attrs, op.hardware_affinity))
                break
    return e.done()


def _normalised(e: Editor, name: str) -> tuple[Value, float] | None:
    """(x, eps) if the value is x over the root of its mean square."""
    candidates = [(x, r, "rsqrt") for x, r in _factors(e, name, "mul")]
    candidates += [(x, r, "sqrt") for x, r in _factors(e, name, "div")[:1]]
    for x, root, fn in candidates:
        root_op = e.producer(root, "unary", fn)
        shifted = root_op and e.producer(root_op.inputs[0], "binary", "add")
        if not shifted or len(shifted.inputs) != 1:
            continue
        mean = e.producer(shifted.inputs[0], "reduce", "mean")
        value = e.values[x]
        last = len(value.type.shape) - 1
        if mean is None or mean.get_ints("axes") != (last,) or not mean.attr("keepdim"):
            continue
        square = e.producer(mean.inputs[0], "binary", "mul")
        if square is not None and square.inputs == (x, x):
            return value, shifted.get_float("scalar")
    return None


def recognise_rope(graph: Graph) -> Graph:
    """Rotary positions on pairs (i, i + D/2), in either of two ways of writing them.

    concat(a * cos - b * sin, b * cos + a * sin), and x * cos + concat(-b, a) * sin, where a, b are x's halves.
    """
    e = Editor(graph)
    for op in e.graph.ops:
        found = _halves_rotated(e, op) or _whole_rotated(e, op)
        if found is None:
            continue
        x, cos, sin = (e.values[n] for n in found)
        lead = len(x.type.shape) - 1
        if cos.type != sin.type or len(cos.type.shape) > lead + 1 or {x.type.dtype} != {cos.type.dtype}:
            continue
        if x.type != op.output.type or not _stretches(cos.type.shape[:-1], x.type.shape[:-1]):
            continue
        e.replace(op, make_op("rope", op.output.name, [x, cos, sin], {}, op.hardware_affinity))
    return e.done()


def _stretches(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))


def _half(e: Editor, name: str, which: int) -> str | None:
    """x, if the value is the lower (0) or upper (1) half of x's last axis."""
    op = e.producer(name, "slice")
    if op is None:
        return None
    shape = e.values[op.inputs[0]].type.shape
    last, size = len(shape) - 1, shape[-1]
    found = (op.get_int("axis"), op.get_int("start"), op.get_int("end"), op.get_int("step"))
    half = size // 2
    wanted = (last, which * half, (which + 1) * half, 1)
    return op.inputs[0] if size % 2 == 0 and found == wanted else None


def _joined_halves(e: Editor, op: Op | None) -> tuple[str, str] | None:
    """Operands of a concat of two parts on the last axis."""
    if op is None or op.kind != "concat" or len(op.inputs) != 2:
        return None
    last = len(op.output.type.shape) - 1
    return (op.inputs[0], op.inputs[1]) if op.get_int("axis") == last else None


def _halves_rotated(e: Editor, op: Op) -> tuple[str, str, str] | None:
    parts = _joined_halves(e, op)
    if parts is None:
        return None
    low, high = parts
    for a_cos, b_sin in _factors(e, low, "sub")[:1]:
        for a, cos in _factors(e, a_cos, "mul"):
            x = _half(e, a, 0)
            for b, sin in _factors(e, b_sin, "mul"):
                if x is None or _half(e, b, 1) != x:
                    continue
                if _is_sum(e, high, (b, cos), (a, sin)):
                    return x, cos, sin
    return None


def _is_sum(e: Editor, name: str, first: tuple[str, str], second: tuple[str, str]) -> bool:
    return any(
        first in _factors(e, p, "mul") and second in _factors(e, q, "mul")
        for p, q in _factors(e, name, "add")
    )


def _whole_rotated(e: Editor, op: Op) -> tuple[str, str, str] | None:
    for x_cos, turned_sin in _factors(e, op.output.name, "add"):
        for turned, sin in _factors(e, turned_sin, "mul"):
            x = _turned(e, turned)
            for same, cos in _factors(e, x_cos, "mul"):
                if x is not None and same == x:
                    return x, cos, sin
    return None


def _turned(e: Editor, name: str) -> str | None:
    """x, if the value is concat(-upper half of x, lower half of x)."""
    parts = _joined_halves(e, e.producer(name, "concat"))
    negated = parts and e.producer(parts[0], "unary", "neg")
    if not parts or not negated:
        return None
    x = _half(e, parts[1], 0)
    return x if x is not None and _half(e, negated.inputs[0], 1) == x else None


def recognise_grouped_heads(graph: Graph) -> Graph:
    """Attention whose key and value heads were repeated before: it reads the shared heads itself."""
    e = Editor(graph)
    for op in e.graph.ops:
        if op.kind != "attention":
            continue
        q, k, v = (e.values[n] for n in op.inputs[:3])
        shared = [_unrepeated(e, n.name) for n in (k, v)]
        if shared[0] is None or shared[1] is None or shared[0].type.shape[1] != shared[1].type.shape[1]:
            continue
        rest = [e.values[n] for n in op.inputs[3:]]
        inputs = [q, shared[0], shared[1], *rest]
        e.replace(op, make_op("attention", op.output.name, inputs, dict(op.attrs), op.hardware_affinity))
    return e.done()


def _unrepeated(e: Editor, name: str) -> Value | None:
    """[B, G, S, D] if the value is each of its heads repeated in a row: [B, G * n, S, D]."""
    joined = e.producer(name, "reshape")
    wide = joined and e.producer(joined.inputs[0], "broadcast")
    apart = wide and e.producer(wide.inputs[0], "reshape")
    if not joined or not wide or not apart:
        return None
    x = e.values[apart.inputs[0]]
    if len(x.type.shape) != 4:
        return None
    b, g, s, d = x.type.shape
    shapes = (apart.output.type.shape, wide.output.type.shape, joined.output.type.shape)
    times = joined.output.type.shape[1] // max(g, 1) if len(joined.output.type.shape) == 4 else 0
    return x if shapes == ((b, g, 1, s, d), (b, g, times, s, d), (b, g * times, s, d)) else None
