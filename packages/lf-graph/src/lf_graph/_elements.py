"""What a chain is made of, and how its elements are grouped into what is captured together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from lf_graph._errors import ClosedError, GraphError, SignatureError
from lf_graph._segment import Piece, Segment
from lf_graph._static import spec_of


@dataclass(frozen=True)
class Eager:
    """A function that stays outside of graphs; it may read values back, change shapes inside, communicate.

    Its outputs must have the same shapes and dtypes at every call; they are copied to where the next graph reads.

    Attributes:
        fn: takes the input values in order as tensors, returns a tensor or a tuple of tensors; differentiable as usual.
        inputs: names of the values it takes; empty means the outputs of the element before it.
        outputs: names of what it returns; empty means one value with a name of its own.
        name: for errors and statistics.
    """

    fn: Callable[..., Any]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    name: str = ""

    def modules(self) -> list[nn.Module]:
        """The modules behind ``fn``."""
        return Piece(self.fn).modules()


Element = Piece | Eager


def require_elements(elements: Sequence[Any]) -> None:
    """Refuse an empty chain, and what is neither a piece nor eager.

    Raises:
        GraphError: naming the first such element.
    """
    if not elements:
        raise GraphError("a chain needs at least one element")
    for i, element in enumerate(elements):
        if not isinstance(element, Element):
            kind = type(element).__name__
            raise GraphError(
                f"element {i} is a {kind}: wrap it in Piece, or in Eager to keep it out of graphs"
            )


def require_names(names: Any, what: str) -> None:
    """Refuse a string in the place of a tuple of names: it would be taken for one name per letter.

    Raises:
        GraphError: saying how to write it.
    """
    if isinstance(names, str):
        raise GraphError(f"{what}: names come as a tuple; write ({names!r},)")


def resolve(elements: Sequence[Element], inputs: Sequence[str]) -> list[Element]:
    """Fill in what was left out: each element takes what the one before it gave, and names itself.

    Raises:
        GraphError: an input that nothing before it gives, or a name given twice.
    """
    known, last, resolved = set(inputs), tuple(inputs), []
    for i, element in enumerate(elements):
        name = element.name or f"{type(element).__name__.lower()}{i}"
        require_names(element.inputs, f"inputs of {name}")
        require_names(element.outputs, f"outputs of {name}")
        takes = element.inputs or last
        gives = element.outputs or (f"_{i}",)
        if missing := [n for n in takes if n not in known]:
            have = ", ".join(sorted(known))
            raise GraphError(f"{name} takes {missing}, which nothing before it gives; there are: {have}")
        if twice := [n for n in gives if n in known]:
            raise GraphError(f"{name} gives {twice}, which are there already: choose other names")
        resolved.append(replace(element, inputs=takes, outputs=gives, name=name))
        known |= set(gives)
        last = gives
    return resolved


def require_given(outputs: Sequence[str], elements: Sequence[Element], inputs: Sequence[str]) -> None:
    """Refuse an output of the chain that is no value of it.

    Raises:
        GraphError: naming it and what there is.
    """
    given = [*inputs, *(n for e in elements for n in e.outputs)]
    if missing := [n for n in outputs if n not in given]:
        raise GraphError(f"nothing gives the outputs {missing}; there are: {', '.join(given)}")


@dataclass
class Stage:
    """Neighbouring pieces as one segment, or one eager element, and the values that it takes and gives."""

    elements: list[Element]
    inputs: list[str]
    outputs: list[str]
    segment: Segment | None = None
    fixed: list[Tensor] = field(default_factory=list)  # where the segment reads its inputs

    def captured(self) -> Segment:
        """The segment, which exists after a capture."""
        if self.segment is None:
            raise ClosedError("this chain was closed")
        return self.segment


def stages_of(elements: Sequence[Element], outputs: Sequence[str]) -> list[Stage]:
    """Group neighbouring pieces; a stage gives what later stages or the chain's ``outputs`` need."""
    groups = itertools.groupby(elements, key=lambda e: isinstance(e, Piece))
    parts: list[list[Element]] = []
    for is_piece, group in groups:
        parts += [list(group)] if is_piece else [[e] for e in group]
    stages = []
    for i, part in enumerate(parts):
        later = {n for p in parts[i + 1 :] for e in p for n in e.inputs} | set(outputs)
        made = [n for e in part for n in e.outputs]
        takes = dict.fromkeys(n for e in part for n in e.inputs if n not in made)
        stages.append(Stage(part, list(takes), [n for n in made if n in later]))
    return stages


def call_eager(element: Eager, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The element's outputs by name.

    Raises:
        GraphError: it returned another number of values than it named.
    """
    result = element.fn(*[values[n] for n in element.inputs])
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    if len(outputs) != len(element.outputs):
        raise GraphError(f"{element.name} returned {len(outputs)} values, named {list(element.outputs)}")
    return dict(zip(element.outputs, outputs, strict=True))


def run_eager(element: Eager, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The element's outputs at addresses of their own, where the following graphs will read."""
    outputs = call_eager(element, {n: values[n].detach() for n in element.inputs})
    wants = any(values[n].requires_grad for n in element.inputs)
    return {n: _place(o, wants) for n, o in outputs.items()}


def _place(output: Tensor, wants_gradient: bool) -> Tensor:
    place = output.detach().clone()
    return place.requires_grad_(output.requires_grad or (wants_gradient and output.is_floating_point()))


def require_like(place: Tensor, value: Tensor, name: str) -> None:
    """Refuse what an eager element gave in another shape or dtype: a copy would spread or convert it in silence."""
    if place.shape != value.shape or place.dtype != value.dtype:
        fix = "let the eager element give the same shape and dtype at every call"
        raise SignatureError(name, [f"{spec_of(place)} -> {spec_of(value)}"], fix)
