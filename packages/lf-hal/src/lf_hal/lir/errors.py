"""What the intermediate form raises; every error is a :class:`~lf_hal.errors.HalError`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lf_hal.errors import HalError

__all__ = [
    "BadConstantError",
    "BadOpError",
    "BadRecipeError",
    "BadTypeError",
    "DuplicateValueError",
    "DynamicShapeError",
    "ExportFailedError",
    "InvalidGraphError",
    "LirError",
    "LirSyntaxError",
    "MalformedError",
    "OpRuleError",
    "TrainingModeError",
    "TypeMismatchError",
    "UndefinedValueError",
    "UnknownKindError",
    "Unsupported",
    "UnsupportedOperatorsError",
]


class LirError(HalError):
    """Base class of what is wrong with a graph, or with making one."""


class OpRuleError(LirError):
    """Inputs or attributes that the rule of an op kind does not allow.

    Attributes:
        kind: the op kind.
        reason: what is wrong, in words.
    """

    def __init__(self, kind: str, reason: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__(f"{kind}: {reason}")


class LirSyntaxError(LirError):
    """Text that is no graph. Attributes: ``line`` and ``column``, both from 1, and ``reason``."""

    def __init__(self, line: int, column: int, reason: str) -> None:
        self.line, self.column, self.reason = line, column, reason
        super().__init__(f"line {line}, column {column}: {reason}")


class InvalidGraphError(LirError):
    """Base class of what :func:`~lf_hal.lir.verify` finds.

    Attributes:
        op: kind of the op or recipe it was found at, None outside of them.
        value: name of the value it is about, None if it is about the graph.
        reason: what is wrong, in words.
    """

    def __init__(self, reason: str, *, op: str | None = None, value: str | None = None) -> None:
        self.op, self.value, self.reason = op, value, reason
        where = " ".join(p for p in (op and f"op {op}", value is not None and f"value %{value}") if p)
        super().__init__(f"{where or 'graph'}: {reason}")


class MalformedError(InvalidGraphError):
    """A field holds something of another Python type, or a name of other characters than names have."""


class BadTypeError(InvalidGraphError):
    """An element type that does not exist, or a shape that is none."""


class DuplicateValueError(InvalidGraphError):
    """Two values of one name."""


class UndefinedValueError(InvalidGraphError):
    """A name that no value before it has."""


class UnknownKindError(InvalidGraphError):
    """An op or recipe kind that does not exist."""


class BadOpError(InvalidGraphError):
    """Inputs or attributes that the rule of the op's kind does not allow."""


class TypeMismatchError(InvalidGraphError):
    """An output's type is not the one that its op has. Attribute ``expected``: the one it should be, as text."""

    def __init__(self, found: str, expected: str, *, op: str, value: str) -> None:
        self.expected = expected
        super().__init__(f"is declared {found}, but {op} gives {expected}", op=op, value=value)


class BadConstantError(InvalidGraphError):
    """Data of a constant that its type cannot hold."""


class BadRecipeError(InvalidGraphError):
    """A recipe that reads something other than weights and constants, or breaks the rule of its kind."""


@dataclass(frozen=True)
class Unsupported:
    """One thing of a module that has no form in LIR.

    Attributes:
        operator: torch's name of it ("aten.linalg_svd.default").
        module: path of the module it is in, "" for the outermost.
        source: file, line and text of the code, "" where torch does not say.
        reason: what is wrong with it, in words.
    """

    operator: str
    module: str
    source: str
    reason: str

    def __str__(self) -> str:
        where = f" in module {self.module!r}" if self.module else ""
        return f"{self.operator}{where}: {self.reason}" + (f" ({self.source})" if self.source else "")


class UnsupportedOperatorsError(LirError):
    """Operators that LIR has no form for, all of them at once. Attribute ``found``: tuple of :class:`Unsupported`."""

    def __init__(self, found: Sequence[Unsupported]) -> None:
        self.found = tuple(found)
        listed = "\n  ".join(map(str, self.found))
        super().__init__(f"{len(self.found)} not to be traced; write them with other operators:\n  {listed}")


class DynamicShapeError(LirError):
    """A shape that is no fixed one. Attributes: ``value`` (name), ``shape`` (as text)."""

    def __init__(self, value: str, shape: str) -> None:
        self.value, self.shape = value, shape
        super().__init__(
            f"{value} has shape {shape}: LIR has fixed shapes, so export without dynamic_shapes, once for every "
            "size, and compute no shape from data"
        )


class ExportFailedError(LirError):
    """``torch.export`` could not export the module; ``__cause__`` is its error. Attribute ``reason``."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"torch.export failed: {reason}")


class TrainingModeError(LirError):
    """The module, or a part of it, is in training mode. Attribute ``module``: path of the first such part."""

    def __init__(self, module: str) -> None:
        self.module = module
        super().__init__(f"module {module!r} is in training mode: call .eval() on the whole first")
