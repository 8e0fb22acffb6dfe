"""Neighbours joined into one op, so that what lies between them is never written to memory.

A value is only taken inside if one op, and no output, reads it, and ops that are marked for different hardware stay
apart. Fused ops compute the same operations in the same
order as the ops they replace, except that a product and a sum become one multiply-add, which rounds once.
"""

from __future__ import annotations

from dataclasses import replace

from lf_hal.lir.graph import FLOATS, Graph, Op, freeze
from lf_hal.lir.ops import ACTIVATIONS, make_op
from lf_hal.lir.rewrite import Editor, agree

__all__ = ["fuse_conv", "fuse_linear", "fuse_multiply_add", "fuse_residual"]


def fuse_conv(graph: Graph) -> Graph:
    """conv2d + affine_channel to conv_affine_act, and an activation after either of them into it."""
    e = Editor(graph)
    for op in e.graph.ops:
        if op.kind == "affine_channel":
            conv = _inner(e, op, op.inputs[0], ("conv2d",))
            if conv is None or len(conv.inputs) != 2 or conv.attr("act") != "none":
                continue
            inputs = [e.values[n] for n in (*conv.inputs, *op.inputs[1:])]
            attrs, affinity = dict(conv.attrs), conv.hardware_affinity or op.hardware_affinity
            e.replace(op, make_op("conv_affine_act", op.output.name, inputs, attrs, affinity))
        elif _activation(op) is not None:
            conv = _inner(e, op, op.inputs[0], ("conv2d", "conv_affine_act"))
            if conv is not None and conv.attr("act") == "none":
                e.replace(op, _with_act(conv, op))
    return e.done()


def fuse_residual(graph: Graph) -> Graph:
    """conv2d or conv_affine_act + a sum with an array of its output's shape + an activation to conv_add_act."""
    e = Editor(graph)
    for op in e.graph.ops:
        if op.kind == "binary" and op.attr("fn") == "add" and len(op.inputs) == 2:
            for name, other in (op.inputs, op.inputs[::-1]):
                conv = _inner(e, op, name, ("conv2d", "conv_affine_act"))
                if conv is None or conv.attr("act") != "none" or e.values[other].type != conv.output.type:
                    continue
                inputs = [e.values[n] for n in (*conv.inputs[:2], other, *conv.inputs[2:])]
                attrs, affinity = dict(conv.attrs), conv.hardware_affinity or op.hardware_affinity
                e.replace(op, make_op("conv_add_act", op.output.name, inputs, attrs, affinity))
                break
        elif _activation(op) is not None:
            conv = _inner(e, op, op.inputs[0], ("conv_add_act",))
            if conv is not None and conv.attr("act") == "none":
                e.replace(op, _with_act(conv, op))
    return e.done()


def fuse_linear(graph: Graph) -> Graph:
    """linear + an activation to linear_act."""
    e = Editor(graph)
    for op in e.graph.ops:
        if _activation(op) is None:
            continue
        linear = _inner(e, op, op.inputs[0], ("linear",))
        if linear is not None:
            e.replace(op, _with_act(replace(linear, kind="linear_act"), op))
    return e.done()


def fuse_multiply_add(graph: Graph) -> Graph:
    """a * b + c of floats to multiply_add, which rounds once where the two ops round twice."""
    e = Editor(graph)
    for op in e.graph.ops:
        if op.kind != "binary" or op.attr("fn") != "add" or len(op.inputs) != 2:
            continue
        if op.output.type.dtype not in FLOATS:
            continue
        for product, other in (op.inputs, op.inputs[::-1]):
            mul = _inner(e, op, product, ("binary",))
            if mul is None or mul.attr("fn") != "mul" or len(mul.inputs) != 2:
                continue
            inputs = [e.values[n] for n in (*mul.inputs, other)]
            affinity = op.hardware_affinity or mul.hardware_affinity
            e.replace(op, make_op("multiply_add", op.output.name, inputs, {}, affinity))
            break
    return e.done()


def _inner(e: Editor, op: Op, name: str, kinds: tuple[str, ...]) -> Op | None:
    """The op of one of these kinds that makes a value for ``op`` alone, and may run where ``op`` should."""
    found = e.producer(name)
    if found is None or found.kind not in kinds or not e.only_use(name):
        return None
    return found if agree(found, op) else None


def _activation(op: Op) -> str | None:
    fn = op.attr("fn") if op.kind == "unary" else None
    return fn if isinstance(fn, str) and fn in ACTIVATIONS else None


def _with_act(inner: Op, act: Op) -> Op:
    attrs = freeze({**dict(inner.attrs), "act": act.get_str("fn")})
    affinity = inner.hardware_affinity or act.hardware_affinity
    return replace(inner, output=act.output, attrs=attrs, hardware_affinity=affinity)
