"""Each op kind through C against the plain twin in float64: odd tails, strides, broadcasts, both layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import pytest
from op_maker import Maker

import lf_hal
from lf_hal.codegen.lower import LOWERINGS
from lf_hal.lir import OPS, Constant, TensorType, Value, reference

Array = np.ndarray[Any, Any]
TOLERANCE = 2e-6  # of the largest value; float32 has 6e-8, and sums here are short


def unaries(m: Maker) -> list[Value]:
    x = m.x(3, 1367)  # more than one vector, an odd tail
    plain = [m("unary", x, fn=fn) for fn in ("abs", "cos", "exp", "gelu", "gelu_tanh", "neg", "relu")]
    plain += [m("unary", x, fn=fn) for fn in ("sigmoid", "silu", "sin", "tanh")]
    positive = m("binary", m("unary", x, fn="abs"), fn="add", scalar=0.125)
    return [*plain, *(m("unary", positive, fn=fn) for fn in ("sqrt", "rsqrt"))]


def binaries(m: Maker) -> list[Value]:
    x, y, z = m.x(2, 5, 7), m.x(5, 1), m.x(2, 5, 7)
    turned = m("permute", m.x(7, 5, 2), perm=(2, 1, 0))
    base = m("binary", m("unary", x, fn="abs"), fn="add", scalar=0.5)
    found = [
        m("binary", a, b, fn=fn) for fn in ("add", "sub", "mul", "max", "min") for a, b in ((x, y), (y, z))
    ]
    found += [
        m("binary", x, turned, fn="sub"),
        m("binary", turned, x, fn="div"),
        m("binary", base, y, fn="pow"),
    ]
    found += [m("binary", x, fn="div", scalar=3), m("binary", base, fn="div", scalar=1.5, scalar_left=True)]
    return [*found, m("multiply_add", x, y, turned), m("binary", x, fn="sub", scalar=2.0, scalar_left=True)]


def integers(m: Maker) -> list[Value]:
    i, j, b = m.x(4, 3, dtype="i64"), m.x(3, dtype="i64"), m.x(4, 1, dtype="bool")
    found = [m("binary", i, j, fn=fn) for fn in ("add", "sub", "mul", "max", "min")]
    found += [m("binary", i, fn="mul", scalar=-3), m("unary", i, fn="neg"), m("unary", b, fn="not")]
    compared = [m("compare", i, j, fn=fn) for fn in ("eq", "ne", "lt", "le", "gt", "ge")]
    found += [*compared, m("binary", compared[0], b, fn="or"), m("binary", compared[2], b, fn="and")]
    found += [m("where", b, i, j), m("reduce", i, fn="sum", axes=(0,)), m("reduce", i, fn="max", axes=(1,))]
    found += [m("reduce", b, fn="any", axes=(0, 1)), m("cumsum", i, axis=0), m("cast", i, dtype="f32")]
    return [*found, m("cast", b, dtype="i32"), m("cast", m("cast", i, dtype="i32"), dtype="bool")]


def casts(m: Maker) -> list[Value]:
    x = m.x(4, 9)
    big = m("binary", x, fn="mul", scalar=2.0**40)
    return [m("cast", x, dtype="i32"), m("cast", x, dtype="bool"), m("cast", big, dtype="i64")]


def moves(m: Maker) -> list[Value]:
    x = m.x(2, 3, 4, 5)
    p = m("permute", x, perm=(0, 2, 3, 1))
    s = m("slice", p, axis=2, start=1, end=5, step=2)
    r = m("reshape", s, shape=(8, 6))
    c = m("concat", r, m("reshape", x, shape=(20, 6)), axis=0)
    b = m("broadcast", m("slice", x, axis=1, start=2, end=3), shape=(2, 3, 4, 5))
    ids = m("permute", m.x(3, 4, dtype="i64"), perm=(1, 0))
    return [s, r, c, b, m("reshape", p, shape=(120,)), m("copy_to", ids, device="cpu")]


def made(m: Maker) -> list[Value]:
    flags = m("fill", dtype="bool", shape=(3,), value=1)
    small = Constant(Value("c", TensorType("f32", (2, 2))), (1.5, float("-inf"), 1e-45, -0.0))
    m.constants.append(small)
    whole = m("iota", dtype="i64", length=7, start=-2, step=3)
    numbers = [m("fill", dtype="f32", shape=(2, 3), value=0.1), m("fill", dtype="i64", shape=(), value=-7)]
    return [whole, m("iota", dtype="f32", length=9, start=0.1, step=0.3), flags, *numbers, small.value]


def rows(m: Maker) -> list[Value]:
    x, w, b = m.x(3, 5, 83), m.w(83), m.w(83)
    turned = m("permute", x, perm=(1, 0, 2))
    found = [m("softmax", x), m("softmax", turned), m("rms_norm", x, w, eps=1e-5), m("rms_norm", x, eps=1e-3)]
    found += [
        m("layer_norm", turned, w, b, eps=1e-5),
        m("layer_norm", x, w, eps=1e-5),
        m("layer_norm", x, eps=1e-5),
    ]
    for fn in ("sum", "mean", "max"):
        found += [m("reduce", x, fn=fn, axes=(2,)), m("reduce", x, fn=fn, axes=(0, 1), keepdim=True)]
    return [*found, m("reduce", x, fn="sum", axes=(0, 1, 2)), m("cumsum", x, axis=1)]


def products(m: Maker) -> list[Value]:
    x, y, w, b = m.x(3, 5, 300), m.x(2, 3, 300, 7), m.w(37, 300), m.w(37)
    turned = m("permute", x, perm=(1, 0, 2))
    found = [
        m("linear", x, w, b),
        m("linear", turned, w),
        m("matmul", x, m("slice", y, axis=0, start=0, end=1)),
    ]
    found += [
        m("linear_act", x, w, b, act=a) for a in ("relu", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh")
    ]
    found += [m("matmul", m("reshape", x, shape=(3, 1, 5, 300)), m("permute", y, perm=(1, 0, 2, 3)))]
    scores = m("matmul", x, m("permute", x, perm=(0, 2, 1)))
    return [*found, scores, m("matmul", m("slice", x, axis=0, start=0, end=1), m("permute", w, perm=(1, 0)))]


def integer_weights(m: Maker) -> list[Value]:
    w, scale, b = m.w(37, 300, dtype="i8"), m.w(37), m.w(37)
    x = m("binary", m.x(3, 5, 300), fn="mul", scalar=2.0**-7)  # sums near 1, where tanh is not steep
    found = [m("linear_i8", x, w, scale), m("linear_i8", m("permute", x, perm=(1, 0, 2)), w, scale, b)]
    found += [m("linear_i8", x, w, scale, b, act=act) for act in ("silu", "tanh")]
    image, kernel, vectors = m.x(2, 6, 9, 8), m.w(10, 6, 3, 3, dtype="i8"), [m.w(10) for _ in range(3)]
    found += [m("conv_i8", image, kernel, *vectors[:n], padding=(1, 1), act="relu") for n in (1, 2, 3)]
    found += [m("conv_i8", image, m.w(6, 1, 3, 3, dtype="i8"), m.w(6), groups=6)]
    rows = m("embedding", w, m("cast", m("unary", m.x(4), fn="abs"), dtype="i64"))
    return [*found, m("cast", rows, dtype="f32")]


def narrow_weights(m: Maker) -> list[Value]:
    x, image = m.x(3, 300), m.x(2, 6, 9, 8)
    index = m("cast", m("unary", m.x(4), fn="abs"), dtype="i64")
    found = []
    for dtype in ("bf16", "f16"):
        w = m.w(37, 300, dtype=dtype)
        found += [m("linear", x, w, m.w(37)), m("linear_act", x, w, act="relu")]
        found += [m("conv2d", image, m.w(10, 6, 3, 3, dtype=dtype), m.w(10))]
        found += [m("cast", m("embedding", w, index), dtype="f32")]
    return found


def attentions(m: Maker) -> list[Value]:
    q, k, v = m.x(2, 4, 7, 12), m.x(2, 2, 9, 12), m.x(2, 2, 9, 10)
    k7, v7 = (m("slice", t, axis=2, start=0, end=7) for t in (k, v))
    added, seen = m.x(1, 4, 7, 9), m("compare", m.x(7, 9), fn="lt", scalar=0.8)
    by_time = m("permute", m.x(2, 7, 4, 12), perm=(0, 2, 1, 3))
    found = [m("attention", q, k, v, scale=0.3), m("attention", q, k7, v7, scale=0.3, causal=True)]
    found += [m("attention", q, k, v, added, scale=0.3), m("attention", by_time, k, v, seen, scale=0.3)]
    return [*found, m("permute", found[0], perm=(0, 2, 1, 3))]


def images(m: Maker) -> list[Value]:
    x, w, b = m.x(2, 6, 9, 8), m.w(10, 6, 3, 3), m.w(10)
    plain = m("conv2d", x, w, b, padding=(1, 1))
    shape = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 3}
    other = m("conv2d", x, m.w(9, 2, 3, 2), **shape)
    fused = m("conv_affine_act", x, w, m.w(10), m.w(10), padding=(1, 1), act="relu")
    added = [
        m("conv_add_act", x, w, plain, padding=(1, 1)),
        m("conv_add_act", x, w, m.x(2, 10, 9, 8), b, padding=(1, 1), act="relu"),
        m("conv_add_act", x, w, fused, m.w(10), m.w(10), padding=(1, 1), act="gelu"),
        m("conv_add_act", x, m.w(6, 1, 3, 3), x, m.w(6), padding=(1, 1), groups=6, act="tanh"),
    ]
    sum_ = m("binary", plain, fused, fn="add")
    mixed = m("binary", plain, m.x(1, 10, 1, 1), fn="mul")
    joined = m("concat", plain, fused, axis=1)
    pooled = [
        m("pool2d", joined, fn=fn, kernel=(3, 2), stride=(2, 2), padding=(1, 1)) for fn in ("max", "avg")
    ]
    pooled += [m("pool2d", x, fn="avg", kernel=(3, 3), stride=(1, 1), padding=(1, 1), count_padding=False)]
    affine = m("affine_channel", plain, m.w(10), b)
    up = [m("upsample", plain, fn="nearest", size=(18, 20)), m("upsample", x, fn="bilinear", size=(13, 5))]
    up += [m("upsample", x, fn="bilinear", size=(4, 15), align_corners=True)]
    mean = m("reduce", sum_, fn="mean", axes=(2, 3))
    tail = m("linear", mean, m.w(3, 10))
    last = m("conv2d", up[0], m.w(5, 10, 1, 1), act="tanh")
    return [plain, other, *added, sum_, mixed, joined, *pooled, affine, *up, mean, tail, last]


def sequences(m: Maker) -> list[Value]:
    x, whole, half = m.x(2, 3, 5, 8), m.w(5, 8), m.w(5, 4)
    side = m("permute", m.x(2, 5, 3, 8), perm=(0, 2, 1, 3))
    found = [
        m("rope", x, half, m.w(5, 4)),
        m("rope", side, m.w(1, 1, 5, 4), m.w(1, 1, 5, 4)),
        m("rope", x, whole, m.w(5, 8)),
    ]
    cell = m("lstm_cell", m.x(3, 11), m.x(3, 6), m.x(3, 6), m.w(24, 11), m.w(24, 6), m.w(24), m.w(24))
    return [*found, cell, m("lstm_cell", *m.inputs[2:5], *m.weights[-4:-2])]


def tables(m: Maker) -> list[Value]:
    x, table = m.x(4, 6), m.w(9, 5)
    index = m("cast", m("binary", m("unary", m.x(4, 3), fn="abs"), fn="mul", scalar=1.5), dtype="i64")
    kept = m("binary", index, fn="min", scalar=3)
    source = m.x(4, 3)
    found = [m("embedding", table, kept), m("embedding", table, m("cast", kept, dtype="i32"))]
    return [
        *found,
        m("gather", x, kept, axis=1),
        m("gather", x, kept, axis=0),
        m("scatter", x, kept, source, axis=0),
    ]


CASES: Mapping[str, Callable[[Maker], list[Value]]] = {
    f.__name__: f
    for f in (
        unaries,
        binaries,
        integers,
        casts,
        moves,
        made,
        rows,
        products,
        integer_weights,
        narrow_weights,
        attentions,
        images,
        sequences,
        tables,
    )
}


def given(value: Value, rng: np.random.Generator) -> Array:
    shape = value.type.shape
    if value.type.dtype == "f32":
        return rng.standard_normal(shape).astype(np.float32)
    if value.type.dtype == "bool":
        return rng.random(shape) < 0.5
    if value.type.dtype == "bf16":
        return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if value.type.dtype == "f16":
        return rng.standard_normal(shape).astype(np.float16)
    return rng.integers(-5, 6, shape, np.int8 if value.type.dtype == "i8" else np.int64)


def weight(value: Value, rng: np.random.Generator) -> Array:
    found = given(value, rng)
    return found / np.float32(prod(value.type.shape[1:]) ** 0.5) if value.type.dtype == "f32" else found


@pytest.mark.parametrize("name", list(CASES))
def test_c_computes_what_the_twin_does(name: str) -> None:
    m, rng = Maker(), np.random.default_rng(7)
    graph = m.graph(tuple(CASES[name](m)))
    inputs = {v.name: given(v, rng) for v in graph.inputs}
    weights = {v.name: weight(v, rng) for v in graph.weights}
    exact = reference.run(graph, inputs, weights, "float64")
    with lf_hal.compile(graph, weights) as made_:
        found = made_.run(inputs)
        again = made_.run(inputs, threads=3)
    for output, expected in exact.items():
        label = next((o.kind for o in graph.ops if o.output.name == output), output)
        assert found[output].shape == expected.shape, label
        assert found[output].tobytes() == again[output].tobytes(), label
        if found[output].dtype != np.float32:
            assert np.array_equal(found[output], expected), label
            continue
        finite = np.isfinite(expected)
        scale = np.abs(expected[finite]).max() if finite.any() else 1.0
        np.testing.assert_allclose(found[output], expected, rtol=0, atol=TOLERANCE * scale, err_msg=label)


def test_every_kind_is_compiled_here_or_folded_away() -> None:
    seen = set()
    for build in CASES.values():
        m = Maker()
        build(m)
        seen |= {op.kind for op in m.ops}
    assert seen == set(LOWERINGS)
    assert set(OPS) - set(LOWERINGS) == {"batch_norm"}  # fold_batch_norm rewrites it


def test_a_large_sum_runs_on_threads_in_rows_without_changing_a_bit() -> None:
    m = Maker()
    x = m.x(3, 64, 4096)
    y = m("binary", x, m("unary", x, fn="exp"), fn="add")
    graph = m.graph((y,))
    data = np.random.default_rng(3).standard_normal(prod(x.type.shape), np.float32).reshape(x.type.shape)
    with lf_hal.compile(graph, {}) as made_:
        results = [made_.run([data], threads=t)[y.name].tobytes() for t in (1, 2, 5)]
    assert results[0] == results[1] == results[2]
