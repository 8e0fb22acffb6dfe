"""Objects among the arguments of a capture: what they held, so that a later change of it is seen."""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lf_graph._errors import GraphError

MOST = 1000
"""Values in one argument; beyond it would be compared at every call for longer than a launch takes."""
_WHOLE = (
    Tensor,
    nn.Module,
    type,
    enum.Enum,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
    torch.Generator,
)


@dataclass(frozen=True)
class Held:
    """An object and its content at a moment; equal if it is the same object with the same content."""

    value: Any
    content: Any

    def __str__(self) -> str:
        kind = type(self.value).__name__
        said = (
            ", ".join(f"{k}={v!r}" for k, v in self.content[1])
            if _is_fields(self.content)
            else str(self.content)
        )
        return f"{kind}({said[:200]})"


class _Fields:
    """Marks the content of an object with attributes."""


def _is_fields(content: Any) -> bool:
    return isinstance(content, tuple) and len(content) == 2 and content[0] is _Fields


def held(value: Any, where: Callable[[], str]) -> Any:
    """``value`` itself where it cannot change, else it with its content.

    Raises:
        GraphError: it holds a numpy array, or more than can be compared at every call; ``where`` names it.
    """
    content = _Reader(where).content(value)
    return value if content is value else Held(value, content)


def value_of(leaf: Any) -> Any:
    """The object that :func:`held` was given."""
    return leaf.value if isinstance(leaf, Held) else leaf


class _Reader:
    def __init__(self, where: Callable[[], str]) -> None:
        self.where, self.count, self.open = where, 0, set[int]()

    def content(self, value: Any) -> Any:
        """Tuples of what it holds, of which equality is that of all parts; the value itself where it has no parts."""
        self.count += 1
        if self.count > MOST:
            raise GraphError(
                f"{self.where()} is a {type(value).__name__} that leads to over {MOST} values, and a graph would "
                "freeze them: give the numbers and tensors that the function needs"
            )
        if isinstance(value, np.ndarray):
            raise GraphError(
                f"{self.where()} holds a numpy array, and a graph would keep its values for ever: give "
                "torch.from_numpy(array)"
            )
        if isinstance(value, _WHOLE) or type(value).__module__.startswith(("lf_graph", "torch")):
            return value
        if isinstance(value, bytearray):
            return bytearray, bytes(value)
        if isinstance(value, Set) and not isinstance(value, frozenset):
            return type(value), frozenset(value)
        if id(value) in self.open:
            return "itself"
        parts = self._parts(value)
        if parts is None:
            return value
        self.open.add(id(value))
        try:
            return (parts[0], tuple((name, self.content(part)) for name, part in parts[1]))
        finally:
            self.open.discard(id(value))

    def _parts(self, value: Any) -> tuple[Any, list[tuple[Any, Any]]] | None:
        if isinstance(value, (list, tuple, deque)):
            return type(value), list(enumerate(value))
        if isinstance(value, Mapping):
            return type(value), list(value.items())
        fields = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            names = kind.__dict__.get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if hasattr(value, name):
                    fields[name] = getattr(value, name)
        return (_Fields, list(fields.items())) if fields else None


def same(a: Any, b: Any) -> bool:
    """Whether two values are of one type and equal, part by part; NaN is NaN here, and tensors only themselves."""
    if type(a) is not type(b):
        return False
    if a is b:
        return True
    if isinstance(a, Held):
        return type(a.value) is type(b.value) and same(a.content, b.content)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor):
        return False
    return bool(a == b) or (a != a and b != b)
