"""Values between the elements of a chain: who makes them, who reads them, and from when until when they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lf_graph._elements import Element, Stage


@dataclass(frozen=True)
class Edge:
    """One named value of a captured :class:`Chain`, made once in a call.

    Elements are numbered in the order in which they run; their backwards run in the opposite order.

    Attributes:
        name: under which elements take and give it.
        made_by: name of the element that gives it; "" for an input of the call.
        used_by: names of the elements that take it, in order.
        returned: whether a call returns it.
        first: number of the element that gives it; -1 for an input of the call.
        last: number of the last element that takes it; the number of elements where it is returned.
        gradient: whether a gradient comes back along it: then ``made_by`` gets it when the backwards of all in
            ``used_by`` have run, and what they keep of the value lives until then.
        shape, dtype: of the value at its fixed address; None where it has none, which is what only eager elements read.
    """

    name: str
    made_by: str
    used_by: tuple[str, ...]
    returned: bool
    first: int
    last: int
    gradient: bool = False
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Bytes at the fixed address; 0 where there is none."""
        count = 0 if self.shape is None else torch.Size(self.shape).numel()
        return count * (0 if self.dtype is None else self.dtype.itemsize)


def edges_of(
    elements: Sequence[Element], inputs: Sequence[str], outputs: Sequence[str], places: Mapping[str, Tensor]
) -> tuple[Edge, ...]:
    """The edges of a chain in the order in which they are made; ``places`` are the values at fixed addresses."""
    made = dict.fromkeys(inputs, -1)
    made |= {name: i for i, element in enumerate(elements) for name in element.outputs}
    found = []
    for name, first in made.items():
        users = [i for i, element in enumerate(elements) if name in element.inputs]
        returned = name in outputs
        value = places.get(name)
        found.append(
            Edge(
                name,
                "" if first < 0 else elements[first].name,
                tuple(elements[i].name for i in users),
                returned,
                first,
                len(elements) if returned else max(users, default=first),
                value is not None and value.requires_grad,
                None if value is None else tuple(value.shape),
                None if value is None else value.dtype,
            )
        )
    return tuple(found)


def places_of(stages: Sequence[Stage], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of captured stages by name: the inputs of the call, and what segments read and give."""
    found = dict(inputs)
    for stage in stages:
        found |= dict(zip(stage.inputs, stage.fixed, strict=False))
        found |= {} if stage.segment is None else stage.segment.values
    return found
