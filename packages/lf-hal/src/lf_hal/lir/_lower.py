"""From one torch operator to ops of LIR: the registry, and what a rule is given. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NoReturn

from lf_hal.lir.errors import OpRuleError
from lf_hal.lir.graph import FLOATS, Attr, Constant, Number, Op, TensorType, Value
from lf_hal.lir.ops import make_op

Lowered = Value | list[Value]
Rule = Callable[["Call"], Lowered]
RULES: dict[str, Rule] = {}

TORCH_DTYPES = {
    "torch.float32": "f32",
    "torch.bfloat16": "bf16",
    "torch.float16": "f16",
    "torch.int8": "i8",
    "torch.int32": "i32",
    "torch.int64": "i64",
    "torch.bool": "bool",
}


class RefusedError(Exception):
    """What a rule cannot do; the tracer adds where."""


def lower(*operators: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators, named without ``aten.``."""

    def register(rule: Rule) -> Rule:
        RULES.update({f"aten.{name}": rule for name in operators})
        return rule

    return register


def dtype_of(torch_dtype: object) -> str:
    """LIR's name of a torch dtype."""
    name = TORCH_DTYPES.get(str(torch_dtype))
    if name is None:
        raise RefusedError(f"element type {torch_dtype}; LIR has {', '.join(TORCH_DTYPES.values())}")
    return name


class Builder:
    """Ops and constants so far, and names for more."""

    def __init__(self, taken: set[str]) -> None:
        self.ops: list[Op] = []
        self.constants: list[Constant] = []
        self._taken = taken
        self._kept: dict[object, Value] = {}

    def name(self, base: str) -> str:
        name, n = base, 0
        while name in self._taken:
            n += 1
            name = f"{base}.{n}"
        self._taken.add(name)
        return name

    def emit(
        self, base: str, affinity: str | None, kind: str, inputs: Sequence[Value], attrs: dict[str, Attr]
    ) -> Value:
        """The value of a new op, or of an equal one that is there already: ops are functions."""
        try:
            op = make_op(kind, "_", inputs, attrs, affinity)
        except OpRuleError as e:
            raise RefusedError(str(e)) from None
        key = (op, tuple(map(repr, op.attrs)))  # repr tells -0.0 from 0.0
        if key not in self._kept:
            self._kept[key] = Value(self.name(base), op.output.type)
            self.ops.append(Op(op.kind, op.inputs, self._kept[key], op.attrs, affinity))
        return self._kept[key]

    def constant(self, dtype: str, shape: tuple[int, ...], data: tuple[Number, ...]) -> Value:
        """The constant of this type and data, made once."""
        key = (dtype, shape, tuple(map(repr, data)))
        if key not in self._kept:
            value = Value(self.name("const"), TensorType(dtype, shape))
            self.constants.append(Constant(value, data))
            self._kept[key] = value
        return self._kept[key]


class Call:
    """One operator's call: arguments by the names of its schema, and what it returns."""

    def __init__(
        self, builder: Builder, base: str, affinity: str | None, args: dict[str, Any], out: object
    ) -> None:
        self._builder, self._base, self._affinity = builder, base, affinity
        self.args, self.out = args, out

    def refuse(self, reason: str) -> NoReturn:
        raise RefusedError(reason)

    def need(self, condition: bool, reason: str) -> None:
        if not condition:
            raise RefusedError(reason)

    @property
    def dtype(self) -> str:
        return dtype_of(self.out.dtype)  # type: ignore[attr-defined]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.out.shape)  # type: ignore[attr-defined]

    def value(self, name: str = "self") -> Value:
        """A tensor argument."""
        found = self.args[name]
        if not isinstance(found, Value):
            self.refuse(f"argument {name} is {found!r}, no tensor")
        return found

    def optional(self, *names: str) -> list[Value]:
        """Those of these arguments that are tensors."""
        return [self.args[n] for n in names if self.args.get(n) is not None]

    def get(self, name: str, default: Any = None) -> Any:
        found = self.args.get(name)
        return default if found is None else found

    def emit(self, kind: str, *inputs: Value, **attrs: Attr) -> Value:
        return self._builder.emit(self._base, self._affinity, kind, inputs, attrs)

    def constant(self, dtype: str, shape: tuple[int, ...], data: tuple[Number, ...]) -> Value:
        return self._builder.constant(dtype, shape, data)

    # what many rules need

    def cast(self, x: Value, dtype: str) -> Value:
        return x if x.type.dtype == dtype else self.emit("cast", x, dtype=dtype)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        return x if x.type.shape == tuple(shape) else self.emit("reshape", x, shape=tuple(shape))

    def permute(self, x: Value, perm: Sequence[int]) -> Value:
        return x if list(perm) == list(range(len(perm))) else self.emit("permute", x, perm=tuple(perm))

    def broadcast(self, x: Value, shape: Sequence[int]) -> Value:
        return x if x.type.shape == tuple(shape) else self.emit("broadcast", x, shape=tuple(shape))

    def slice(self, x: Value, axis: int, start: int, end: int, step: int = 1) -> Value:
        if (start, end, step) == (0, x.type.shape[axis], 1):
            return x
        return self.emit("slice", x, axis=axis, start=start, end=end, step=step)

    def axis(self, x: Value, given: int, extra: int = 0) -> int:
        rank = len(x.type.shape) + extra
        return given + rank if given < 0 else given

    def scalar(self, dtype: str, number: Number) -> Number:
        """A Python number as an attribute beside elements of ``dtype``."""
        if dtype in FLOATS:
            return float(number)
        self.need(float(number) == int(number), f"scalar {number!r} beside elements of {dtype}")
        return int(number)

    def fill(self, dtype: str, shape: Sequence[int], number: Number) -> Value:
        kept = float(number) if dtype in FLOATS else int(number)
        return self.emit("fill", dtype=dtype, shape=tuple(shape), value=kept)

    def flat_tail(self, x: Value, axes: int) -> Value:
        """``x`` with its last ``axes`` axes as one."""
        lead = x.type.shape[: len(x.type.shape) - axes]
        return self.reshape(x, (*lead, prod(x.type.shape[len(lead) :])))
