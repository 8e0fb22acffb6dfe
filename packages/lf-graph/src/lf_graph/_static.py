"""Inputs at fixed addresses, and the signature a graph was captured for.

Everything that is not a tensor is part of the signature: a graph holds Python numbers as they were (frozen lengths
gave wrong results silently in flash-attention#1164), so a replay with another value is refused, old -> new.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lf_graph._errors import GraphError, SignatureError
from lf_graph._held import held, same, value_of


@dataclass(frozen=True)
class TensorSpec:
    """What a graph fixes of a tensor: everything but its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __str__(self) -> str:
        grad = ", grad" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}{grad}"


@dataclass(frozen=True)
class Signature:
    """The structure of a call's arguments; equal signatures can be replayed by one graph."""

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]  # TensorSpec, the value itself, or Held where it can change

    def filled(self, tensors: Iterable[Any]) -> Any:
        """The structure with ``tensors`` where it has any, and every other leaf as it was given."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, TensorSpec) else value_of(x) for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)

    def same(self, other: Signature) -> bool:
        """Whether there is no difference; 1, 1.0 and True are three values."""
        if self.structure != other.structure:
            return False
        return all(same(a, b) for a, b in zip(self.leaves, other.leaves, strict=True))

    def differences(self, other: Signature) -> list[str]:
        """Each difference as ``path: old -> new``."""
        if self.same(other):
            return []
        if self.structure != other.structure:
            return _structural(self.structure, other.structure)
        paths = _paths(self.structure)
        pairs = zip(paths, self.leaves, other.leaves, strict=True)
        return [f"{path}: {old} -> {new}" for path, old, new in pairs if not same(old, new)]


def _structural(old: pytree.TreeSpec, new: pytree.TreeSpec) -> list[str]:
    """Which arguments came or went; the structures themselves where the same paths lie in other containers."""
    before, now = _paths(old), _paths(new)
    gone = [f"{path}: given -> missing" for path in before if path not in now]
    came = [f"{path}: missing -> given" for path in now if path not in before]
    return [*gone, *came] or [f"structure: {old} -> {new}"]


def _paths(structure: pytree.TreeSpec) -> list[str]:
    numbered = pytree.tree_unflatten(list(range(structure.num_leaves)), structure)
    found, _ = pytree.tree_flatten_with_path(numbered)
    args_or_kwargs = ("args", "kwargs")
    return [args_or_kwargs[path[0].idx] + pytree.keystr(path[1:]) for path, _ in found]  # type: ignore[attr-defined]


def require_constants(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse objects with tensors inside, whose content a graph would freeze without anybody noticing.

    Raises:
        GraphError: naming the type, with what to give instead.
    """
    for leaf in pytree.tree_leaves((args, kwargs)):
        if _hides_values(leaf):
            raise GraphError(
                f"an argument is a {type(leaf).__name__}, whose content would be frozen into the graph: give tensors, "
                "or lists, tuples and dicts of them (a batch object as **batch, or registered with "
                "torch.utils._pytree)"
            )


def _hides_values(leaf: Any) -> bool:
    if isinstance(leaf, Mapping):
        return True
    if isinstance(leaf, (Tensor, nn.Module, type)) or type(leaf).__module__.startswith("lf_graph"):
        return False
    return any(isinstance(x, (Tensor, np.ndarray)) for x in getattr(leaf, "__dict__", {}).values())


def spec_of(tensor: Tensor) -> TensorSpec:
    """The spec of one tensor."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """The signature of a call.

    Raises:
        GraphError: it holds a numpy array, which would be frozen as it is, or an object too large to compare.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray):
            raise GraphError(
                f"{_paths(structure)[i]} is a numpy array, and a graph would keep its values for ever: give "
                "torch.from_numpy(array) on the device of the model"
            )
    return Signature(structure, tuple(fixed(structure, i, x) for i, x in enumerate(leaves)))


def fixed(structure: pytree.TreeSpec, i: int, leaf: Any) -> Any:
    """A leaf as a signature holds it; ``i`` is its place in the structure."""
    if isinstance(leaf, Tensor):
        return spec_of(leaf)
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    return held(leaf, lambda: _paths(structure)[i])  # asked for errors only


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors of a call, in the order of its signature."""
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape


def copy_into(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> int:
    """Copy each source over its target, in as few launches as there are dtypes; returns the number of copies."""
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if not same_memory(t, s)]
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs], non_blocking=True)
    return len(pairs)


class StaticInputs:
    """Copies of a sample call's tensors at addresses that stay, with the call's signature."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.signature = signature_of(args, kwargs)
        self.tensors = [_twin(t) for t in tensors_of(args, kwargs)]

    def call_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The sample call with its tensors replaced by the static ones."""
        args, kwargs = self.signature.filled(self.tensors)
        return args, kwargs

    def require(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The call's tensors, if its signature is the captured one.

        Raises:
            SignatureError: naming each difference.
        """
        found = signature_of(args, kwargs)
        if differences := self.signature.differences(found):
            raise SignatureError(name, differences)
        return tensors_of(args, kwargs)

    def nbytes(self) -> int:
        """Bytes of the static copies."""
        return sum(t.numel() * t.element_size() for t in self.tensors)


def _twin(t: Tensor) -> Tensor:
    twin = torch.empty_like(t, memory_format=torch.preserve_format).copy_(t.detach())
    return twin.requires_grad_(t.requires_grad)
