"""Each pass: what it rewrites, what it leaves alone, and that the numbers stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lir_graphs import graphs, value
from traced import EPS, longest_sum

from lf_hal.lir import (
    Constant,
    Graph,
    Op,
    Value,
    _reference_ops,
    functions,
    make_op,
    parse,
    reference,
    to_text,
    verify,
)
from lf_hal.lir.errors import DuplicateValueError
from lf_hal.passes import (
    ConflictingSwitchesError,
    PassOptions,
    fold_affine,
    fold_batch_norm,
    fold_constants,
    fuse_conv,
    fuse_linear,
    fuse_multiply_add,
    fuse_residual,
    lower_batch_norm,
    optimize,
    optimize_and_report,
    simplify,
)
from lf_hal.passes.pipeline import PASSES

Pass = Callable[[Graph], Graph]
ROUNDS = (fold_constants, lower_batch_norm, fold_affine, fold_batch_norm, optimize)
"""Passes that make new float32 numbers, so that even in float64 results differ by their rounding."""


def kinds(graph: Graph) -> Counter[str]:
    return Counter(op.kind for op in graph.ops)


class Draft:
    """A graph written op by op; values are v0, v1, ..."""

    def __init__(self, *inputs: Value, weights: tuple[Value, ...] = ()) -> None:
        self.inputs, self.weights, self.ops = inputs, weights, list[Op]()

    def add(self, kind: str, *inputs: Value, **attrs: Any) -> Value:
        self.ops.append(make_op(kind, f"v{len(self.ops)}", inputs, attrs))
        return self.ops[-1].output

    def graph(self, *outputs: Value) -> Graph:
        graph = Graph("g", self.inputs, self.weights, (), tuple(self.ops), tuple(o.name for o in outputs))
        verify(graph)
        return graph


def buffers(values: tuple[Value, ...], seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {v.name: rng.uniform(-1, 1, v.type.shape).astype(np.float32) for v in values}


def weights_for(graph: Graph, seed: int) -> dict[str, Any]:
    """Between 0.1 and 0.5, so that a variance is one and sums stay small."""
    return {name: 0.3 + 0.2 * a for name, a in buffers(graph.weights, seed).items()}


def same_numbers(before: Graph, after: Graph, seed: int, rounds: bool) -> None:
    """Outputs of both graphs, in float64, for one random set of inputs and weights."""
    verify(after)
    assert parse(to_text(after)) == after
    assert after.inputs == before.inputs
    x, w = buffers(before.inputs, seed), weights_for(before, seed + 1)
    every = Graph(before.name, before.inputs, before.weights, before.constants, before.ops,
                  tuple(o.output.name for o in before.ops), before.recipes)  # fmt: skip
    scale = max(np.abs(a).max(initial=0) for a in reference.run(every, x, w, "float64").values())
    if scale >= 64:
        assume(False)  # a product of many sums: only random graphs have these
    bound = (64 * longest_sum(before) * EPS if rounds else 1e-13) * max(scale, 1) ** 2
    old, new = reference.run(before, x, w, "float64"), reference.run(after, x, w, "float64")
    for a, b in zip(before.outputs, after.outputs, strict=True):
        assert np.abs(old[a] - new[b]).max(initial=0) <= bound


EVERY: dict[str, Pass] = {
    "fold_batch_norm": fold_batch_norm, "optimize": optimize, **dict(PASSES),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=60, deadline=None)
@given(graph=graphs(), seed=st.integers(0, 1 << 16))
def test_random_graphs_keep_their_numbers(name: str, graph: Graph, seed: int) -> None:
    same_numbers(graph, EVERY[name](graph), seed, EVERY[name] in ROUNDS)


@settings(max_examples=40, deadline=None)
@given(graphs(), st.sampled_from(list(EVERY)))
def test_a_pass_finds_nothing_more_in_its_own_result(graph: Graph, name: str) -> None:
    once = EVERY[name](graph)
    assert EVERY[name](once) == once


@settings(max_examples=40, deadline=None)
@given(graphs(), st.lists(st.booleans(), min_size=len(PASSES), max_size=len(PASSES)), st.integers(0, 99))
def test_any_choice_of_passes_keeps_the_numbers(graph: Graph, on: list[bool], seed: int) -> None:
    options = PassOptions(**{name: flag for (name, _), flag in zip(PASSES, on, strict=True)})
    same_numbers(graph, optimize(graph, options), seed, True)


# batch norm


def normalised(*, bias: bool = False, read_twice: bool = False) -> Graph:
    x, w, b = value("x", 1, 2, 5, 5), value("w", 3, 2, 3, 3), value("b", 3)
    vectors = tuple(value(n, 3) for n in ("gamma", "beta", "mean", "var"))
    d = Draft(x, weights=(w, b, *vectors) if bias else (w, *vectors))
    conv = d.add("conv2d", x, w, *((b,) if bias else ()), padding=(1, 1))
    y = d.add("batch_norm", conv, *vectors, eps=1e-5)
    return d.graph(y, conv) if read_twice else d.graph(y)


@pytest.mark.parametrize("bias", [False, True])
def test_batch_norm_goes_into_the_convolution(bias: bool) -> None:
    before = normalised(bias=bias)
    after = fold_batch_norm(before)
    assert kinds(after) == {"conv2d": 1}
    assert len(after.ops[0].inputs) == 3
    same_numbers(before, after, 0, True)


def test_batch_norm_stays_apart_where_the_convolution_is_read_elsewhere() -> None:
    before = normalised(read_twice=True)
    after = fold_batch_norm(before)
    assert kinds(after) == {"conv2d": 1, "affine_channel": 1}
    same_numbers(before, after, 0, True)


def test_the_folded_weights_are_exactly_what_the_rule_says() -> None:
    before = normalised(bias=True)
    after = fold_batch_norm(before)
    w = weights_for(before, 5)
    found = reference.apply_recipes(after, w)
    wide = {k: v.astype(np.float64) for k, v in w.items()}
    scale = (wide["gamma"] / np.sqrt(wide["var"] + 1e-5)).astype(np.float32)
    shift = (wide["beta"] - wide["mean"] * scale.astype(np.float64)).astype(np.float32)
    assert np.array_equal(found["v1.scale"], scale)
    assert np.array_equal(found["v1.shift"], shift)
    assert np.array_equal(found["v1.weight"], w["w"] * scale[:, None, None, None])
    folded = wide["b"] * scale.astype(np.float64) + shift.astype(np.float64)
    assert np.array_equal(found["v1.bias"], folded.astype(np.float32))


def test_batch_norm_of_computed_parameters_is_left() -> None:
    x, v = value("x", 1, 3, 4), value("v", 3)
    d = Draft(x, v)
    computed = d.add("unary", v, fn="abs")
    graph = d.graph(d.add("batch_norm", x, v, v, v, computed, eps=1e-5))
    assert fold_batch_norm(graph) == graph


def test_parameters_may_be_constants() -> None:
    before = normalised()
    ones = Constant(value("ones", 3), (1.0, 1.0, 1.0))
    norm = before.ops[1]
    norm = Op(norm.kind, (norm.inputs[0], "ones", *norm.inputs[2:]), norm.output, norm.attrs)
    before = Graph("g", before.inputs, before.weights, (ones,), (before.ops[0], norm), before.outputs)
    same_numbers(before, fold_batch_norm(before), 1, True)


# fusion


def test_convolution_affine_and_activation_are_one_op() -> None:
    before = lower_batch_norm(normalised())
    y = before.ops[-1].output
    relu = make_op("unary", "r", [y], {"fn": "relu"})
    before = Graph("g", before.inputs, before.weights, (), (*before.ops, relu), ("r",), before.recipes)
    after = fuse_conv(before)
    assert kinds(after) == {"conv_affine_act": 1}
    assert after.ops[0].attr("act") == "relu"
    same_numbers(before, after, 2, False)


def test_an_activation_whose_input_is_an_output_stays() -> None:
    x, w = value("x", 2, 4), value("w", 3, 4)
    d = Draft(x, weights=(w,))
    y = d.add("linear", x, w)
    graph = d.graph(y, d.add("unary", y, fn="relu"))
    assert fuse_linear(graph) == graph


def shortcut(turned: bool = False, act: str = "none", scaled: bool = False) -> tuple[Draft, Value]:
    """relu(conv2d(x) + r)."""
    d = Draft(value("x", 1, 2, 5, 5), value("r", 1, 3, 5, 5), weights=(value("w", 3, 2, 3, 3), value("b", 3)))
    vectors = [d.weights[1]] * (2 if scaled else 1)
    kind = "conv_affine_act" if scaled else "conv2d"
    conv = d.add(kind, d.inputs[0], d.weights[0], *vectors, padding=(1, 1), act=act)
    pair = (d.inputs[1], conv) if turned else (conv, d.inputs[1])
    return d, d.add("unary", d.add("binary", *pair, fn="add"), fn="relu")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_convolution_shortcut_and_activation_are_one_op(turned: bool, scaled: bool) -> None:
    d, last = shortcut(turned, scaled=scaled)
    before = d.graph(last)
    after = fuse_residual(before)
    inputs = ("x", "w", "r", *(("b", "b") if scaled else ("b",)))
    assert [(op.kind, op.inputs, op.attr("act")) for op in after.ops] == [("conv_add_act", inputs, "relu")]
    assert parse(to_text(after)) == after
    same_numbers(before, after, 5, False)


def test_what_is_no_shortcut_stays() -> None:
    d, last = shortcut(act="relu")  # the activation comes before the sum
    assert fuse_residual(d.graph(last)) == d.graph(last)
    d, last = shortcut()
    assert fuse_residual(d.graph(last, Value("v0", last.type))) == d.graph(last, Value("v0", last.type))
    d = Draft(value("x", 1, 2, 5, 5), value("r", 1, 3, 1, 1), weights=(value("w", 3, 2, 3, 3),))
    conv = d.add("conv2d", d.inputs[0], d.weights[0], padding=(1, 1))
    for other in (d.inputs[1], conv):  # broadcast, and the convolution itself
        graph = d.graph(d.add("binary", conv, other, fn="add"))
        assert "conv_add_act" not in kinds(fuse_residual(graph))


@pytest.mark.parametrize("fn", ["relu", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh"])
def test_linear_and_activation_are_one_op(fn: str) -> None:
    x, w = value("x", 2, 4), value("w", 3, 4)
    d = Draft(x, weights=(w,))
    before = d.graph(d.add("unary", d.add("linear", x, w), fn=fn))
    after = fuse_linear(before)
    assert [(op.kind, op.attr("act")) for op in after.ops] == [("linear_act", fn)]
    same_numbers(before, after, 3, False)


@pytest.mark.parametrize("turned", [False, True])
def test_a_product_and_a_sum_are_one_op(turned: bool) -> None:
    x, y, z = value("x", 2, 4), value("y", 4), value("z", 3, 1, 1)
    d = Draft(x, y, z)
    product = d.add("binary", x, y, fn="mul")
    before = d.graph(d.add("binary", *((z, product) if turned else (product, z)), fn="add"))
    after = fuse_multiply_add(before)
    assert [(op.kind, op.inputs) for op in after.ops] == [("multiply_add", ("x", "y", "z"))]
    same_numbers(before, after, 4, False)


def test_integers_are_not_fused() -> None:
    x = value("x", 4, dtype="i64")
    d = Draft(x)
    graph = d.graph(d.add("binary", d.add("binary", x, x, fn="mul"), x, fn="add"))
    assert fuse_multiply_add(graph) == graph


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("mlu290", "mlu290", "mlu290"),
        ("mlu290", None, "mlu290"),
        (None, "npu", "npu"),
        ("mlu290", "npu", "apart"),
    ],
)
def test_ops_marked_for_different_hardware_stay_apart(
    first: str | None, second: str | None, expected: str
) -> None:
    norm = lower_batch_norm(normalised())
    y, c = norm.ops[-1].output, value("c", 1, 3, 5, 5)
    conv, affine = (replace(op, hardware_affinity=a) for op, a in zip(norm.ops, (first, second), strict=True))
    relu = make_op("unary", "r", [y], {"fn": "relu"}, first)
    product = make_op("binary", "p", [relu.output, c], {"fn": "mul"}, first)
    total = make_op("binary", "t", [product.output, c], {"fn": "add"}, second)
    ops = (conv, affine, relu, product, total)
    before = replace(norm, inputs=(*norm.inputs, c), ops=ops, outputs=("t",))
    marks = [op.hardware_affinity for op in optimize(before).ops]
    assert marks == ([first, second, first, first, second] if expected == "apart" else [expected] * 2)


# moves and constants


def test_moves_in_a_row_are_one_and_those_that_move_nothing_are_none() -> None:
    x = value("x", 2, 3, 4)
    d = Draft(x)
    there = d.add("permute", d.add("permute", x, perm=(2, 0, 1)), perm=(0, 2, 1))
    back = d.add("permute", there, perm=(2, 1, 0))
    flat = d.add("reshape", d.add("reshape", there, shape=(24,)), shape=(6, 4))
    before = d.graph(d.add("unary", back, fn="neg"), flat, d.add("cast", x, dtype="f32"))
    after = simplify(before)
    assert kinds(after) == {"permute": 1, "reshape": 1, "unary": 1}  # three permutations in a row are none
    assert after.outputs[-1] == "x"
    same_numbers(before, after, 6, False)


def angles() -> Graph:
    """Tables as of rotary positions: functions of iotas."""
    d = Draft()
    place = d.add("reshape", d.add("iota", dtype="f32", length=40), shape=(40, 1))
    d.add("iota", dtype="f32", length=6, step=0.3)
    rate = d.add("binary", d.ops[-1].output, fn="pow", scalar=0.7)
    angle = d.add("binary", place, d.add("unary", rate, fn="exp"), fn="mul")
    fns = ("sin", "cos", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "erf", "exp", "sqrt")
    return d.graph(*(d.add("unary", angle, fn=fn) for fn in fns), d.add("multiply_add", angle, rate, place))


def test_tables_do_not_follow_the_host_library(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fold_constants(angles())
    assert not expected.ops

    def off(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *x, **k: np.nextafter(np.asarray(fn(*x, **k)), np.inf)

    for name in ("sin", "cos", "exp", "log", "tanh", "power"):
        monkeypatch.setattr(np, name, off(getattr(np, name)))
    for table in (_reference_ops.UNARY, _reference_ops.BINARY):
        for name in set(table) & {
            "sin",
            "cos",
            "exp",
            "log",
            "tanh",
            "pow",
            "erf",
            "sigmoid",
            "silu",
            "gelu",
        }:
            monkeypatch.setitem(table, name, off(table[name]))
    assert np.cos(np.float32(0)) > 1  # the library is another one now
    assert fold_constants(angles()) == expected


def test_arithmetic_of_constants_is_done_now() -> None:
    d = Draft()
    row = d.add("iota", dtype="i64", length=5, start=2, step=3)
    mask = d.add("compare", d.add("binary", row, fn="mul", scalar=2), fn="gt", scalar=10)
    table = d.add("unary", d.add("cast", row, dtype="f32"), fn="cos")
    half = d.add("cast", table, dtype="bf16")
    after = fold_constants(d.graph(mask, table, half))
    verify(after)
    assert not after.ops
    data = {c.value.name: c.data for c in after.constants}
    assert data[mask.name] == (False, False, True, True, True)
    expected = functions.UNARY["cos"]((2 + 3 * np.arange(5)).astype(np.float32))
    np.testing.assert_allclose(expected, np.cos(2.0 + 3 * np.arange(5)), rtol=0, atol=1e-7)
    assert data[table.name] == tuple(expected.astype(np.float64).tolist())
    assert all(reference._to_bf16(np.array([f], np.float32))[0] == f for f in data[half.name])


def test_large_tables_and_products_are_left_to_the_machine() -> None:
    d = Draft()
    large = d.add("iota", dtype="i64", length=(1 << 16) + 1)
    square = d.add("reshape", d.add("iota", dtype="f32", length=4), shape=(2, 2))
    after = fold_constants(d.graph(large, d.add("matmul", square, square)))
    assert [op.kind for op in after.ops] == ["iota", "matmul"]


def test_rounding_to_bfloat16_is_that_of_the_reference() -> None:
    from lf_hal.passes.simplify import _narrowed

    bits = np.random.default_rng(0).integers(0, 1 << 32, 4000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = np.concatenate((x[np.isfinite(x)], np.float32([0, -0.0, 1e-45, 3.4e38, -3.4e38, np.inf])))
    expected = reference._to_bf16(x)
    assert np.array_equal(_narrowed(x.astype(np.float64), "bf16"), expected.astype(np.float64))


# the pipeline


def test_the_report_says_what_each_pass_did() -> None:
    done = optimize_and_report(normalised(), PassOptions(fuse_linear=False))
    said = dict(line.split(": ", 1) for line in str(done).splitlines())
    assert said["lower_batch_norm"] == "-1 batch_norm, +1 affine_channel"
    assert said["fold_affine"] == "-1 affine_channel"
    assert said["fuse_linear"] == "off"
    assert said["simplify"] == "nothing to do"


def test_with_every_pass_off_nothing_changes() -> None:
    graph = normalised()
    assert optimize(graph, PassOptions.none()) is graph


def test_the_switches_of_the_command_line() -> None:
    assert PassOptions.from_switches([]).enable_vma_fusion
    assert PassOptions.from_switches(
        ["--enable-vma-fusion", "--enable-loongarch-optimization"]
    ).enable_vma_fusion
    assert not PassOptions.from_switches(["--disable-vma"]).enable_vma_fusion
    assert not PassOptions.from_switches(["disable-vma"]).enable_vma_fusion
    with pytest.raises(ConflictingSwitchesError) as e:
        PassOptions.from_switches(["--enable-vma-fusion", "--disable-vma"])
    assert e.value.switches == ("enable-vma-fusion", "disable-vma")


def test_a_graph_that_is_none_is_refused() -> None:
    x = value("x", 2)
    with pytest.raises(DuplicateValueError):
        optimize(Graph("g", (x, x)))
