"""Batch norm of inference, folded away.

    batch_norm(x, weight, bias, mean, var; eps)
        = affine_channel(x, scale, shift),  scale = weight / sqrt(var + eps),  shift = bias - mean * scale
    affine_channel(conv2d(x, w, b), scale, shift)
        = conv2d(x, w', b'),  w'[o] = w[o] * scale[o],  b' = b * scale + shift  (shift where there is no b)

scale, shift, w' and b' are weights made once by recipes (float64, rounded to float32 once each, see
:mod:`lf_hal.lir.recipes`), so they have the same bits on every machine. The network's outputs change by roundings
only: one of each scale, shift and folded weight.
"""

from __future__ import annotations

from lf_hal.lir.graph import Graph, Op, Value
from lf_hal.lir.ops import make_op
from lf_hal.lir.recipes import make_recipe
from lf_hal.lir.rewrite import Editor, agree

__all__ = ["fold_affine", "fold_batch_norm", "lower_batch_norm"]


def fold_batch_norm(graph: Graph) -> Graph:
    """Every batch norm to an affine op, and into the convolution before it where nothing else reads that."""
    return fold_affine(lower_batch_norm(graph))


def lower_batch_norm(graph: Graph) -> Graph:
    """batch_norm to affine_channel. One whose parameters are computed by ops, or are not float32, stays."""
    e = Editor(graph)
    for op in e.graph.ops:
        if op.kind != "batch_norm" or not all(_is_stored(e, name) for name in op.inputs[1:]):
            continue
        weight, bias, mean, var = (e.values[n] for n in op.inputs[1:])
        scale = e.add_recipe(
            make_recipe(
                "batch_norm_scale", e.fresh(f"{op.output.name}.scale"), [weight, var], eps=op.get_float("eps")
            )
        )
        shift = e.add_recipe(
            make_recipe("batch_norm_shift", e.fresh(f"{op.output.name}.shift"), [bias, mean, scale])
        )
        x = e.values[op.inputs[0]]
        e.replace(op, make_op("affine_channel", op.output.name, [x, scale, shift], {}, op.hardware_affinity))
    return e.done()


def fold_affine(graph: Graph) -> Graph:
    """affine_channel into the weights of the convolution before it, which then gives the affine op's value."""
    e = Editor(graph)
    for op in e.graph.ops:
        conv = _foldable(e, op)
        if conv is None:
            continue
        scale, shift = (e.values[n] for n in op.inputs[1:])
        w = e.values[conv.inputs[1]]
        folded = e.add_recipe(make_recipe("scale_rows", e.fresh(f"{op.output.name}.weight"), [w, scale]))
        bias = shift
        if len(conv.inputs) == 3:
            old = e.values[conv.inputs[2]]
            bias = e.add_recipe(
                make_recipe("scale_shift", e.fresh(f"{op.output.name}.bias"), [old, scale, shift])
            )
        x: Value = e.values[conv.inputs[0]]
        attrs, affinity = dict(conv.attrs), conv.hardware_affinity or op.hardware_affinity
        e.replace(op, make_op("conv2d", op.output.name, [x, folded, bias], attrs, affinity))
    return e.done()


def _is_stored(e: Editor, name: str) -> bool:
    return e.is_stored(name) and e.values[name].type.dtype == "f32"


def _foldable(e: Editor, op: Op) -> Op | None:
    """The convolution that an affine op can go into."""
    if op.kind != "affine_channel" or not all(_is_stored(e, n) for n in op.inputs[1:]):
        return None
    conv = e.producer(op.inputs[0], "conv2d")
    if conv is None or conv.attr("act") != "none" or not e.only_use(conv.output.name):
        return None
    return conv if agree(conv, op) and all(_is_stored(e, n) for n in conv.inputs[1:]) else None
