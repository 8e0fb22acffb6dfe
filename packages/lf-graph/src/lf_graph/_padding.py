"""Which bucket a length belongs to, and how a call is padded to it: pure planning over pytrees and signatures."""

from __future__ import annotations

import bisect
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lf_graph._errors import GraphError
from lf_graph._static import Signature, TensorSpec, copy_into, fixed, spec_of

Scalar = float | int | bool
Dims = int | Mapping[str | int, int]
Pads = Scalar | Mapping[str | int, Scalar]


class _Fill:
    """Stands in a call for the tensor of lengths that the wrapper writes."""

    def __repr__(self) -> str:
        return "<lengths>"


FILL = _Fill()


def checked_edges(edges: Sequence[int]) -> tuple[int, ...]:
    """Bucket edges: positive whole numbers, strictly rising.

    Raises:
        GraphError: they are not.
    """
    if not isinstance(edges, Iterable):
        raise GraphError(f"edges={edges!r}: give the lengths of all buckets, such as (256, 512, 1024)")
    found = tuple(edges)
    whole = all(isinstance(e, int) and not isinstance(e, bool) and e > 0 for e in found)
    if not found or not whole or any(a >= b for a, b in itertools.pairwise(found)):
        raise GraphError(f"edges must be positive whole numbers in rising order, got {list(found)}")
    return found


def bucket_of(length: int, edges: Sequence[int]) -> int | None:
    """The smallest edge that holds ``length``; None when it is longer than the last."""
    at = bisect.bisect_left(edges, length)
    return edges[at] if at < len(edges) else None


def positional_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Names of what ``fn`` takes by position; () when it does not say."""
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)


def leaf_names(structure: pytree.TreeSpec) -> list[str]:
    """A dotted path for each leaf of a tree: ``0.ids`` for ``({"ids": x},)``; "" for a lone leaf."""
    numbered = pytree.tree_unflatten(list(range(structure.num_leaves)), structure)
    paths, _ = pytree.tree_flatten_with_path(numbered)
    return [".".join(_key(k) for k in path) for path, _ in paths]


def _key(entry: Any) -> str:
    return str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry))))


def argument_names(structure: pytree.TreeSpec, positional: Sequence[str]) -> list[str]:
    """Leaf names of a call ``(args, kwargs)``: the parameter's name, then the path inside its value."""
    return [_argument(name, positional) for name in leaf_names(structure)]


def _argument(path: str, positional: Sequence[str]) -> str:
    place, _, rest = path.partition(".")
    if place == "1":
        return rest
    index, _, inner = rest.partition(".")
    name = positional[int(index)] if int(index) < len(positional) else index
    return f"{name}.{inner}" if inner else name


@dataclass(frozen=True)
class Pad:
    """One tensor that grows to the edge.

    Attributes:
        name: of the argument, with the path inside it.
        dim: the dimension that is the length; may be negative.
        value: what fills the end.
    """

    name: str
    dim: int
    value: Scalar


@dataclass(frozen=True)
class PaddingPlan:
    """For each tensor of a call, in order: how it grows, or None for what stays as it is."""

    pads: tuple[Pad | None, ...]


def by_name(spec: Mapping[str | int, Any], positional: Sequence[str]) -> dict[str, Any]:
    """A mapping by parameter name or position as one by name."""
    named = {}
    for key, value in spec.items():
        known = isinstance(key, int) and key < len(positional)
        named[positional[key] if known else str(key)] = value  # type: ignore[index]
    return named


def make_plan(
    names: Sequence[str], dims: Dims, pads: Pads, lengths: str | None, positional: Sequence[str] = ()
) -> PaddingPlan:
    """How the tensors of a call, called ``names``, are padded.

    Args:
        dims: one dimension for every tensor but ``lengths``, or a dimension for each tensor that is padded.
        pads: one value for all, or a value for each; 0 where none is given.
        lengths: the argument that holds lengths; it is never padded.

    Raises:
        GraphError: a name that no tensor of the call has, or nothing to pad.
    """
    everyone = [n for n in names if n != lengths]
    wanted = dict.fromkeys(everyone, dims) if isinstance(dims, int) else by_name(dims, positional)
    values = by_name(pads, positional) if isinstance(pads, Mapping) else dict.fromkeys(wanted, pads)
    strange = [n for n in (*wanted, *values) if n not in names]
    if strange or not wanted:
        raise GraphError(f"no tensor to pad is called {strange}; the call has {list(names)}")
    return PaddingPlan(tuple(Pad(n, wanted[n], values.get(n, 0)) if n in wanted else None for n in names))


