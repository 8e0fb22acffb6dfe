"""What lowering an op works on: where values lie so far, and the steps that make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf, isnan, prod
from typing import NoReturn

import numpy as np

from lf_hal.codegen.view import View, dense, memory_order
from lf_hal.errors import UnsupportedOpError
from lf_hal.lir.graph import DTYPES, Graph, Op, TensorType

__all__ = ["C_TYPES", "Lowering", "Step", "array", "collapse", "literal", "split_rows"]

C_TYPES = {
    "f32": "float", "bf16": "uint16_t", "f16": "uint16_t", "i8": "int8_t", "i32": "int32_t", "i64": "int64_t",
    "bool": "uint8_t",
}  # fmt: skip
MAX_RANK = 8
SMALL = 8192
"""Elements below which an elementwise step is not worth waking a thread."""


@dataclass(frozen=True)
class Step:
    """C that makes outputs ``begin`` to ``end`` of ``total``.

    ``scratch`` is C that sets ``need`` to the bytes each thread needs, or nothing. In ``text``, an address is
    ``\\x01buffer\\x02``, as only the emitter knows where buffers lie, and ``\\x03`` is the number of the step.
    ``flops`` counts a multiply-add as two and is 0 where it says nothing (no product); ``nbytes`` is what the step
    reads and writes once, 0 where that follows the data.
    """

    label: str
    text: str
    total: int
    grain: int
    reads: tuple[str, ...]
    writes: str
    scratch: str = ""
    flops: int = 0
    nbytes: int = 0


@dataclass
class Lowering:
    """The state of lowering one graph: views of values by name, sizes of buffers, steps in order.

    ``inputs`` and ``weights`` are buffers that exist before the first step. ``packed`` are made of weights by the
    steps of ``packing`` when a model is opened. All others lie in the arena.
    """

    graph: Graph
    views: dict[str, View] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    packed: dict[str, int] = field(default_factory=dict)
    packing: list[Step] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    op: Op | None = None
    _copies: dict[tuple[View, tuple[int, ...]], View] = field(default_factory=dict)

    def refuse(self, reason: str) -> NoReturn:
        """Raise :class:`UnsupportedOpError` for the current op."""
        op = self.op
        raise UnsupportedOpError(op.output.name if op else "", op.kind if op else "graph", reason)

    def only_f32(self, *views: View) -> None:
        for view in views:
            if view.dtype != "f32":
                self.refuse(f"it is compiled for f32 only, not for {view.dtype}")

    def inputs_of(self, op: Op) -> list[View]:
        return [self.views[name] for name in op.inputs]

    def buffer(self, name: str, nbytes: int) -> str:
        """A new buffer of the arena; the name is made unique."""
        unique, n = name, 1
        while unique in self.sizes or unique in self.packed:
            n += 1
            unique = f"{name}#{n}"
        self.sizes[unique] = nbytes
        return unique

    def result(self, op: Op, order: Sequence[int] | None = None, type_: TensorType | None = None) -> View:
        """A new dense buffer for the output of ``op``, its axes in memory in ``order``; also its view."""
        kind = type_ or op.output.type
        view = dense(self.buffer(op.output.name, kind.nbytes), kind.dtype, kind.shape, order)
        self.views[op.output.name] = view
        return view

    def temporary(self, dtype: str, shape: Sequence[int], order: Sequence[int] | None = None) -> View:
        name = self.op.output.name if self.op else "output"
        nbytes = prod(shape) * DTYPES[dtype]
        return dense(self.buffer(f"{name}~", nbytes), dtype, shape, order)

    def step(
        self,
        text: str,
        total: int,
        reads: Sequence[View],
        writes: View,
        *,
        grain: int = 1,
        scratch: str = "",
        label: str | None = None,
        flops: int = 0,
    ) -> None:
        name = label or (f"{self.op.kind} {self.op.output.name}" if self.op else "output")
        buffers = tuple(dict.fromkeys(v.buffer for v in reads))
        picks = self.op is not None and self.op.kind in ("embedding", "gather", "scatter")
        nbytes = 0 if picks else sum(_touched(v) for v in (*dict.fromkeys(reads), writes))
        made = Step(name, text, total, max(grain, 1), buffers, writes.buffer, scratch, flops, nbytes)
        self.steps.append(made)

    def pack(self, packed: View, text: str, total: int, source: View) -> None:
        """The buffer of ``packed``, made of a weight by ``text`` when the model is opened, once for each name."""
        key = packed.buffer
        if key not in self.packed:
            self.packed[key] = prod(packed.shape) * DTYPES[packed.dtype]
            self.packing.append(Step(f"pack {key}", text, total, 1, (source.buffer,), key))

    def materialise(self, view: View, order: Sequence[int] | None = None) -> View:
        """``view``, or a copy of it, dense with its axes in ``order`` (as they stand, if None)."""
        wanted = tuple(order if order is not None else range(len(view.shape)))
        if view.is_dense(wanted):
            return view
        made = self._copies.get((view, wanted))
        if made is None:
            made = self.temporary(view.dtype, view.shape, wanted)
            self.copy(view, made)
            self._copies[view, wanted] = made
        return made

    def rows(self, view: View) -> tuple[View, tuple[int, ...]]:
        """``view`` dense with its last axis fastest, and the order of its axes; a copy only if it must be."""
        order = memory_order(view)
        if order and order[-1] == len(order) - 1 and view.is_dense(order):
            return view, order
        plain = tuple(range(len(view.shape)))
        return self.materialise(view, plain), plain

    def copy(self, source: View, target: View) -> None:
        """A step that writes ``source`` to ``target``, which has its shape and element type."""
        order = memory_order(target)
        source, target = source.permute(order), target.permute(order)
        shape, (ts, ss) = collapse(target.shape, [target.strides, source.strides])
        shape, (ts, ss) = split_rows(shape, [ts, ss])
        rows, grain = prod(shape[:-1]), max(1, SMALL // max(shape[-1], 1))
        y, x = self.at(target), self.at(source, const=True)
        if target.dtype in ("f32", "i32"):
            text = (
                f"{array('shape', shape)}{array('ys', ts)}{array('xs', ss)}"
                f"lf_copy_f32((float *){y}, ys, (const float *){x}, xs, shape, {len(shape)}, begin, end);"
            )
        else:
            text = loop(shape, {"y": (y, ts), "x": (x, ss)}, "y_[0] = x_[0];", C_TYPES[target.dtype])
        self.step(text, rows, [source], target, grain=grain)

    def at(self, view: View, *, const: bool = False) -> str:
        """A typed address in C of the first element of ``view``."""
        c = ("const " if const else "") + C_TYPES[view.dtype] + " *"
        plus = f" + {view.offset}" if view.offset else ""
        return f"(({c})\x01{view.buffer}\x02{plus})"

    def read(self, view: View) -> str:
        return self.at(view, const=True)


def _touched(view: View) -> int:
    """Bytes of a view's elements, those that are broadcast counted once."""
    return prod(n for n, s in zip(view.shape, view.strides, strict=True) if s) * DTYPES[view.dtype]


