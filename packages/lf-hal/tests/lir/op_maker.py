"""Graphs written op by op."""

from __future__ import annotations

from typing import Any

from lf_hal.lir import Constant, Graph, Op, TensorType, Value, make_op

__all__ = ["Maker"]


class Maker:
    """Collects values and ops of one test's graph."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.weights: list[Value] = []
        self.constants: list[Constant] = []
        self.ops: list[Op] = []

    def x(self, *shape: int, dtype: str = "f32") -> Value:
        self.inputs.append(Value(f"x{len(self.inputs)}", TensorType(dtype, shape)))
        return self.inputs[-1]

    def w(self, *shape: int, dtype: str = "f32") -> Value:
        self.weights.append(Value(f"w{len(self.weights)}", TensorType(dtype, shape)))
        return self.weights[-1]

    def __call__(self, kind: str, *inputs: Value, **attrs: Any) -> Value:
        self.ops.append(make_op(kind, f"v{len(self.ops)}", inputs, attrs))
        return self.ops[-1].output

    def graph(self, outputs: tuple[Value, ...]) -> Graph:
        names = tuple(v.name for v in outputs)
        parts = (tuple(self.inputs), tuple(self.weights), tuple(self.constants), tuple(self.ops))
        return Graph("case", *parts, names)
