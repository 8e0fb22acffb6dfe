"""The modules a function works with, and the dotted names of their submodules and parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Names:
    """Modules found behind a function.

    Attributes:
        roots: the outermost modules by name; one alone has the name "", so that every dotted name is the one
            ``named_parameters()`` gives.
        modules: dotted name by ``id(module)``.
        parameters: (dotted name, parameter); a tied parameter appears under each of its names.
    """

    roots: dict[str, nn.Module]
    modules: dict[int, str]
    parameters: tuple[tuple[str, nn.Parameter], ...]

    def each_module(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module once, with its dotted name."""
        seen: set[int] = set()
        for root, module in self.roots.items():
            for name, child in module.named_modules(prefix=root):
                if id(child) not in seen:
                    seen.add(id(child))
                    yield name, child

    def each_buffer(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer once, with its dotted name."""
        for name, module in self.each_module():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{name}.{key}".lstrip("."), buffer


def names_behind(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Names:
    """Find the modules that ``fn`` is, is bound to, encloses, reads as globals or is given as arguments."""
    found = [(name, m) for name, m in _candidates(fn, args, kwargs or {}) if isinstance(m, nn.Module)]
    outermost = _outermost(found)
    if len(outermost) == 1:
        outermost = [("", outermost[0][1])]
    roots = dict(outermost)
    parameters = tuple(
        pair for name, m in outermost for pair in m.named_parameters(prefix=name, remove_duplicate=False)
    )
    modules = {id(c): n for name, m in reversed(outermost) for n, c in m.named_modules(prefix=name)}
    return Names(roots, modules, parameters)


def objects_behind(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[Any]:
    """Everything that :func:`names_behind` looks at, modules or not."""
    return [thing for _, thing in _candidates(fn, args, kwargs or {})]


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    unique = {id(m): (name, m) for name, m in reversed(found)}
    inner = {id(c) for _, m in unique.values() for c in m.modules() if c is not m}
    kept = [(name, m) for key, (name, m) in reversed(unique.items()) if key not in inner]
    taken: set[str] = set()
    result = []
    for name, m in kept:
        while name in taken:
            name += "_"
        taken.add(name)
        result.append((name, m))
    return result


def _candidates(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from _behind(fn)
    for i, arg in enumerate(args):
        yield from _leaves(f"args{i}", arg)
    for name, arg in kwargs.items():
        yield from _leaves(name, arg)


def _behind(fn: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(fn, nn.Module):
        yield "", fn
    elif isinstance(fn, functools.partial):
        yield from _candidates(fn.func, fn.args, fn.keywords)
    elif isinstance(fn, MethodType):
        yield from _held_by(fn.__self__)
    elif isinstance(fn, FunctionType):
        yield from _enclosed(fn, set())
    elif callable(fn) and not isinstance(fn, type):
        yield from _held_by(fn)


def _held_by(thing: Any) -> Iterator[tuple[str, Any]]:
    yield "", thing
    if not isinstance(thing, nn.Module):
        for name, value in getattr(thing, "__dict__", {}).items():
            yield from _leaves(name, value)


def _enclosed(fn: FunctionType, seen: set[FunctionType]) -> Iterator[tuple[str, Any]]:
    """What a function reads from outside, and what the functions of its own file that it calls read."""
    seen.add(fn)
    for name, value in _outside(fn).items():
        yield from _leaves(name, value)
        if isinstance(value, MethodType):
            yield from _held_by(value.__self__)
        elif isinstance(value, FunctionType) and value not in seen and value.__module__ == fn.__module__:
            yield from _enclosed(value, seen)
    for i, value in enumerate(fn.__defaults__ or ()):
        yield from _leaves(f"default{i}", value)


def _outside(fn: FunctionType) -> dict[str, Any]:
    try:
        scope = inspect.getclosurevars(fn)
    except ValueError:  # a cell that is still empty
        return {}
    return {**scope.nonlocals, **scope.globals}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield name, value
        return
    if isinstance(value, (list, tuple, dict)):
        for i, leaf in enumerate(tree_leaves(value)):
            yield f"{name}{i}", leaf
    elif not isinstance(value, type):
        yield name, value
