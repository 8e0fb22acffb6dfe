"""Parts of a computation as plain data: what becomes a graph, what stays eager, and which values pass between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from torch import Tensor, nn

from lf_graph._elements import Eager
from lf_graph._errors import GraphError
from lf_graph._segment import Piece

Kind = Literal["piece", "eager"]


@dataclass(frozen=True)
class Spec:
    """One part.

    Attributes:
        kind: ``piece`` becomes a forward and a backward graph, ``eager`` stays ordinary code.
        module: takes the input values in order, returns a tensor or a tuple of tensors; it shares its parameters with
            the module it was made from.
        inputs: names of the values it takes.
        outputs: names of what it returns.
        name: for errors and statistics.
        owners: the user's modules that the part was made from: a chain refuses a replay when their modes changed.
    """

    kind: Kind
    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    name: str = ""
    owners: tuple[nn.Module, ...] = ()

    def element(self) -> Piece | Eager:
        """The part as an element of a :class:`~lf_graph.Chain`."""
        if self.kind == "eager":
            return Eager(self.module, self.inputs, self.outputs, self.name)
        owners = (self.module, *self.owners)
        return Piece(_Call(self.module), self.inputs, self.outputs, self.name, owners=owners)


class _Call:
    """A module as a plain function: ``model.eval()`` reaches the user's modules and not the one that holds them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *values: Tensor) -> Any:
        return self._module(*values)


def evaluate(specs: Iterable[Spec], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run the parts one after the other as ordinary code.

    Args:
        specs: in order.
        values: the inputs by name.

    Returns:
        All values by name, the inputs too.
    """
    known = dict(values)
    for spec in specs:
        result = spec.module(*[known[n] for n in spec.inputs])
        given = result if isinstance(result, (tuple, list)) else (result,)
        known.update(zip(spec.outputs, given, strict=True))
    return known


def merge(specs: Sequence[Spec], outputs: Sequence[str] = ()) -> tuple[Spec, ...]:
    """Join neighbouring pieces; eager parts stay as they are.

    Args:
        specs: in order.
        outputs: values that are wanted from outside; default: what the last part gives.

    Returns:
        Parts with the same composition. A value that only joined parts used has no name any more.

    Raises:
        GraphError: one of ``outputs`` is given by no part.
    """
    wanted = set(outputs or specs[-1].outputs)
    unknown = wanted - {n for s in specs for n in s.outputs}
    if unknown:
        raise GraphError(
            f"no part gives {sorted(unknown)}; they give {[n for s in specs for n in s.outputs]}"
        )
    merged: list[Spec] = []
    position = 0
    for kind, group in groupby(specs, key=lambda s: s.kind):
        parts = list(group)
        position += len(parts)
        later = wanted | {n for s in specs[position:] for n in s.inputs}
        merged += [_join(parts, later)] if kind == "piece" else parts
    return tuple(merged)


def _join(parts: Sequence[Spec], later: set[str]) -> Spec:
    if len(parts) == 1:
        return parts[0]
    made = [n for p in parts for n in p.outputs]
    inputs = tuple(dict.fromkeys(n for p in parts for n in p.inputs if n not in made))
    outputs = tuple(n for n in made if n in later)
    name = f"{parts[0].name}..{parts[-1].name}"
    owners = tuple(dict.fromkeys(m for p in parts for m in p.owners))
    return Spec("piece", _Joined(parts, inputs, outputs), inputs, outputs, name, owners)


class _Joined(nn.Module):
    """Parts that run one after the other."""

    def __init__(self, parts: Sequence[Spec], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([p.module for p in parts])
        self._specs, self._inputs, self._outputs = tuple(parts), inputs, outputs

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        known = evaluate(self._specs, dict(zip(self._inputs, values, strict=True)))
        given = tuple(known[n] for n in self._outputs)
        return given[0] if len(given) == 1 else given
