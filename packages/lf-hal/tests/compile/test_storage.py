"""Weights stored narrow: the bits of a float32 run with the widened weights, on every target."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from op_maker import Maker
from torch import nn

import lf_hal
from lf_hal.errors import WeightsError
from lf_hal.lir import Graph, parse, reference, to_text, verify
from lf_hal.lir.recipes import apply_recipes
from lf_hal.passes import PassOptions, optimize, store_weights
from lf_hal.targets import TARGETS, missing_features

NARROW = ("bf16", "f16", "i8")
FLOATING = {"bf16": torch.bfloat16, "f16": torch.float16}
NATIVE = lf_hal.resolve_target("native")
OTHERS = [
    pytest.param(n, marks=() if t.machine == NATIVE.machine else pytest.mark.cross, id=n)
    for n, t in TARGETS.items()
    if t != NATIVE and not (t.machine == NATIVE.machine and missing_features(t))
]


class Net(nn.Module):
    """A table tied to a head, layers with and without bias, convolutions with a norm, a depthwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(70, 130)
        self.inner, self.plain = nn.Linear(130, 288), nn.Linear(288, 130, bias=False)
        self.norm = nn.LayerNorm(130)
        self.first, self.deep = nn.Conv2d(2, 18, 3, padding=1), nn.Conv2d(18, 18, 3, groups=18)
        self.scale = nn.Parameter(torch.rand(18))

    def forward(self, ids: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(ids)
        x = self.norm(x + self.plain(nn.functional.silu(self.inner(x))))
        y = self.deep(torch.relu(self.first(image))) * self.scale[:, None, None]
        return nn.functional.linear(x, self.table.weight), y


@cache
def case() -> tuple[Graph, dict[str, Any], list[Any]]:
    torch.manual_seed(3)
    net, ids, image = Net().eval(), torch.randint(0, 70, (11,)), torch.randn(1, 2, 8, 7)
    graph = lf_hal.trace(net, (ids, image))
    weights = {n: np.array(w) for n, w in lf_hal.weights_of(net, graph).items()}
    return graph, weights, [ids.numpy(), image.numpy()]


@cache
def here(dtype: str) -> list[bytes]:
    graph, weights, inputs = case()
    with lf_hal.compile(graph, weights, weights_dtype=dtype) as made:
        return [y.tobytes() for y in made.run(inputs).values()]


@pytest.mark.parametrize("dtype", list(FLOATING))
def test_bits_are_those_of_float32_with_the_weights_widened_before(dtype: str) -> None:
    graph, weights, inputs = case()
    stored = {n for n in weights if n.endswith("weight") and not n.startswith("norm")}
    assert len(stored) == 5
    widened = {
        n: torch.from_numpy(w).to(FLOATING[dtype]).float().numpy() if n in stored else w
        for n, w in weights.items()
    }
    with lf_hal.compile(graph, widened) as made:
        assert [y.tobytes() for y in made.run(inputs).values()] == here(dtype)
    assert here(dtype) != here("f32")


def quantised(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One scale for each row, from the definition."""
    flat = w.reshape(len(w), -1).astype(np.float64)
    scale = (np.abs(flat).max(axis=1) / 127).astype(np.float32)
    whole = np.clip(np.rint(flat / scale[:, None].astype(np.float64)), -127, 127)
    return whole.astype(np.float32).reshape(w.shape), scale


@pytest.mark.parametrize("rows", [1, 9])
def test_int8_has_the_bits_of_a_float32_product_of_the_integers_then_scale_bias_activation(rows: int) -> None:
    rng = np.random.default_rng(5)
    w, bias, x = (rng.standard_normal(s).astype(np.float32) for s in ((75, 700), (75,), (rows, 700)))
    m = Maker()
    m("linear_act", m.x(rows, 700), m.w(75, 700), m.w(75), act="silu")
    graph = m.graph((m.ops[-1].output,))
    with lf_hal.compile(graph, {"w0": w, "w1": bias}, weights_dtype="i8") as made:
        (found,) = made.run([x]).values()

    m = Maker()
    s = m("linear", m.x(rows, 700), m.w(75, 700))
    s = m("binary", m("binary", s, m.w(75), fn="mul"), m.w(75), fn="add")
    m("unary", s, fn="silu")
    whole, scale = quantised(w)
    weights = {"w0": whole, "w1": scale, "w2": bias}
    with lf_hal.compile(m.graph((m.ops[-1].output,)), weights, passes=PassOptions.none()) as made:
        (expected,) = made.run([x]).values()
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_is_to_nearest_even_and_the_scale_is_that_of_the_largest(dtype: str) -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 60000, np.uint64).astype(np.uint32)
    w = bits.view(np.float32)
    w = w[np.isfinite(w) & (np.abs(w) < 6e4)].reshape(-1, 2)[:20000]
    w[0] = 0
    m = Maker()
    m("linear", m.x(1, 2), m.w(*w.shape))
    narrow = store_weights(m.graph((m.ops[-1].output,)), dtype)
    found = apply_recipes(narrow, {"w0": w})
    if dtype in FLOATING:
        expected = torch.from_numpy(w).to(FLOATING[dtype]).view(torch.int16).numpy()
        assert found[f"w0.{dtype}"].view(np.int16).tolist() == expected.tolist()
        return
    usual = np.abs(w).max(axis=1) > 1e-37
    whole, scale = quantised(w[usual])
    assert found["w0.i8"][usual].tolist() == whole.tolist()
    assert found["w0.i8_scale"][usual].tolist() == scale.tolist()
    assert found["w0.i8_scale"][0] == 1
    assert not found["w0.i8"][0].any()


@pytest.mark.parametrize("dtype", NARROW)
def test_threads_rows_and_the_twin(dtype: str) -> None:
    graph, weights, inputs = case()
    with lf_hal.compile(graph, weights, weights_dtype=dtype) as made:
        results = [made.run(inputs, threads=t) for t in (1, 2, 5)]
    assert all([y.tobytes() for y in r.values()] == here(dtype) for r in results)
    narrow = store_weights(optimize(graph), dtype)
    verify(narrow)
    assert parse(to_text(narrow)) == narrow
    named = {v.name: x for v, x in zip(graph.inputs, inputs, strict=True)}
    exact = reference.run(narrow, named, weights, "float64")
    for name, y in results[0].items():
        assert np.abs(y - exact[name]).max() <= 1e-5 * np.abs(exact[name]).max()


@pytest.mark.parametrize("target", OTHERS)
def test_no_bit_differs_between_targets(target: str) -> None:
    graph, weights, inputs = case()
    for dtype in NARROW:
        with lf_hal.compile(graph, weights, target=target, weights_dtype=dtype) as made:
            assert [y.tobytes() for y in made.run(inputs, threads=2).values()] == here(dtype), dtype


def test_what_else_reads_a_weight_keeps_it_in_float32() -> None:
    m = Maker()
    x, both, shown, own = m.x(3, 8), m.w(8, 8), m.w(8, 8), m.w(8, 8)
    outputs = [m("linear", x, both), m("matmul", x, both), m("linear", x, shown), m("linear", x, own), shown]
    graph = store_weights(m.graph(tuple(outputs)), "bf16")
    assert [r.inputs for r in graph.recipes] == [(own.name,)]
    assert store_weights(graph, "f32") is graph
    with pytest.raises(ValueError, match="weights_dtype='int4'"):
        store_weights(graph, "int4")


@pytest.mark.parametrize(
    ("dtype", "value"), [("bf16", 3.4e38), ("f16", 7e4), ("i8", np.inf), ("f16", np.nan)]
)
def test_a_weight_that_would_not_be_finite_is_refused_by_name(dtype: str, value: float) -> None:
    m = Maker()
    m("linear", m.x(1, 2), m.w(2, 2))
    graph, w = m.graph((m.ops[-1].output,)), np.array([[1, value], [0, 2]], np.float32)
    with pytest.raises(WeightsError, match=f"'w0'.*{dtype}"):
        lf_hal.compile(graph, {"w0": w}, weights_dtype=dtype)


def test_the_manifest_has_the_error_and_files_are_smaller() -> None:
    graph, weights, _ = case()
    sizes = []
    for dtype in ("f32", *NARROW):
        with lf_hal.compile(graph, weights, weights_dtype=dtype) as made:
            storage = made.manifest["storage"]
            sizes.append(made.manifest["weight_bytes"])
        assert storage["dtype"] == dtype
    assert sizes[0] > 1.9 * sizes[1] == 1.9 * sizes[2] > 3.5 * sizes[3]
    found, exact = [], []
    for name in ("table", "inner", "plain", "first", "deep"):
        w = weights[f"{name}.weight"].astype(np.float64)
        whole, scale = quantised(weights[f"{name}.weight"])
        found.append((whole.reshape(len(w), -1) * scale[:, None].astype(np.float64)).ravel())
        exact.append(w.ravel())
    lost = np.linalg.norm(np.concatenate(found) - np.concatenate(exact))
    assert storage["relative_error"] == pytest.approx(lost / np.linalg.norm(np.concatenate(exact)), rel=1e-9)
    assert storage["narrow"] == 5
    assert storage["worst"][1] >= storage["relative_error"]
