"""Each op kind by torch functions against the plain twin, on the cases that the C compiler is held to."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from lf_hal.lir import OPS, Graph, make_op, reference
from lf_hal.placement import TorchRunner, torch_device
from lf_hal.placement.torch_ops import TORCH_KINDS

_spec = importlib.util.spec_from_file_location(
    "compiled_ops", Path(__file__).parents[1] / "compile" / "test_ops.py"
)
assert _spec is not None
assert _spec.loader is not None
ops = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ops)


@pytest.mark.parametrize("name", list(ops.CASES))
def test_torch_computes_what_the_twin_does(name: str) -> None:
    m, rng = ops.Maker(), np.random.default_rng(7)
    graph = m.graph(tuple(ops.CASES[name](m)))
    inputs = {v.name: ops.given(v, rng) for v in graph.inputs}
    weights = {v.name: ops.weight(v, rng) for v in graph.weights}
    exact = reference.run(graph, inputs, weights, "float64")
    constants = {c.value.name: np.array(c.data, np.float32).reshape(c.value.type.shape) for c in m.constants}
    made = [n for n in graph.outputs if n not in constants]
    plain = Graph("case", graph.inputs, graph.weights, (), graph.ops, tuple(made))
    found = TorchRunner(torch_device("cpu:0")).prepare(plain, weights)(inputs)
    for output in made:
        expected = exact[output]
        label = next(o.kind for o in graph.ops if o.output.name == output)
        assert found[output].shape == expected.shape, label
        if found[output].dtype != np.float32:
            assert np.array_equal(found[output], expected), label
            continue
        finite = np.isfinite(expected)
        scale = np.abs(expected[finite]).max() if finite.any() else 1.0
        np.testing.assert_allclose(found[output], expected, rtol=0, atol=ops.TOLERANCE * scale, err_msg=label)


def test_every_kind_runs_on_torch() -> None:
    assert set(OPS) == TORCH_KINDS


def test_batch_norm_bf16_and_rows_that_see_nothing() -> None:
    m, rng = ops.Maker(), np.random.default_rng(1)
    x, q = m.x(2, 3, 4, 5), m.x(1, 1, 2, 4)
    stats = [m.w(3) for _ in range(4)]
    normed = m("batch_norm", x, *stats, eps=1e-5)
    seen = m("compare", m.x(2, 2), fn="gt", scalar=0.0)
    half = m("cast", m("cast", x, dtype="bf16"), dtype="f32")
    graph = m.graph((normed, m("attention", q, q, q, seen, scale=0.5), half, m("cast", x, dtype="bf16")))
    inputs = {v.name: ops.given(v, rng) for v in graph.inputs}
    inputs["x2"] = np.array([[-1.0, -1.0], [1.0, 1.0]], np.float32)
    weights = {v.name: np.abs(ops.given(v, rng)) + np.float32(0.1) for v in graph.weights}
    expected = reference.run(graph, inputs, weights, "float32")
    found = TorchRunner(torch_device("cpu:0")).prepare(graph, weights)(inputs)
    for name in graph.outputs[:3]:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=4e-6)
    assert not found[graph.outputs[1]][0, 0, 0].any()
    bits = found[graph.outputs[3]]
    assert bits.dtype == np.uint16
    assert torch.equal(
        torch.from_numpy(bits).view(torch.bfloat16), torch.from_numpy(inputs["x0"]).to(torch.bfloat16)
    )


def test_a_segment_without_inputs_runs() -> None:
    op = make_op("iota", "i", [], {"dtype": "f32", "length": 5, "start": 0.1, "step": 0.3})
    graph = Graph("made", (), (), (), (op,), ("i",))
    found = TorchRunner(torch_device("cpu:0")).prepare(graph, {})({})
    assert np.array_equal(found["i"], reference.run(graph, {})["i"])