def array(name: str, values: Sequence[int]) -> str:
    """A constant array of sizes or strides."""
    return f"static const int64_t {name}[] = {{{', '.join(map(str, values)) or '0'}}};\n"


def literal(value: float) -> str:
    """A float32 literal of exactly the float32 next to ``value``."""
    with np.errstate(over="ignore"):
        number = float(np.float32(value))
    if isnan(number):
        return '__builtin_nanf("")'
    if isinf(number):
        return "__builtin_inff()" if number > 0 else "(-__builtin_inff())"
    return f"({number.hex()}f)"


def collapse(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The same elements in the same order with as few axes as all strides allow; at least one axis."""
    sizes: list[int] = []
    found: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        own = [s[axis] for s in strides]
        if sizes and all(f[-1] == size * o for f, o in zip(found, own, strict=True)):
            sizes[-1] *= size
            for f, o in zip(found, own, strict=True):
                f[-1] = o
        else:
            sizes.append(size)
            for f, o in zip(found, own, strict=True):
                f.append(o)
    if not sizes:
        return [1], [[0] for _ in strides]
    return sizes, found


def split_rows(
    shape: Sequence[int], strides: Sequence[Sequence[int]], limit: int = 4096
) -> tuple[list[int], list[list[int]]]:
    """One long axis as rows of at most ``limit`` elements, so that threads can share them, if a size divides it."""
    sizes, found = list(shape), [list(s) for s in strides]
    if len(sizes) == 1 and sizes[0] >= SMALL:
        width = next((w for w in range(limit, 255, -1) if sizes[0] % w == 0), 0)
        if width:
            found = [[s[0] * width, s[0]] for s in found]
            sizes = [sizes[0] // width, width]
    return sizes, found


def loop(
    shape: Sequence[int], operands: Mapping[str, tuple[str, Sequence[int]]], body: str, *types: str
) -> str:
    """Nested loops over rows ``begin`` to ``end`` of ``shape``: ``name_`` points to the element of each operand.

    ``types`` are those of the operands, or one for all. The first operand is written.
    """
    names = list(operands)
    kinds = dict(zip(names, types if len(types) == len(names) else types * len(names), strict=True))
    out = ["for (int64_t row = begin; row < end; row++) {", "  int64_t rest = row; (void)rest;"]
    out += [f"  int64_t {n}_at = 0;" for n in names]
    for axis in range(len(shape) - 2, -1, -1):
        out.append(f"  {{ int64_t i = rest % {shape[axis]}; rest /= {shape[axis]};")
        out.append("    " + " ".join(f"{n}_at += i * {s[axis]};" for n, (_, s) in operands.items()) + " }")
    out.append(f"  for (int64_t j = 0; j < {shape[-1]}; j++) {{")
    for n, (address, s) in operands.items():
        const = "" if n == names[0] else "const "
        out.append(f"    {const}{kinds[n]} *{n}_ = {address} + {n}_at + j * {s[-1]};")
    out += [f"    {body}", "  }", "}"]
    return "\n".join(out)
