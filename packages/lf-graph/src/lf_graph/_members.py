"""What a graph took from modules by identity: submodules, parameters, buffers, and which of them are trained.

A graph goes on reading the memory of its capture. A module that was exchanged, a buffer that was assigned anew or a
frozen weight that was moved would leave it with yesterday's values (on CUDA: with freed memory), so a replay is
refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_not
from typing import Any

from torch import Tensor, nn

from lf_graph._errors import AddressError, GraphCaptureError, SignatureError

_IS_TRAINED = attrgetter("requires_grad")
OUTSIDE = "outside of the model"  # how modules beside the trained one are called


def _modules_of(roots: Iterable[nn.Module], root_name: str = "") -> list[tuple[str, nn.Module]]:
    """Each module once, with its dotted name inside its root; ``{kind}`` in ``root_name`` is the root's class."""
    found: dict[nn.Module, str] = {}
    for root in roots:
        for prefix, module in root.named_modules(prefix=root_name.format(kind=type(root).__name__)):
            found.setdefault(module, prefix)
    return [(prefix, module) for module, prefix in found.items()]


class Members:
    """The members of modules and of everything inside them, at one moment; keeps their memory alive.

    Args:
        roots: modules whose parameters are trained, or frozen.
        outside: modules that are used beside them; whether their parameters want gradients does not matter.
    """

    def __init__(self, roots: Iterable[nn.Module], outside: Iterable[nn.Module] = ()) -> None:
        self._registries: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        tensors: dict[int, tuple[str, Tensor]] = {}
        self._add(_modules_of(roots), tensors)
        own = len(tensors)
        self._add(_modules_of(outside, f"{{kind}} {OUTSIDE}"), tensors)
        self._dicts = [registry for _, registry, _ in self._registries]
        self._lengths = list(map(len, self._dicts))
        self._filled = [registry for registry in self._dicts if registry]  # most are empty
        self._values = list(self._held())
        self._names = [name for name, _ in tensors.values()]
        self._tensors = [t for _, t in tensors.values()]
        # what the graph reads must outlive ``p.data = other``
        self._memory = [t.detach() for t in self._tensors]
        self._addresses = [t.data_ptr() for t in self._tensors]
        self._own = self._tensors[:own]
        self._trained = [t.requires_grad for t in self._own]
        self.trains = any(self._trained)

    def _add(self, modules: Iterable[tuple[str, nn.Module]], tensors: dict[int, tuple[str, Tensor]]) -> None:
        for prefix, module in modules:
            for registry in (module._modules, module._parameters, module._buffers):
                self._registries.append((prefix, registry, dict(registry)))
            for name, t in {**module._parameters, **module._buffers}.items():
                if t is not None:
                    tensors.setdefault(id(t), (_name(prefix, name), t))

    def require(self, name: str, fix: str = "capture again after freezing or unfreezing parameters") -> None:
        """Refuse to replay with other members; host work only.

        Raises:
            AddressError: a module, parameter or buffer was exchanged, added, removed or moved.
            SignatureError: a parameter was frozen or unfrozen.
        """
        if list(map(len, self._dicts)) != self._lengths or any(map(is_not, self._held(), self._values)):
            self._raise_exchanged(name)
        if list(map(Tensor.data_ptr, self._tensors)) != self._addresses:
            self._raise_moved(name)
        if (now := list(map(_IS_TRAINED, self._own))) != self._trained:
            pairs = zip(self._names, self._trained, now, strict=False)  # names of what is outside come last
            raise SignatureError(
                name,
                [f"requires_grad of {n}: {a} -> {b}" for n, a, b in pairs if a != b],
                fix,
            )

    def _held(self) -> Iterator[object]:
        # no Python per member, and no look-up per dict: the device waits for this before every replay
        return chain.from_iterable(map(dict.values, self._filled))

    def _raise_exchanged(self, name: str) -> None:
        for prefix, registry, known in self._registries:
            if changed := _first_change(registry, known):
                raise AddressError(
                    f"{name}: {_name(prefix, changed)} is another one than at capture; change values in place, with "
                    "copy_(), or capture again"
                )

    def _raise_moved(self, name: str) -> None:
        for which, tensor, address in zip(self._names, self._tensors, self._addresses, strict=True):
            if tensor.data_ptr() != address:
                fix = "copy values in place with copy_(), or capture again"
                if OUTSIDE in which:
                    fix += (
                        "; where another TrainStep trains it, capture that one first, or give it fused=False"
                    )
                raise AddressError(
                    f"{name}: {which} lies elsewhere than at capture (its .data was replaced, as .to() and the first "
                    f"batch of another TrainStep do); {fix}"
                )


def _name(prefix: str, member: str) -> str:
    return f"{prefix}.{member}" if prefix else member


def _first_change(now: dict[str, Any], known: dict[str, Any]) -> str:
    """The first member that is not the same object; "" when all are."""
    return next((n for n in {**known, **now} if now.get(n) is not known.get(n)), "")


class AssignedBuffers:
    """Finds buffers that a forward assigns anew (``self.n = self.n + 1``), which a replay would not do.

    What is assigned in the first run only, such as a cache, stays allowed.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._modules = _modules_of(roots)
        self._first = self._now()
        self._settled = self._first

    def _now(self) -> list[dict[str, Tensor | None]]:
        return [dict(m._buffers) for _, m in self._modules]

    def settle(self) -> None:
        """The warm-up is over: from here on nothing may change."""
        self._settled = self._now()

    def require_settled(self) -> None:
        """After the capture.

        Raises:
            GraphCaptureError: naming the buffer; all buffers are the ones of the beginning again.
        """
        for (prefix, module), known in zip(self._modules, self._settled, strict=True):
            if changed := _first_change(module._buffers, known):
                self.put_back()
                raise GraphCaptureError(
                    f"assignment of {_name(prefix, changed)}",
                    "",
                    "the forward makes a new tensor for a buffer, and a replay would start from the old one each time",
                    f"write it in place: self.{changed}.copy_(...)",
                )

    def put_back(self) -> None:
        """Give the modules the buffers of the beginning."""
        for (_, module), first in zip(self._modules, self._first, strict=True):
            module._buffers.clear()
            module._buffers.update(first)


@contextmanager
def buffers_as_they_were(roots: Iterable[nn.Module]) -> Iterator[None]:
    """For a forward that is run for what it shows only: also buffers that it assigned are put back."""
    assigned = AssignedBuffers(roots)
    try:
        yield
    finally:
        assigned.put_back()


class LoadHook:
    """Calls a method after a model loaded weights; copies and pickles of the model come without it."""

    def __init__(self, method: Callable[[], None] | None = None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *_: object) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method()

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadHook, ()


def require_no_gradient_hooks(roots: Iterable[nn.Module]) -> None:
    """Refuse hooks on the gradients of parameters, which are accumulated where no hook sees them.

    Raises:
        GraphCaptureError: naming the parameter.
    """
    for prefix, module in _modules_of(roots):
        for name, p in module._parameters.items():
            if p is not None and (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)):
                raise GraphCaptureError(
                    f"hook of {_name(prefix, name)}",
                    "",
                    "gradients of parameters are accumulated inside the graph, so the hook would never run",
                    "remove it (handle.remove()), and read or change p.grad after the backward",
                )
