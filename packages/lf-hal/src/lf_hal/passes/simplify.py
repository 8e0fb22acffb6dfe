"""Ops that move nothing, moves in a row, and arithmetic on constants."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lf_hal.lir import functions
from lf_hal.lir._reference_ops import compute
from lf_hal.lir.graph import FLOATS, Constant, Graph, Op, TensorType
from lf_hal.lir.ops import make_op
from lf_hal.lir.rewrite import Editor

__all__ = ["fold_constants", "simplify"]

LARGEST = 1 << 16  # elements of a constant that is written into the graph
_EXACT = (
    "binary", "broadcast", "cast", "compare", "concat", "embedding", "fill", "gather", "iota", "multiply_add",
    "permute", "reshape", "scatter", "slice", "unary", "where",
)  # fmt: skip
_ROUNDED_ONCE = ("abs", "add", "div", "max", "min", "mul", "neg", "relu", "sqrt", "sub")
_EXACT_ON_INTEGERS = ("cumsum", "reduce")


def simplify(graph: Graph) -> Graph:
    """Without ops that give their input back, and with reshapes, or permutations, in a row as one."""
    e = Editor(graph)
    for op in e.graph.ops:
        if len(op.inputs) == 1 and _gives_back(op, e.values[op.inputs[0]].type):
            e.rename(op, op.inputs[0])
            continue
        inner = e.producer(e.final(op.inputs[0]), op.kind) if op.kind in ("reshape", "permute") else None
        if inner is None:
            continue
        source = e.values[e.final(inner.inputs[0])]
        attrs = dict(op.attrs)
        if op.kind == "permute":
            first = inner.get_ints("perm")
            attrs["perm"] = tuple(first[i] for i in op.get_ints("perm"))
        merged = make_op(op.kind, op.output.name, [source], attrs, op.hardware_affinity)
        if _gives_back(merged, source.type):
            e.rename(op, source.name)
        else:
            e.replace(op, merged)
    return e.done()


def _gives_back(op: Op, source: TensorType) -> bool:
    if op.kind == "permute":
        perm = op.get_ints("perm")
        return perm == tuple(range(len(perm)))
    if op.kind in ("reshape", "broadcast", "cast", "slice"):
        return op.output.type == source
    return op.kind == "concat"


def fold_constants(graph: Graph) -> Graph:
    """Ops of constants alone, computed now: indices, masks, positions, tables of angles.

    Integers and truths are exact. Of floats only ops that work element by element are computed; float32 ones in
    the order of ORDER.md, so they have the bits of the kernels, on whatever host this runs. Functions of bf16 and f16,
    results beyond 65,536 elements, and random access outside a table stay as they are.
    """
    e = Editor(graph)
    known: dict[str, NDArray[Any]] = {
        c.value.name: np.array(c.data).reshape(c.value.type.shape) for c in graph.constants
    }
    for op in e.graph.ops:
        if not all(n in known for n in op.inputs) or not _computable(op):
            continue
        found = _evaluated(op, [known[n] for n in op.inputs])
        if found is None:
            continue
        known[op.output.name] = found
        e.make_constant(op, Constant(op.output, tuple(found.reshape(-1).tolist())))
    return e.done()


def _computable(op: Op) -> bool:
    t = op.output.type
    if t.elements > LARGEST:
        return False
    return op.kind in _EXACT or (op.kind in _EXACT_ON_INTEGERS and t.dtype not in FLOATS)


def _evaluated(op: Op, inputs: list[NDArray[Any]]) -> NDArray[Any] | None:
    """The op's value in the element type of its output (float64 arrays that hold f32, f16 or bf16 values)."""
    dtype = op.output.type.dtype
    with np.errstate(all="ignore"):
        if dtype == "f32" and op.kind in ("unary", "binary", "multiply_add"):
            found = _by_order(op, [np.asarray(x, np.float32) for x in inputs]).astype(np.float64)
            return None if np.isnan(found).any() else found
        if dtype in FLOATS and op.kind in ("unary", "binary") and op.get_str("fn") not in _ROUNDED_ONCE:
            return None
        try:
            found = compute(op, inputs, np.dtype(np.float64))
        except IndexError:
            return None
        if dtype in FLOATS:
            found = _narrowed(np.asarray(found, np.float64), dtype)
            return None if np.isnan(found).any() else found
    return found


def _by_order(op: Op, x: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    if op.kind == "multiply_add":
        return functions.fma(*x)
    if op.kind == "unary":
        return np.asarray(functions.UNARY[op.get_str("fn")](x[0]), np.float32)
    if op.has("scalar"):
        x = [x[0], np.asarray(op.attr("scalar"), np.float32)]
        if op.has("scalar_left") and op.attr("scalar_left"):
            x.reverse()
    return np.asarray(functions.BINARY[op.get_str("fn")](*x), np.float32)


def _narrowed(x: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Rounded once, to nearest even."""
    if dtype == "f32":
        return x.astype(np.float32).astype(np.float64)
    if dtype == "f16":
        return x.astype(np.float16).astype(np.float64)
    exponent = np.frexp(x)[1]  # bfloat16: 8 bits, and subnormals in steps of 2**-133
    step = np.ldexp(1.0, np.maximum(exponent - 8, -133))
    rounded = np.where(np.isfinite(x), np.rint(np.where(np.isfinite(x), x, 0) / step) * step, x)
    return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, rounded), rounded)
