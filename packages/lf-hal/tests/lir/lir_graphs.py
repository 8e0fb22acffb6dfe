"""Random sound graphs, and one of each part, for the tests beside this file."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from lf_hal.lir import Constant, Graph, Op, TensorType, Value, make_op
from lf_hal.lir.recipes import make_recipe


def value(name: str, *shape: int, dtype: str = "f32") -> Value:
    return Value(name, TensorType(dtype, shape))


def sample() -> Graph:
    """Every part that a graph can have."""
    x, w = value("x", 2, 3, 8, 8), value("conv.weight", 4, 3, 3, 3)
    gamma, var = value("bn.weight", 4), value("bn.running_var", 4)
    scale = make_recipe("batch_norm_scale", "bn.scale", [gamma, var], eps=1e-5)
    shift = Constant(value("shift", 4), (0.5, -1.0, float("inf"), 1e-45))
    conv = make_op("conv2d", "y", [x, w], {"padding": (1, 1)}, affinity="mlu290")
    affine = make_op("affine_channel", "z", [conv.output, scale.output, shift.value])
    total = make_op("reduce", "t", [affine.output], {"fn": "sum", "axes": (0, 1, 2, 3)})
    return Graph("sample", (x,), (w, gamma, var), (shift,), (conv, affine, total), ("z", "t"), (scale,))


UNARY = ("neg", "relu", "tanh", "sigmoid", "silu", "gelu", "sin", "cos", "abs")
SHAPES = [(2, 4, 6, 6), (2, 4), (4,), (3, 4)]


class Maker:
    """Adds random ops to what there is; the random numbers are the test's."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.inputs = [value(f"x{i}", *shape) for i, shape in enumerate(SHAPES)]
        self.weights: list[Value] = []
        self.ops: list[Op] = []
        self.alive = list(self.inputs)

    def weight(self, *shape: int) -> Value:
        self.weights.append(value(f"w{len(self.weights)}.weight", *shape))
        return self.weights[-1]

    def add(self, kind: str, inputs: list[Value], affinity: str | None = None, **attrs: object) -> Value:
        op = make_op(kind, f"v{len(self.ops)}", inputs, attrs, affinity)  # type: ignore[arg-type]
        self.ops.append(op)
        self.alive.append(op.output)
        return op.output

    def step(self) -> None:
        x = self.random.choice(self.alive[-6:])
        choice = self.random.choice(
            ("unary", "scalar", "pair", "conv", "linear", "muladd", "move", "bn", "tail")
        )
        affinity = self.random.choice((None, None, None, "npu", "mlu290"))
        rank = len(x.type.shape)
        if choice == "unary":
            self.add("unary", [x], affinity, fn=self.random.choice(UNARY))
        elif choice == "scalar":
            fn = self.random.choice(("add", "sub", "mul", "max"))
            self.add("binary", [x], affinity, fn=fn, scalar=self.random.choice((0.5, -1.5, 2.0)))
        elif choice == "pair":
            others = [v for v in self.alive if v.type == x.type]
            y = self.random.choice(others)
            self.add("binary", [x, y], affinity, fn=self.random.choice(("add", "sub", "mul")))
        elif choice == "conv" and rank == 4:
            w = self.weight(4, x.type.shape[1], 3, 3)
            bias = [self.weight(4)] if self.random.random() < 0.5 else []
            y = self.add("conv2d", [x, w, *bias], affinity, padding=(1, 1))
            if self.random.random() < 0.6:
                self.normalise(y)
            if self.random.random() < 0.6:
                self.add("unary", [self.alive[-1]], fn="relu")
        elif choice == "bn" and rank == 4:
            self.normalise(x)
        elif choice == "linear" and rank >= 1:
            w = self.weight(4, x.type.shape[-1])
            self.add("linear", [x, w, *([self.weight(4)] if self.random.random() < 0.5 else [])])
            if self.random.random() < 0.6:
                self.add("unary", [self.alive[-1]], fn=self.random.choice(UNARY))
        elif choice == "muladd":
            y = (
                self.add("binary", [x, self.random.choice(self.inputs[2:3] if rank < 4 else [x])], fn="mul")
                if x.type.shape[-1] == 4
                else x
            )
            same = [v for v in self.alive if v.type == y.type]
            self.add("binary", self.random.sample([y, self.random.choice(same)], 2), fn="add")
        elif choice == "move" and rank >= 2:
            perm = tuple(self.random.sample(range(rank), rank))
            y = self.add("permute", [x], perm=perm)
            if self.random.random() < 0.5:
                y = self.add("permute", [y], perm=tuple(perm.index(i) for i in range(rank)))
            self.add("reshape", [y], shape=y.type.shape)
        else:
            self.add("iota", [], dtype="f32", length=4, start=self.random.randrange(3))

    def normalise(self, x: Value) -> None:
        vectors = [self.weight(x.type.shape[1]) for _ in range(4)]
        self.add("batch_norm", [x, *vectors], eps=1e-5)

    def graph(self) -> Graph:
        kept = [v for v in self.alive[len(self.inputs) :] if self.random.random() < 0.3]
        outputs = tuple(dict.fromkeys(v.name for v in (*kept, self.alive[-1])))
        return Graph("random", tuple(self.inputs), tuple(self.weights), (), tuple(self.ops), outputs)


def random_graph(seed: int, steps: int) -> Graph:
    maker = Maker(seed)
    for _ in range(steps):
        maker.step()
    return maker.graph()


def graphs() -> st.SearchStrategy[Graph]:
    """Small graphs of float32 ops, some of which the passes rewrite."""
    return st.builds(random_graph, st.integers(0, 1 << 32), st.integers(1, 12))
