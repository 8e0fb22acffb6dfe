"""``partition``: cut a module where :func:`~lf_graph.check` finds what a graph cannot hold.

Submodules with findings stay eager, everything between them becomes pieces. Only the forwards of modules that contain
such submodules are followed; all others are called as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lf_graph._chain import Chain
from lf_graph._check import check
from lf_graph._errors import GraphCaptureError, GraphError
from lf_graph._findings import Finding, Report
from lf_graph._names import names_behind
from lf_graph._preserve import preserved
from lf_graph._recorder import as_if_capturing
from lf_graph._specs import Kind, Spec, evaluate
from lf_graph._trace import Context, Position, Traced, trace


@dataclass(frozen=True)
class Partition:
    """A module as parts.

    Attributes:
        specs: the parts in order.
        inputs: names of the tensors among the module's arguments.
        outputs: names of the tensors among what it returns.
        report: what was found, and so why there are cuts.
        leaves: what the module returns, flattened; tensors by their position in ``outputs``.
        structure: how it is put together.
    """

    specs: tuple[Spec, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    report: Report
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    def chain(self, **options: Any) -> Chain:
        """The parts as a :class:`~lf_graph.Chain`, which takes and gives the tensors in order.

        Args:
            options: of the chain, such as ``autocast`` and ``max_bytes``.

        Returns:
            A chain that is not captured yet.
        """
        return Chain([s.element() for s in self.specs], self.inputs, self.outputs, **options)

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """What the module would return, from the tensors that a chain returned (one alone, or a tuple)."""
        given = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
        leaves = [given[x.index] if isinstance(x, Position) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)

    def __str__(self) -> str:
        lines = [
            f"{s.kind:5}  {s.name}  ({', '.join(s.inputs)}) -> {', '.join(s.outputs)}" for s in self.specs
        ]
        return "\n".join(lines)


def partition(module: nn.Module, *args: Any, **kwargs: Any) -> Partition:
    """Cut ``module`` for a call like ``module(*args, **kwargs)``.

    Everything but the values of tensors is fixed by the call: shapes, flags, the training mode. ``no_grad`` and
    autocast inside the module are kept; an autocast around the call is given to :meth:`Partition.chain` instead. The
    parts are run once against the module and must give the same bits.

    Args:
        module: its parameters and submodules are shared by the parts.
        args, kwargs: a sample call.

    Returns:
        The parts, one piece if nothing was found.

    Raises:
        GraphCaptureError: a finding that belongs to no submodule, or a line of a followed forward that cannot be a
            node of a graph; with the line and the way out.
        GraphError: no tensor among the arguments, a parameter or buffer is returned itself, or the parts do not give
            the module's bits.
    """
    report = check(module, *args, **kwargs)
    eager = _eager_modules(module, report.errors)
    names = names_behind(module)
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not tensors:
        raise GraphError(
            "partition needs at least one tensor argument, which says for what device and shapes to cut"
        )
    with preserved(names, tensors), as_if_capturing():
        parts = _cut(module, args, kwargs, report, eager) if eager else _whole(module, args, kwargs, report)
    _verify(parts, module, args, kwargs, tensors)
    return parts


def _whole(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Partition:
    """The module as one piece, without looking inside."""
    whole = _Whole(module, args, kwargs)
    leaves, structure = pytree.tree_flatten(module(*args, **kwargs))
    places = itertools.count()
    marked = tuple(Position(next(places)) if isinstance(x, Tensor) else x for x in leaves)
    inputs = tuple(f"in{i}" for i in range(whole.tensors))
    outputs = tuple(f"out{x.index}" for x in marked if isinstance(x, Position))
    spec = Spec("piece", whole, inputs, outputs, type(module).__name__, (module,))
    return Partition((spec,), inputs, outputs, report, marked, structure)


class _Whole(nn.Module):
    """A module as a function of the tensors among its arguments that returns the tensors among its results."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._constants = [None if isinstance(x, Tensor) else x for x in leaves]
        self._places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.tensors = len(self._places)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self._constants)
        for place, value in zip(self._places, values, strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return tuple(x for x in pytree.tree_leaves(self.module(*args, **kwargs)) if isinstance(x, Tensor))


def _cut(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report, eager: frozenset[str]
) -> Partition:
    """The parts around the modules that stay eager; only the forwards that lead to these are followed."""
    followed = {parent for name in eager for parent in _parents(name)}
    traced = trace(module, args, kwargs, lambda name: name not in followed)
    _require_called(eager, traced)
    specs, outputs = _specs(module, traced, eager)
    inputs = tuple(n.name for n in traced.graph.nodes if n.op == "placeholder")
    return Partition(specs, inputs, outputs, report, traced.leaves, traced.structure)


def _eager_modules(module: nn.Module, errors: Sequence[Finding]) -> frozenset[str]:
    """The submodules that stay eager: the outermost of those that have findings of their own.

    Raises:
        GraphCaptureError: a finding in the forward of the module itself.
    """
    known = {name for name, _ in module.named_modules()}
    for finding in errors:
        if not finding.module or finding.module not in known:
            fix = f"{finding.fix}; or put these lines into a submodule, which then stays eager"
            raise GraphCaptureError(finding.op, finding.where, finding.why, fix)
    named = {f.module for f in errors}
    return frozenset(n for n in named if not any(parent in named for parent in _parents(n)))


def _parents(name: str) -> Iterator[str]:
    """``a`` and ``a.b`` for ``a.b.c``."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _require_called(eager: frozenset[str], traced: Traced) -> None:
    missed = sorted(eager - traced.called)
    if missed:
        raise GraphCaptureError(
            missed[0],
            "",
            "the module has findings, and is used by another method than its call",
            "call it as self.child(...), so that it can stay eager",
        )


def _specs(
    module: nn.Module, traced: Traced, eager: frozenset[str]
) -> tuple[tuple[Spec, ...], tuple[str, ...]]:
    """The parts, cut where the kind or the modes change, and the names of the values that the module returns."""
    parts = _parts(traced, eager)
    (output,) = [n for n in traced.graph.nodes if n.op == "output"]
    returned: list[torch.fx.Node] = list(output.args[0])
    if any(n.op == "get_attr" for n in returned):
        raise GraphError("the module returns a parameter or buffer itself: return a copy, or leave it out")
    specs = []
    for i, part in enumerate(parts):
        later = {n for p in parts[i + 1 :] for node in p.nodes for n in node.all_input_nodes} | set(returned)
        specs.append(_spec(module, part, later, f"piece{i}"))
    return tuple(specs), tuple(n.name for n in returned)


@dataclass(frozen=True)
class _Part:
    """Neighbouring nodes of one kind under the same modes."""

    kind: Kind
    context: Context | None
    nodes: list[torch.fx.Node]


def _parts(traced: Traced, eager: frozenset[str]) -> list[_Part]:
    parts: list[_Part] = []
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        stays = node.op == "call_module" and str(node.target) in eager
        kind: Kind = "eager" if stays else "piece"
        context = traced.contexts.get(node)
        last = parts[-1] if parts else None
        same = last is not None and (kind, context) == (last.kind, last.context) and not stays
        if last is not None and (same or node in traced.parts):
            last.nodes.append(node)
        else:
            parts.append(_Part(kind, context, [node]))
    return parts


def _spec(module: nn.Module, part: _Part, later: set[torch.fx.Node], name: str) -> Spec:
    """A part as a module of its own, with the values it takes and those that are wanted later."""
    outside = dict.fromkeys(n for node in part.nodes for n in node.all_input_nodes if n not in part.nodes)
    takes = [n for n in outside if n.op != "get_attr"]
    gives = [n for n in part.nodes if n in later] or part.nodes[-1:]
    graph = torch.fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in takes or _first_placeholder(part)}
    copies |= {n: graph.get_attr(str(n.target)) for n in outside if n.op == "get_attr"}
    for node in part.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    made = tuple(copies[n] for n in gives)
    graph.output(made[0] if len(made) == 1 else made)
    built: nn.Module = torch.fx.GraphModule(module, graph)
    if part.context is not None:
        built = _InContext(built, part.context)
    called = [str(n.target) for n in part.nodes if n.op == "call_module"]
    inputs = tuple(n.name for n in takes or _first_placeholder(part))
    owners = (module, *(module.get_submodule(c) for c in called))
    given = tuple(n.name for n in gives)
    return Spec(part.kind, built, inputs, given, called[0] if part.kind == "eager" else name, owners)


def _first_placeholder(part: _Part) -> list[torch.fx.Node]:
    """An input for a part that needs none: in a chain, no names would mean the values of the part before."""
    return [next(n for n in part.nodes[0].graph.nodes if n.op == "placeholder")]


class _InContext(nn.Module):
    """A part under the modes that were on around it inside the module."""

    def __init__(self, inner: nn.Module, context: Context) -> None:
        super().__init__()
        self.inner, self._context = inner, context

    def forward(self, *values: Tensor) -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._context.grad))
            for device, enabled, dtype in self._context.autocast:
                if (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) != (enabled, dtype):
                    stack.enter_context(torch.autocast(device, dtype, enabled))
            return self.inner(*values)


def _verify(
    parts: Partition,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tensors: list[Tensor],
) -> None:
    """Run the parts and the module from one state.

    Raises:
        GraphError: they differ, and the module agrees with itself.
    """
    names = names_behind(module)

    def from_here(fn: Callable[[], list[Tensor]]) -> list[Tensor]:
        with preserved(names, tensors), as_if_capturing(), torch.no_grad():
            return [t.clone() for t in fn()]

    def whole() -> list[Tensor]:
        return [t for t in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(t, Tensor)]

    def cut() -> list[Tensor]:
        values = evaluate(parts.specs, dict(zip(parts.inputs, tensors, strict=True)))
        return [values[n] for n in parts.outputs]

    expected = from_here(whole)
    if not _same_bits(expected, from_here(cut)) and _same_bits(expected, from_here(whole)):
        raise GraphError(
            "the parts do not compute what the module does: something passes between submodules that is no tensor (an "
            "attribute, a global, a context manager); pass it as an argument, or build the Chain by hand"
        )


def _same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    if [(t.shape, t.dtype) for t in a] != [(t.shape, t.dtype) for t in b]:
        return False
    return all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in zip(a, b, strict=True))
