"""The data of the intermediate form (LIR): a graph in static single assignment, every value of a fixed type.

Nothing here checks anything: :func:`lf_hal.lir.verify` does, :mod:`lf_hal.lir.ops` has the rules of each kind. All
classes are frozen and hashable, and ``dataclasses.asdict`` of a graph goes through JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

__all__ = [
    "DTYPES",
    "FLOATS",
    "INTEGERS",
    "Attr",
    "Attrs",
    "Constant",
    "Graph",
    "Number",
    "Op",
    "Recipe",
    "TensorType",
    "Value",
    "freeze",
]

DTYPES: dict[str, int] = {"f32": 4, "bf16": 2, "f16": 2, "i8": 1, "i32": 4, "i64": 8, "bool": 1}
"""Element types and their size in bytes."""
FLOATS = ("f32", "bf16", "f16")
INTEGERS = ("i8", "i32", "i64")

Number = int | float
Attr = bool | int | float | str | tuple[int, ...]
Attrs = tuple[tuple[str, Attr], ...]


def freeze(attrs: Mapping[str, Attr]) -> Attrs:
    """Attributes sorted by name, as an :class:`Op` holds them."""
    return tuple(sorted(attrs.items()))


@dataclass(frozen=True)
class TensorType:
    """Element type and static shape, row major; ``()`` is a scalar."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Value:
    """A name, unique in its graph, and what it stands for."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class _Applied:
    kind: str
    inputs: tuple[str, ...]
    output: Value
    attrs: Attrs = ()

    def attr(self, name: str) -> Attr:
        """The attribute of this name.

        Raises:
            KeyError: there is none.
        """
        for key, value in self.attrs:
            if key == name:
                return value
        raise KeyError(name)

    def has(self, name: str) -> bool:
        return any(key == name for key, _ in self.attrs)

    def get_ints(self, name: str) -> tuple[int, ...]:
        """An attribute that is a tuple of integers."""
        found = self.attr(name)
        if not isinstance(found, tuple):
            raise TypeError(f"{self.kind}.{name} is {found!r}, no tuple of integers")
        return found

    def get_int(self, name: str) -> int:
        found = self.attr(name)
        if not isinstance(found, int):
            raise TypeError(f"{self.kind}.{name} is {found!r}, no integer")
        return found

    def get_float(self, name: str) -> float:
        found = self.attr(name)
        if not isinstance(found, (int, float)):
            raise TypeError(f"{self.kind}.{name} is {found!r}, no number")
        return float(found)

    def get_str(self, name: str) -> str:
        found = self.attr(name)
        if not isinstance(found, str):
            raise TypeError(f"{self.kind}.{name} is {found!r}, no string")
        return found


@dataclass(frozen=True)
class Op(_Applied):
    """One operator applied: ``output`` from ``inputs``, by the rule of ``kind`` in :data:`lf_hal.lir.ops.OPS`.

    ``hardware_affinity`` is a hint for placement ("mlu290"), never a change of what is computed.
    """

    hardware_affinity: str | None = None


@dataclass(frozen=True)
class Recipe(_Applied):
    """A weight made of weights and constants, once, before the first run; kinds in :mod:`lf_hal.lir.recipes`."""


@dataclass(frozen=True)
class Constant:
    """A small array written in the graph itself; ``data`` is flat, row major."""

    value: Value
    data: tuple[Number, ...]


@dataclass(frozen=True)
class Graph:
    """A function of tensors.

    ``inputs`` are given at every run. ``weights`` are external: a mapping from their names (those of the module's
    state dict) to buffers is given once. ``recipes`` derive more weights from them, in this order. ``ops`` stand in
    an order in which they can run. ``outputs`` are names of any of these values.
    """

    name: str
    inputs: tuple[Value, ...] = ()
    weights: tuple[Value, ...] = ()
    constants: tuple[Constant, ...] = ()
    ops: tuple[Op, ...] = ()
    outputs: tuple[str, ...] = ()
    recipes: tuple[Recipe, ...] = field(default=())

    def values(self) -> Iterator[Value]:
        """Every value, in the order in which it comes to be."""
        yield from self.inputs
        yield from self.weights
        yield from (c.value for c in self.constants)
        yield from (r.output for r in self.recipes)
        yield from (o.output for o in self.ops)

    def types(self) -> dict[str, TensorType]:
        return {v.name: v.type for v in self.values()}

    def producers(self) -> dict[str, Op]:
        """The op that makes a value, by the value's name."""
        return {o.output.name: o for o in self.ops}

    def uses(self) -> dict[str, int]:
        """How often a value is read by ops, and once more for every place among the outputs."""
        count = dict.fromkeys((v.name for v in self.values()), 0)
        for name in (*(i for o in self.ops for i in o.inputs), *self.outputs):
            count[name] = count.get(name, 0) + 1
        return count
