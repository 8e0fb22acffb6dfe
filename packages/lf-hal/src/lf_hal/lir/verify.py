"""Is this a graph? Every way in which it is not is one typed error that names the op and the value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from lf_hal.lir import ops, recipes
from lf_hal.lir.errors import (
    BadConstantError,
    BadOpError,
    BadRecipeError,
    BadTypeError,
    DuplicateValueError,
    MalformedError,
    OpRuleError,
    TypeMismatchError,
    UndefinedValueError,
    UnknownKindError,
)
from lf_hal.lir.graph import DTYPES, FLOATS, Constant, Graph, Op, Recipe, TensorType, Value

__all__ = ["verify"]

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
LARGEST = 1 << 62  # elements of one value: sizes in bytes stay within 64 bits
INT_BITS = {"i8": 8, "i32": 32, "i64": 64}
LARGEST_FLOAT = {
    "f32": (2 - 2**-23) * 2.0**127,
    "bf16": (2 - 2**-7) * 2.0**127,
    "f16": 65504.0,
}
Infer = Callable[[str, list[TensorType], Mapping[str, Any]], TensorType]


def verify(graph: Graph) -> None:
    """Raise the first fault of ``graph``, or return.

    Checked: names, types, single assignment, definition before use, every op and recipe against its rule, constants
    against their type, and that outputs exist.

    Raises:
        InvalidGraphError: one of its subclasses in :mod:`lf_hal.lir.errors`.
    """
    if not isinstance(graph, Graph):
        raise MalformedError(f"{type(graph).__name__} is no Graph")
    if not isinstance(graph.name, str):
        raise MalformedError(f"its name is {graph.name!r}, no string")
    for field, kind in _FIELDS.items():
        _tuple_of(getattr(graph, field), kind, f"graph.{field}")
    known: dict[str, TensorType] = {}
    for value in (*graph.inputs, *graph.weights):
        _define(known, value, None)
    for constant in graph.constants:
        _define(known, constant.value, None)
        _check_constant(constant)
    external = set(known) - {v.name for v in graph.inputs}
    for recipe in graph.recipes:
        _check_recipe(recipe, known, external)
        external.add(recipe.output.name)
    for op in graph.ops:
        _check_op(op, known)
    for name in graph.outputs:
        if name not in known:
            raise UndefinedValueError("is an output, but nothing defines it", value=name)


_FIELDS: dict[str, type] = {
    "inputs": Value,
    "weights": Value,
    "constants": Constant,
    "ops": Op,
    "outputs": str,
    "recipes": Recipe,
}


def _tuple_of(found: object, kind: type, what: str, op: str | None = None) -> None:
    if not isinstance(found, tuple):
        raise MalformedError(f"{what} is {type(found).__name__}, no tuple", op=op)
    for item in found:
        if not isinstance(item, kind):
            raise MalformedError(f"{what} holds {item!r}, no {kind.__name__}", op=op)


def _define(known: dict[str, TensorType], value: object, op: str | None) -> None:
    if not isinstance(value, Value):
        raise MalformedError(f"{value!r} is no Value", op=op)
    name = value.name
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise MalformedError(f"{name!r} is no name: letters, digits, _ . and -", op=op)
    _check_type(value, op)
    if name in known:
        raise DuplicateValueError("is defined twice", op=op, value=name)
    known[name] = value.type


def _check_type(value: Value, op: str | None) -> None:
    declared = value.type
    if not isinstance(declared, TensorType):
        raise MalformedError(f"its type is {declared!r}, no TensorType", op=op, value=value.name)
    if not isinstance(declared.dtype, str) or declared.dtype not in DTYPES:
        raise BadTypeError(
            f"element type {declared.dtype!r}; known: {', '.join(DTYPES)}", op=op, value=value.name
        )
    shape = declared.shape
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise BadTypeError(f"shape {shape!r} is no tuple of sizes from 0", op=op, value=value.name)
    if declared.elements > LARGEST or max(shape, default=0) > LARGEST:
        raise BadTypeError(f"shape {shape!r} has over 2**62 elements", op=op, value=value.name)


def _check_constant(constant: Constant) -> None:
    name, declared, data = constant.value.name, constant.value.type, constant.data
    if not isinstance(data, tuple):
        raise MalformedError(f"its data is {type(data).__name__}, no tuple", value=name)
    if len(data) != declared.elements:
        raise BadConstantError(f"is {declared}, but has {len(data)} elements", value=name)
    for item in data:
        if not _holds(declared.dtype, item):
            raise BadConstantError(f"element {item!r} is none of {declared.dtype}", value=name)


def _holds(dtype: str, item: object) -> bool:
    if dtype == "bool":
        return isinstance(item, bool)
    if dtype in FLOATS:
        return isinstance(item, float) and (abs(item) <= LARGEST_FLOAT[dtype] or abs(item) == float("inf"))
    limit = 1 << INT_BITS[dtype] - 1
    return type(item) is int and -limit <= item < limit


def _check_applied(op: Op | Recipe, known: dict[str, TensorType]) -> None:
    kind = op.kind
    if not isinstance(kind, str):
        raise MalformedError(f"its kind is {kind!r}, no string")
    _tuple_of(op.inputs, str, "inputs", kind)
    _tuple_of(op.attrs, tuple, "attrs", kind)
    if not all(len(a) == 2 and isinstance(a[0], str) for a in op.attrs):
        raise MalformedError(f"attrs {op.attrs!r} are no pairs of a name and a value", op=kind)
    names = [a[0] for a in op.attrs]
    if names != sorted(set(names)):
        raise MalformedError(f"attributes {names} must be sorted by name, each once", op=kind)
    if not isinstance(op.output, Value):
        raise MalformedError(f"its output is {op.output!r}, no Value", op=kind)
    for name in op.inputs:
        if name not in known:
            raise UndefinedValueError("is read before anything defines it", op=kind, value=name)


def _check_output(op: Op | Recipe, known: dict[str, TensorType], infer: Infer, broken: type[Any]) -> None:
    name = op.output.name
    try:
        expected = infer(op.kind, [known[i] for i in op.inputs], dict(op.attrs))
    except OpRuleError as e:
        raise broken(e.reason, op=op.kind, value=name) from None
    if expected != op.output.type:
        raise TypeMismatchError(str(op.output.type), str(expected), op=op.kind, value=name)


def _check_recipe(recipe: Recipe, known: dict[str, TensorType], external: set[str]) -> None:
    _check_applied(recipe, known)
    if recipe.kind not in recipes.RECIPES:
        reason = f"no such recipe; there are {', '.join(recipes.RECIPES)}"
        raise UnknownKindError(reason, op=recipe.kind, value=str(recipe.output.name))
    for name in recipe.inputs:
        if name not in external:
            raise BadRecipeError(
                "is read by a recipe, but is neither weight nor constant", op=recipe.kind, value=name
            )
    _define(known, recipe.output, recipe.kind)
    _check_output(recipe, known, recipes.infer_recipe, BadRecipeError)


def _check_op(op: Op, known: dict[str, TensorType]) -> None:
    _check_applied(op, known)
    if op.kind not in ops.OPS:
        raise UnknownKindError("no such op kind", op=op.kind, value=str(op.output.name))
    affinity = op.hardware_affinity
    if affinity is not None and not (isinstance(affinity, str) and NAME.fullmatch(affinity)):
        raise MalformedError(
            f"hardware_affinity {affinity!r} is no name", op=op.kind, value=str(op.output.name)
        )
    _define(known, op.output, op.kind)
    _check_output(op, known, ops.infer, BadOpError)
