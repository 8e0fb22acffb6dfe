"""Weights derived from weights and constants: what each recipe kind computes, bit for bit.

All arithmetic is float64, operation by operation as written, each rounded to nearest even; the result is rounded to
its element type once. Only + - * / and square root occur, so every machine gives the same bits.

    batch_norm_scale(weight[C], var[C]; eps)               weight / sqrt(var + eps)
    batch_norm_shift(bias[C], mean[C], scale[C])           bias - mean * scale
    scale_rows(w[O,...], scale[O])                         w[o] * scale[o]
    scale_shift(bias[O], scale[O], shift[O])               bias * scale + shift
    narrow(w; dtype)                                       w as bf16 or f16
    int8_scale(w[O,...])                                   largest |w[o]| / 127; 1 where that is 0
    int8_rows(w[O,...], scale[O])                          w[o] / scale[o] to the nearest integer (ties to even) within
                                                           -127 .. 127, as i8
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lf_hal.lir import _rules
from lf_hal.lir.errors import OpRuleError
from lf_hal.lir.graph import Attr, Graph, Recipe, TensorType, Value, freeze
from lf_hal.lir.ops import AttrSpec, OpSpec, infer_with

__all__ = ["RECIPES", "apply_recipes", "infer_recipe", "make_recipe"]

Array = NDArray[np.float64]


def _vectors(types: Sequence[TensorType], a: dict[str, Any]) -> TensorType:
    first = types[0]
    _rules.need(first.dtype == "f32", f"{first} must be f32")
    _rules.same_dtype(types)
    for t in types:
        _rules.ranked(t, 1, "an input")
        _rules.shaped(t, first.shape, "an input")
    return first


def _rows(types: Sequence[TensorType], a: dict[str, Any]) -> TensorType:
    w, scale = types
    _rules.need(w.dtype == "f32", f"{w} must be f32")
    _rules.same_dtype(types)
    _rules.need(len(w.shape) >= 1, "w is a scalar")
    _rules.shaped(scale, (w.shape[0],), "scale")
    return w


def _narrow(types: Sequence[TensorType], a: dict[str, Any]) -> TensorType:
    _rules.need(types[0].dtype == "f32", f"{types[0]} must be f32")
    return TensorType(a["dtype"], types[0].shape)


def _int8_scale(types: Sequence[TensorType], a: dict[str, Any]) -> TensorType:
    (w,) = types
    _rules.need(w.dtype == "f32", f"{w} must be f32")
    _rules.need(len(w.shape) >= 1, "w is a scalar")
    return TensorType("f32", w.shape[:1])


def _int8_rows(types: Sequence[TensorType], a: dict[str, Any]) -> TensorType:
    return TensorType("i8", _rows(types, a).shape)


RECIPES: dict[str, OpSpec] = {
    "batch_norm_scale": OpSpec(2, 2, _vectors, {"eps": AttrSpec("float")}),
    "batch_norm_shift": OpSpec(3, 3, _vectors),
    "int8_rows": OpSpec(2, 2, _int8_rows),
    "int8_scale": OpSpec(1, 1, _int8_scale),
    "narrow": OpSpec(1, 1, _narrow, {"dtype": AttrSpec("str", choices=("bf16", "f16"))}),
    "scale_rows": OpSpec(2, 2, _rows),
    "scale_shift": OpSpec(3, 3, _vectors),
}


def _over_rows(scale: Array, w: Array) -> Array:
    return scale.reshape(-1, *[1] * (w.ndim - 1))


def _largest_step(w: Array) -> Array:
    step = np.abs(w).reshape(len(w), -1).max(axis=1, initial=0) / 127
    return np.where(step.astype(np.float32) == 0, 1, step)


_COMPUTE: dict[str, Callable[[Recipe, Sequence[Array]], Array]] = {
    "batch_norm_scale": lambda r, x: x[0] / np.sqrt(x[1] + r.get_float("eps")),
    "batch_norm_shift": lambda r, x: x[0] - x[1] * x[2],
    "int8_rows": lambda r, x: np.clip(np.rint(x[0] / _over_rows(x[1], x[0])), -127, 127),
    "int8_scale": lambda r, x: _largest_step(x[0]),
    "narrow": lambda r, x: x[0],
    "scale_rows": lambda r, x: x[0] * _over_rows(x[1], x[0]),
    "scale_shift": lambda r, x: x[0] * x[1] + x[2],
}


def infer_recipe(kind: str, types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    """Type of a recipe's output.

    Raises:
        OpRuleError: no such kind, or inputs or attributes that it does not allow.
    """
    if kind not in RECIPES:
        raise OpRuleError(kind, f"no such recipe; there are {', '.join(RECIPES)}")
    return infer_with(RECIPES[kind], kind, types, attrs)


def make_recipe(kind: str, name: str, inputs: Sequence[Value], **attrs: Attr) -> Recipe:
    """A recipe whose output ``name`` has the type that the rule gives; raises as :func:`infer_recipe`."""
    output = Value(name, infer_recipe(kind, [v.type for v in inputs], attrs))
    return Recipe(kind, tuple(v.name for v in inputs), output, freeze(attrs))


def apply_recipes(graph: Graph, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """``weights`` and what the graph's recipes derive from them, by name; bf16 as uint16 bits.

    Args:
        weights: arrays by the names of ``graph.weights``; others may be there too, and are kept.
    """
    known: dict[str, NDArray[Any]] = dict(weights)
    small = {c.value.name: np.array(c.data).reshape(c.value.type.shape) for c in graph.constants}
    for recipe in graph.recipes:
        inputs = [np.asarray(known[n] if n in known else small[n], np.float64) for n in recipe.inputs]
        with np.errstate(all="ignore"):
            found = _COMPUTE[recipe.kind](recipe, inputs)
            known[recipe.output.name] = _ROUND[recipe.output.type.dtype](found)
    return known


def _bf16_bits(x: Array) -> NDArray[Any]:
    """float64 values that float32 holds, rounded to nearest even; NaN is 0x7fc0."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), nearest)


_ROUND: dict[str, Callable[[Array], NDArray[Any]]] = {
    "f32": lambda x: x.astype(np.float32),
    "f16": lambda x: x.astype(np.float16),
    "bf16": _bf16_bits,
    "i8": lambda x: x.astype(np.int8),
}