def length_of(plan: PaddingPlan, tensors: Sequence[Any]) -> int:
    """The common length of all padded tensors.

    Raises:
        GraphError: they disagree, one lacks its dimension, or the length is 0.
    """
    found: dict[str, int] = {}
    for pad, tensor in zip(plan.pads, tensors, strict=True):
        if pad is None:
            continue
        if not -tensor.dim() <= pad.dim < tensor.dim():
            raise GraphError(
                f"{pad.name} has shape {list(tensor.shape)} and no dimension {pad.dim} to pad: say with "
                "dims={name: dimension} which arguments are padded"
            )
        found[pad.name] = tensor.shape[pad.dim]
    lengths = set(found.values())
    if len(lengths) != 1 or 0 in lengths:
        raise GraphError(f"what is padded must have one common length above 0, got {found}")
    return lengths.pop()


@dataclass(frozen=True)
class Call:
    """One call, read once: its leaves, how they are padded, and their common length.

    Attributes:
        structure: of ``(args, kwargs)``.
        leaves: tensors and constants; :data:`FILL` where the lengths go.
        plan: for the tensors among them.
        length: of what is padded.
        rows: sequences in the call: the first dimension, or 1 when that is the length.
    """

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    plan: PaddingPlan
    length: int
    rows: int

    @property
    def tensors(self) -> list[Any]:
        """The leaves that are tensors in a graph."""
        return [x for x in self.leaves if is_tensor(x)]

    @property
    def device(self) -> torch.device:
        """Where the first padded tensor lies."""
        first: Tensor = next(t for t, p in zip(self.tensors, self.plan.pads, strict=True) if p is not None)
        return first.device

    def signature(self, edge: int) -> Signature:
        """Of the call padded to ``edge``."""
        pads = iter(self.plan.pads)
        leaves = (
            self._spec(x, next(pads), edge) if is_tensor(x) else fixed(self.structure, i, x)
            for i, x in enumerate(self.leaves)
        )
        return Signature(self.structure, tuple(leaves))

    def _spec(self, leaf: Any, pad: Pad | None, edge: int) -> TensorSpec:
        if leaf is FILL:
            return TensorSpec((self.rows,), torch.int64, self.device, False)
        spec = spec_of(leaf)
        return spec if pad is None else replace(spec, shape=_resized(spec.shape, pad.dim, edge))

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with other tensors in the place of its own."""
        given = iter(tensors)
        leaves = [next(given) if is_tensor(x) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    def unpadded(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call as it came, with its lengths filled in."""
        return self.arguments([self._filled() if t is FILL else t for t in self.tensors])

    def _filled(self) -> Tensor:
        return torch.full((self.rows,), self.length, dtype=torch.int64, device=self.device)

    def sample(self, edge: int) -> list[Tensor]:
        """New tensors with the values of this call, padded to ``edge``."""
        specs = [x for x in self.signature(edge).leaves if isinstance(x, TensorSpec)]
        places = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in specs]
        for place, pad in zip(places, self.plan.pads, strict=True):
            if pad is not None:
                _require_exact(pad, place.dtype)
        self.write(places)
        return [p.requires_grad_(s.requires_grad) for p, s in zip(places, specs, strict=True)]

    def shortened(self, length: int) -> Call:
        """The beginning of this call."""
        length = min(length, self.length)
        pads = iter(self.plan.pads)
        leaves = [_begin(x, next(pads), length) if is_tensor(x) else x for x in self.leaves]
        return replace(self, leaves=tuple(leaves), length=length)

    @torch.no_grad()
    def write(self, places: Sequence[Tensor]) -> int:
        """Write the call and its padding over ``places``, in place; only device work.

        Returns:
            The number of tensors copied.
        """
        targets, sources = [], []
        for place, leaf, pad in zip(places, self.tensors, self.plan.pads, strict=True):
            if leaf is FILL:
                place.fill_(self.length)
                continue
            targets.append(place.detach() if pad is None else self._write_end(place.detach(), pad))
            sources.append(leaf)
        return copy_into(targets, sources)

    def _write_end(self, place: Tensor, pad: Pad) -> Tensor:
        """Fill what lies beyond the length; returns the part before."""
        beyond = place.shape[pad.dim] - self.length
        if beyond:
            place.narrow(pad.dim, self.length, beyond).fill_(pad.value)
        return place.narrow(pad.dim, 0, self.length)

    def connect(self, places: Sequence[Tensor]) -> list[Tensor]:
        """``places`` with the gradient history of the call's own tensors, padding excluded."""
        if not torch.is_grad_enabled():
            return list(places)
        joined = []
        for place, leaf, pad in zip(places, self.tensors, self.plan.pads, strict=True):
            wants = leaf is not FILL and leaf.requires_grad
            joined.append(_join(place, leaf, pad, self.length) if wants else place)
        return joined


