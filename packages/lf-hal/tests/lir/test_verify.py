"""Every malformed graph is one typed error that names op and value."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lir_graphs import graphs, sample, value

from lf_hal.lir import Constant, Graph, Op, TensorType, Value, verify
from lf_hal.lir import errors as e

GRAPH = sample()
CONV, AFFINE, TOTAL = GRAPH.ops


def ops(*found: Any) -> Graph:
    return replace(GRAPH, ops=found, outputs=())


def output(op: Op, **changes: Any) -> Op:
    return replace(op, output=replace(op.output, **changes))


CASES: dict[str, tuple[Any, type[e.InvalidGraphError], str | None, str | None]] = {
    "no graph": (3, e.MalformedError, None, None),
    "name is no string": (replace(GRAPH, name=None), e.MalformedError, None, None),  # type: ignore[arg-type]
    "list of ops": (replace(GRAPH, ops=[CONV]), e.MalformedError, None, None),  # type: ignore[arg-type]
    "ops that are none": (ops("relu"), e.MalformedError, None, None),
    "empty name": (replace(GRAPH, inputs=(value(""),)), e.MalformedError, None, None),
    "name with a space": (replace(GRAPH, inputs=(value("a b"),)), e.MalformedError, None, None),
    "no type": (replace(GRAPH, inputs=(Value("x", None),)), e.MalformedError, None, "x"),  # type: ignore[arg-type]
    "unknown dtype": (replace(GRAPH, inputs=(value("x", dtype="f8"),)), e.BadTypeError, None, "x"),
    "unhashable dtype": (
        replace(GRAPH, inputs=(value("x", dtype=[]),)),  # type: ignore[arg-type]
        e.BadTypeError,
        None,
        "x",
    ),
    "negative size": (replace(GRAPH, inputs=(value("x", -1),)), e.BadTypeError, None, "x"),
    "size that is a truth": (replace(GRAPH, inputs=(value("x", True),)), e.BadTypeError, None, "x"),
    "huge shape": (replace(GRAPH, inputs=(value("x", 1 << 40, 1 << 40),)), e.BadTypeError, None, "x"),
    "two of one name": (
        replace(GRAPH, inputs=(*GRAPH.inputs, value("bn.weight"))),
        e.DuplicateValueError,
        None,
        "bn.weight",
    ),
    "assigned twice": (ops(CONV, CONV), e.DuplicateValueError, "conv2d", "y"),
    "used before it is there": (ops(AFFINE, CONV), e.UndefinedValueError, "affine_channel", "y"),
    "reads itself": (ops(replace(CONV, inputs=("y", "conv.weight"))), e.UndefinedValueError, "conv2d", "y"),
    "output of nothing": (replace(GRAPH, outputs=("q",)), e.UndefinedValueError, None, "q"),
    "unknown kind": (ops(replace(CONV, kind="conv3d")), e.UnknownKindError, "conv3d", "y"),
    "kind that is a number": (ops(replace(CONV, kind=3)), e.MalformedError, None, None),  # type: ignore[arg-type]
    "inputs swapped": (ops(replace(CONV, inputs=("conv.weight", "x"))), e.BadOpError, "conv2d", "y"),
    "attribute gone": (ops(replace(CONV, attrs=CONV.attrs[1:])), e.BadOpError, "conv2d", "y"),
    "attribute of another type": (
        ops(replace(CONV, attrs=(("act", 1), *CONV.attrs[1:]))),
        e.BadOpError,
        "conv2d",
        "y",
    ),
    "attributes unsorted": (ops(replace(CONV, attrs=CONV.attrs[::-1])), e.MalformedError, "conv2d", None),
    "attribute twice": (ops(replace(CONV, attrs=CONV.attrs[:1] * 2)), e.MalformedError, "conv2d", None),
    "attributes that are no pairs": (
        ops(replace(CONV, attrs=((1, 2, 3),))),
        e.MalformedError,
        "conv2d",
        None,
    ),  # type: ignore[arg-type]
    "declared shape": (
        ops(output(CONV, type=TensorType("f32", (2, 4, 8, 7)))),
        e.TypeMismatchError,
        "conv2d",
        "y",
    ),
    "declared dtype": (
        ops(output(CONV, type=TensorType("f16", (2, 4, 8, 8)))),
        e.TypeMismatchError,
        "conv2d",
        "y",
    ),
    "output that is none": (ops(replace(CONV, output="y")), e.MalformedError, "conv2d", None),  # type: ignore[arg-type]
    "affinity with a space": (ops(replace(CONV, hardware_affinity="a b")), e.MalformedError, "conv2d", "y"),
    "constant of another length": (
        replace(GRAPH, constants=(replace(GRAPH.constants[0], data=(1.0,)),)),
        e.BadConstantError,
        None,
        "shift",
    ),
    "constant beyond its type": (
        replace(GRAPH, constants=(Constant(value("c", 1, dtype="i8"), (128,)),)),
        e.BadConstantError,
        None,
        "c",
    ),
    "constant beyond float16": (
        replace(GRAPH, constants=(Constant(value("c", 1, dtype="f16"), (65505.0,)),)),
        e.BadConstantError,
        None,
        "c",
    ),
    "integer in a constant of floats": (
        replace(GRAPH, constants=(Constant(value("c", 1), (1,)),)),
        e.BadConstantError,
        None,
        "c",
    ),
    "constant that is not a number": (
        replace(GRAPH, constants=(Constant(value("c", 1), (float("nan"),)),)),
        e.BadConstantError,
        None,
        "c",
    ),
    "recipe of an input": (
        replace(GRAPH, recipes=(replace(GRAPH.recipes[0], inputs=("x", "x")),)),
        e.BadRecipeError,
        "batch_norm_scale",
        "x",
    ),
    "recipe of other shapes": (
        replace(GRAPH, recipes=(replace(GRAPH.recipes[0], inputs=("conv.weight", "bn.weight")),)),
        e.BadRecipeError,
        "batch_norm_scale",
        "bn.scale",
    ),
    "unknown recipe": (
        replace(GRAPH, recipes=(replace(GRAPH.recipes[0], kind="soup"),)),
        e.UnknownKindError,
        "soup",
        "bn.scale",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_malformed_graph_is_one_named_error(name: str) -> None:
    graph, error, op, value_name = CASES[name]
    with pytest.raises(e.InvalidGraphError) as found:
        verify(graph)
    assert (type(found.value), found.value.op, found.value.value) == (error, op, value_name)


def test_a_sound_graph_passes() -> None:
    verify(GRAPH)
    verify(Graph("empty"))


@given(graphs())
def test_random_sound_graphs_pass(graph: Graph) -> None:
    verify(graph)


JUNK = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-2, 2), max_size=3),
    st.tuples(st.sampled_from(["x", "y", "act", 0])),
    st.just(((), ())),
    st.just((("act", "relu"),)),
    st.builds(Value, st.sampled_from(["x", "new", ""]), st.just(TensorType("f32", (2,)))),
)


@given(st.data())
def test_any_field_replaced_by_junk_is_an_error_of_ours_or_sound(data: st.DataObject) -> None:
    def spoil(item: Any) -> Any:
        fields = [f.name for f in dataclasses.fields(item)]
        name = data.draw(st.sampled_from(fields))
        old = getattr(item, name)
        if dataclasses.is_dataclass(old) and data.draw(st.booleans()):
            return replace(item, **{name: spoil(old)})
        if isinstance(old, tuple) and old and data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(old) - 1))
            deeper = dataclasses.is_dataclass(old[at]) and data.draw(st.booleans())
            return replace(
                item, **{name: (*old[:at], spoil(old[at]) if deeper else data.draw(JUNK), *old[at + 1 :])}
            )
        return replace(item, **{name: data.draw(JUNK)})

    with contextlib.suppress(e.InvalidGraphError):
        verify(spoil(GRAPH))
