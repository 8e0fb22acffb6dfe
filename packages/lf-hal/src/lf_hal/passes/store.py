"""Weights of products stored narrow: bf16, f16, or int8 with one scale for each output channel.

A weight is stored narrow if products and embeddings alone read it, as their weights. Sums stay float32 in order v1:
every stored element is widened exactly. For int8, ``linear_i8`` and ``conv_i8`` multiply a finished sum by the scale
of its channel, before the bias; a row of an embedding is widened and multiplied by its scale.
"""

from __future__ import annotations

from lf_hal.lir.graph import Graph, Op, Value
from lf_hal.lir.ops import make_op
from lf_hal.lir.recipes import make_recipe
from lf_hal.lir.rewrite import Editor

__all__ = ["WEIGHTS_DTYPES", "store_weights"]

WEIGHTS_DTYPES = ("f32", "bf16", "f16", "i8")
_PRODUCTS = {
    "linear": "linear_i8",
    "linear_act": "linear_i8",
    "conv2d": "conv_i8",
    "conv_affine_act": "conv_i8",
    "conv_add_act": "conv_i8",
}


def store_weights(graph: Graph, dtype: str) -> Graph:
    """``graph`` with its products' weights stored as ``dtype``; what else reads them keeps them in float32.

    Raises:
        ValueError: ``dtype`` is none of :data:`WEIGHTS_DTYPES`.
    """
    if dtype not in WEIGHTS_DTYPES:
        raise ValueError(f"weights_dtype={dtype!r}; give one of {', '.join(WEIGHTS_DTYPES)}")
    if dtype == "f32":
        return graph
    e = Editor(graph)
    stored: dict[str, tuple[Value, Value | None]] = {}
    for name in _narrowable(e):
        w = e.values[name]
        if dtype == "i8":
            scale = e.add_recipe(make_recipe("int8_scale", e.fresh(f"{name}.i8_scale"), [w]))
            stored[name] = e.add_recipe(make_recipe("int8_rows", e.fresh(f"{name}.i8"), [w, scale])), scale
        else:
            narrow = make_recipe("narrow", e.fresh(f"{name}.{dtype}"), [w], dtype=dtype)
            stored[name] = e.add_recipe(narrow), None
    for op in e.graph.ops:
        if op.kind == "embedding" and op.inputs[0] in stored:
            e.replace(op, *_embedding(e, op, *stored[op.inputs[0]]))
        elif op.kind in _PRODUCTS and op.inputs[1] in stored:
            e.replace(op, *_product(e, op, *stored[op.inputs[1]]))
    return e.done()


def _narrowable(e: Editor) -> list[str]:
    """Weights, in order, that are read in no other place than that of the weights of a product or an embedding."""
    derived = [r.output.name for r in e.graph.recipes]
    names = [w.name for w in e.graph.weights if w.type.dtype == "f32"]
    kept = set(e.graph.outputs)
    read: set[str] = set()
    for op in e.graph.ops:
        at = 1 if op.kind in _PRODUCTS else 0 if op.kind == "embedding" else None
        for i, name in enumerate(op.inputs):
            table = op.kind == "embedding" and len(e.values[name].type.shape) != 2
            (read if i == at and not table else kept).add(name)
    return [n for n in (*names, *derived) if n in read and n not in kept]


def _product(e: Editor, op: Op, w: Value, scale: Value | None) -> list[Op]:
    """The product with the stored weight; one of int8 that adds a residual comes apart again, which changes no bit."""
    x, rest = e.values[op.inputs[0]], [e.values[n] for n in op.inputs[2:]]
    attrs, name, affinity = dict(op.attrs), op.output.name, op.hardware_affinity
    if scale is None:
        return [make_op(op.kind, name, [x, w, *rest], attrs, affinity)]
    if op.kind != "conv_add_act":
        return [make_op(_PRODUCTS[op.kind], name, [x, w, scale, *rest], attrs, affinity)]
    residual, act = rest.pop(0), op.get_str("act")
    inner = e.fresh(f"{name}.conv")
    conv = make_op("conv_i8", inner, [x, w, scale, *rest], {**attrs, "act": "none"}, affinity)
    total = name if act == "none" else e.fresh(f"{name}.sum")
    added = make_op("binary", total, [conv.output, residual], {"fn": "add"}, affinity)
    end = [] if act == "none" else [make_op("unary", name, [added.output], {"fn": act}, affinity)]
    return [conv, added, *end]


def _embedding(e: Editor, op: Op, table: Value, scale: Value | None) -> list[Op]:
    """Rows of the narrow table, widened, and multiplied by their scales if they have some."""
    index, name, affinity = e.values[op.inputs[1]], op.output.name, op.hardware_affinity

    def made(kind: str, suffix: str, inputs: list[Value], **attrs: int | str | tuple[int, ...]) -> Op:
        final = name if not suffix else e.fresh(f"{name}.{suffix}")
        return make_op(kind, final, inputs, attrs, affinity)

    rows = made("embedding", "stored", [table, index])
    if scale is None:
        return [rows, made("cast", "", [rows.output], dtype="f32")]
    wide = made("cast", "wide", [rows.output], dtype="f32")
    column = made("reshape", "column", [scale], shape=(*scale.type.shape, 1))
    scales = made("embedding", "scales", [column.output, index])
    return [rows, wide, column, scales, made("binary", "", [wide.output, scales.output], fn="mul")]