def _require_exact(pad: Pad, dtype: torch.dtype) -> None:
    """Refuse a value that its tensor would hold as another one, such as -100 as True."""
    if dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if pad.value != int(pad.value) or not low <= pad.value <= high:
        raise GraphError(
            f"{pad.name} is {dtype} and cannot be padded with {pad.value}: give pad={{name: value}}"
        )


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is a tensor in the graph's signature."""
    return isinstance(leaf, Tensor) or leaf is FILL


def _resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    at = dim % len(shape)
    return (*shape[:at], size, *shape[at + 1 :])


def _begin(leaf: Any, pad: Pad | None, length: int) -> Any:
    return leaf if pad is None else leaf.narrow(pad.dim, 0, length)


class _Join(torch.autograd.Function):
    """``place`` (in ``held``, so that autograd sees no input) as if it had been computed from ``source``."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, held: list[Tensor], dim: int | None, length: int) -> Tensor:
        ctx.dim, ctx.length = dim, length
        return held[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad if ctx.dim is None else grad.narrow(ctx.dim, 0, ctx.length), None, None, None


def _join(place: Tensor, source: Tensor, pad: Pad | None, length: int) -> Tensor:
    dim = None if pad is None else pad.dim
    joined: Tensor = _Join.apply(source, [place], dim, length)  # type: ignore[no-untyped-call]
    return joined


def cut_outputs(result: Any, unpad: Dims, edge: int, length: int) -> Any:
    """``result`` without its padding: tensors narrowed from ``edge`` to ``length`` positions.

    Args:
        unpad: one dimension for every tensor, or a dimension by name (``"0"`` in a tuple, the key in a dict).

    Raises:
        GraphError: a name that is not there, or a tensor that has not ``edge`` positions in that dimension.
    """
    leaves, structure = pytree.tree_flatten(result)
    names = leaf_names(structure)
    tensors = [n for n, x in zip(names, leaves, strict=True) if isinstance(x, Tensor)]
    wanted = dict.fromkeys(tensors, unpad) if isinstance(unpad, int) else by_name(unpad, ())
    if strange := [n for n in wanted if n not in tensors]:
        raise GraphError(f"unpad names {strange}; the outputs that are tensors are {tensors}")
    cut = [
        _cut(n, x, wanted[n], edge, length) if n in wanted else x for n, x in zip(names, leaves, strict=True)
    ]
    return pytree.tree_unflatten(cut, structure)


def _cut(name: str, output: Tensor, dim: int, edge: int, length: int) -> Tensor:
    fits = -output.dim() <= dim < output.dim() and output.shape[dim] == edge
    if not fits:
        raise GraphError(
            f"output {name!r} has shape {list(output.shape)}, not {edge} positions in dimension {dim}: say with "
            "unpad={name: dimension} which outputs are padded"
        )
    return output.narrow(dim, 0, length)
