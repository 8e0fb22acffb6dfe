"""The plain twin: a graph run by numpy, in float64 or float32. Everything else is held to it.

In float64 nothing is rounded to a narrower type, so it is what the mathematics says, up to 1e-16. In float32 every op
rounds its result to its element type (bfloat16 and float16 too), in numpy's order of operations, which is not the
order of lf-hal's kernels. Slow, and meant to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lf_hal.lir import _reference_ops
from lf_hal.lir.errors import LirError
from lf_hal.lir.graph import FLOATS, Graph, TensorType, Value
from lf_hal.lir.recipes import apply_recipes

__all__ = ["BadBufferError", "run"]

Array = NDArray[Any]
INTEGERS: dict[str, Any] = {"i8": np.int8, "i32": np.int32, "i64": np.int64, "bool": np.bool_}


class BadBufferError(LirError):
    """An input or weight is missing or of another shape. Attributes ``name``, ``expected``, ``found`` (as text)."""

    def __init__(self, name: str, expected: str, found: str) -> None:
        self.name, self.expected, self.found = name, expected, found
        super().__init__(f"%{name} must be {expected}, not {found}")


def run(
    graph: Graph,
    inputs: Mapping[str, Array],
    weights: Mapping[str, Array] | None = None,
    precision: Literal["float32", "float64"] = "float32",
) -> dict[str, Array]:
    """Outputs of the graph by name.

    Args:
        graph: a verified one.
        inputs: an array for every input; floats of any width, uint16 being bfloat16's bits.
        weights: likewise for every weight.
        precision: what floats are computed in. Outputs of f32, bf16 and f16 come as arrays of it.

    Raises:
        BadBufferError: an input or weight is missing or has another shape.
    """
    work = np.dtype(precision)
    known: dict[str, Array] = {}
    for values, given in ((graph.inputs, inputs), (graph.weights, weights or {})):
        known.update({v.name: _given(v, given, work) for v in values})
    for c in graph.constants:
        known[c.value.name] = np.array(c.data, _working(c.value.type, work)).reshape(c.value.type.shape)
    derived = apply_recipes(graph, known)
    known.update({r.output.name: _given(r.output, derived, work) for r in graph.recipes})
    with np.errstate(all="ignore"):
        for op in graph.ops:
            arrays = [known[name] for name in op.inputs]
            known[op.output.name] = _rounded(_reference_ops.compute(op, arrays, work), op.output.type, work)
    return {name: known[name] for name in graph.outputs}


def _working(t: TensorType, work: np.dtype[Any]) -> Any:
    return work if t.dtype in FLOATS else INTEGERS[t.dtype]


def _given(value: Value, given: Mapping[str, Array], work: np.dtype[Any]) -> Array:
    if value.name not in given:
        raise BadBufferError(value.name, str(value.type), "missing")
    array = np.asarray(given[value.name])
    if array.shape != value.type.shape:
        raise BadBufferError(value.name, str(value.type), f"of shape {list(array.shape)}")
    if array.dtype == np.uint16 and value.type.dtype == "bf16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if (array.dtype.kind == "f") != (value.type.dtype in FLOATS):
        raise BadBufferError(value.name, str(value.type), f"of {array.dtype}")
    return array.astype(_working(value.type, work))


def _rounded(array: Array, t: TensorType, work: np.dtype[Any]) -> Array:
    """``array`` as a value of this type: the declared shape is held, and in float32 narrow floats are rounded."""
    if array.shape != t.shape:
        raise RuntimeError(f"the reference gave shape {array.shape} for {t}")
    if work == np.float32 and t.dtype == "f16":
        array = array.astype(np.float16)
    if work == np.float32 and t.dtype == "bf16":
        array = _to_bf16(array)
    return array.astype(_working(t, work))


def _to_bf16(array: Array) -> Array:
    """float32 values rounded to nearest even bfloat16, as float32."""
    x = np.ascontiguousarray(array, np.float32)
    bits = x.view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), x, nearest)
