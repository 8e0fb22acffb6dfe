"""What reads each parameter in a forward pass, and whether it is only ever read through one cast.

A float32 parameter whose every reader is a cast to bfloat16 (what autocast does to the weight of a linear layer) can
keep a bfloat16 shadow that the optimizer writes; embeddings and norms, which autocast runs in float32, cannot.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lf_graph._frames import call_users
from lf_graph._launches import triton_launches
from lf_graph._names import Names, names_behind
from lf_graph._preserve import Preserved, preserved, storage_key
from lf_graph._schema import is_view, op_name, writes


@dataclass(frozen=True)
class ParameterUse:
    """How one parameter was read in a forward pass.

    Attributes:
        name: dotted name.
        ops: the operators that read or wrote it, in order, views left out.
        only_cast_to: the dtype, when every one of ``ops`` is a cast (``aten._to_copy``) to this dtype on the same
            device; None otherwise, and for a parameter that nothing reads.
    """

    name: str
    ops: tuple[str, ...]
    only_cast_to: torch.dtype | None


def parameter_uses(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, ParameterUse]:
    """Run ``fn(*args, **kwargs)`` forward once and list what reads each parameter of the modules behind it.

    Views of a parameter (``t``, ``transpose``, ``view``, slices) count as the parameter; overlapping parameters, such
    as views of one flat buffer, are told apart by their addresses; a tied parameter is listed under each name.
    Autocast as the caller or ``fn`` enters it is kept, without its weight cache. Triton kernels launched outside
    the dispatcher count as readers of their arguments. Nothing is changed: buffers, gradients, generators, modes and
    attributes of the modules are put back.

    Args:
        fn: a module, a method, or a function that closes over modules.

    Returns:
        :class:`ParameterUse` by the name ``named_parameters()`` gives.

    Raises:
        Exception: what ``fn`` raises.
    """
    names = names_behind(fn, args, kwargs)
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    with preserved(names, tensors) as state:
        reads = _Reads(names, state)
        with _without_autocast_cache(), triton_launches(reads.launched), reads:
            call_users(fn, *args, **kwargs)
    return {name: _summary(name, reads.of(p)) for name, p in names.parameters}


def _summary(name: str, reads: Sequence[_Read]) -> ParameterUse:
    casts = {r.cast_to for r in reads}
    return ParameterUse(name, tuple(r.op for r in reads), casts.pop() if len(casts) == 1 else None)


@dataclass(frozen=True)
class _Read:
    op: str
    cast_to: torch.dtype | None


@dataclass
class _Memory:
    """Parameters that lie in one storage: sorted, with the end of each in bytes."""

    starts: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # (end, id of the parameter)

    def overlapping(self, start: int, end: int) -> Iterator[int]:
        """Ids of the parameters that share a byte with [start, end)."""
        last = bisect.bisect_left(self.starts, end)
        yield from (key for at, key in self.spans[:last] if at > start)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Notes each operator that takes memory of a parameter and is no view."""

    def __init__(self, names: Names, state: Preserved) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._state = state
        self._reads: dict[int, list[_Read]] = {id(p): [] for _, p in names.parameters}
        self._memory = _layout(list(dict.fromkeys(p for _, p in names.parameters)))

    def of(self, parameter: Tensor) -> list[_Read]:
        """What read a parameter."""
        return self._reads[id(parameter)]

    def launched(self, kernel: str, tensors: Sequence[Tensor]) -> None:
        """Note a kernel that got tensors without the dispatcher; it may write any of them."""
        for t in tensors:
            self._state.about_to_write(t)
        self._note(tensors, _Read(f"triton.{kernel}", None))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for t in writes(func, args, kwargs):
            self._state.about_to_write(t)
        if not is_view(func):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self._note(tensors, _Read(op_name(func), _cast(func, args, kwargs)))
        return func(*args, **kwargs)

    def _note(self, tensors: Sequence[Tensor], read: _Read) -> None:
        for key in dict.fromkeys(key for t in tensors for key in self._parameters_in(t)):
            self._reads[key].append(read)

    def _parameters_in(self, t: Tensor) -> Iterator[int]:
        key = storage_key(t)
        memory = self._memory.get(key) if key is not None else None
        return memory.overlapping(*_extent(t)) if memory and t.numel() else iter(())


def _layout(parameters: Sequence[Tensor]) -> dict[int, _Memory]:
    memory: dict[int, _Memory] = {}
    for p in sorted(parameters, key=lambda p: p.storage_offset() * p.element_size()):
        key = storage_key(p)
        if key is None or not p.numel():
            continue
        start, end = _extent(p)
        here = memory.setdefault(key, _Memory())
        here.starts.append(start)
        here.spans.append((end, id(p)))
    return memory


def _extent(t: Tensor) -> tuple[int, int]:
    """First and one past the last byte of a tensor in its storage."""
    first = int(t.storage_offset()) * t.element_size()
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return first, first + (last + 1) * t.element_size()


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype a cast on the same device gives; None for every other operator."""
    if func is not torch.ops.aten._to_copy.default:
        return None
    source: Tensor = args[0]
    dtype: torch.dtype | None = kwargs.get("dtype")
    device = kwargs.get("device")
    if (
        dtype is None
        or dtype == source.dtype
        or (device is not None and torch.device(device) != source.device)
    ):
        return None
    return dtype


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """A cached cast would hide its parameter; one made in the dry run would outlive it."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(enabled)


class Owned:
    """A function together with the module whose parameters are asked for."""

    def __init__(self, fn: Callable[..., Any], model: nn.Module) -> None:
        self.fn, self.model = fn, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)
