"""Traced models, each made once a process, and the comparison with torch that all tests use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from lir_models import case
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lf_hal.lir import Graph, reference
from lf_hal.lir.trace import trace, weights_of

Array = NDArray[Any]
EPS = 2.0**-24  # half a unit in the last place of float32: the largest relative error of one rounding


@dataclass(frozen=True)
class Traced:
    module: nn.Module
    graph: Graph
    weights: dict[str, Array]
    inputs: dict[str, Array]
    expected: tuple[Array, ...]
    """Torch's outputs, in the graph's order."""

    def run(self, precision: Any = "float32", graph: Graph | None = None) -> list[Array]:
        found = reference.run(graph or self.graph, self.inputs, self.weights, precision)
        return [found[name] for name in (graph or self.graph).outputs]


def array(t: Tensor) -> Array:
    out: Array = (t.float() if t.dtype == torch.bfloat16 else t).detach().numpy()
    return out


def of(module: nn.Module, inputs: tuple[Any, ...]) -> Traced:
    graph = trace(module, inputs)
    leaves = tree_leaves(inputs)
    with torch.no_grad():
        outputs = tree_leaves(module(*inputs))
    named = {v.name: array(t) for v, t in zip(graph.inputs, leaves, strict=True)}
    return Traced(module, graph, weights_of(module, graph), named, tuple(array(t) for t in outputs))


@cache
def traced(name: str) -> Traced:
    made = case(name)
    return of(made.module, made.inputs)


def longest_sum(graph: Graph) -> int:
    """K: the longest chain of roundings in one output of one op."""
    types = graph.types()
    longest = 1
    for op in graph.ops:
        shapes = [types[n].shape for n in op.inputs]
        if op.kind.startswith("conv"):
            longest = max(longest, int(np.prod(shapes[1][1:])))
        elif op.kind in ("linear", "linear_act", "matmul", "softmax", "layer_norm", "rms_norm", "lstm_cell"):
            longest = max(longest, shapes[0][-1])
        elif op.kind == "attention":
            longest = max(longest, shapes[0][-1], shapes[1][-2])
        elif op.kind == "reduce":
            longest = max(longest, int(np.prod([shapes[0][a] for a in op.get_ints("axes")])))
    return longest


def assert_close(found: Array, expected: Array, bound: float) -> None:
    """Within ``bound`` of the largest element; integers and truths exactly."""
    assert found.shape == expected.shape
    if expected.dtype.kind != "f":
        assert np.array_equal(found, expected)
        return
    assert np.array_equal(np.isfinite(found), np.isfinite(expected))
    some = np.isfinite(expected)
    scale = max(np.abs(expected[some]).max(initial=0), 1e-30)
    assert np.abs(found[some] - expected[some]).max(initial=0) <= bound * scale


def check(module: nn.Module, inputs: tuple[Any, ...], bound: float | None = None) -> Graph:
    """Trace, run by the reference in both precisions, and hold both to torch."""
    found = of(module, inputs)
    limit = 4 * longest_sum(found.graph) * EPS if bound is None else bound
    for precision in ("float32", "float64"):
        for got, expected in zip(found.run(precision), found.expected, strict=True):
            assert_close(got, expected, limit)
    return found.graph
