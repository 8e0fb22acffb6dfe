"""Run a function and leave no trace: modules, tensors and random generators come back bit for bit.

What is read only is not copied. Parameters, gradients and inputs are copied when the first operator is about to
write to them; buffers always are, because batch norm's operators do not declare that they write running statistics.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import _disable_current_modes

from lf_graph._errors import GraphError
from lf_graph._names import Names

_CONTAINERS = (dict, list, set, deque)


def storage_key(t: Tensor) -> int | None:
    """An identity of the memory a tensor lies in; None for tensors without one (sparse, wrapper subclasses)."""
    try:
        return int(t.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


@dataclass(frozen=True)
class ModuleState:
    """Attributes of a module, with a shallow copy of each container among them."""

    module: nn.Module
    attributes: dict[str, Any]
    containers: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """Take the state of a module."""
        attributes = dict(module.__dict__)
        containers = {k: v.copy() for k, v in attributes.items() if isinstance(v, _CONTAINERS)}
        return cls(module, attributes, containers)

    def restore(self) -> None:
        """Put the attributes back, and the contents of the containers, keeping the objects' identity."""
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for key, copy in self.containers.items():
            if not same_items(self.attributes[key], copy):
                _refill(self.attributes[key], copy)


def same_items(a: Any, b: Any) -> bool:
    """Whether two containers of one kind hold the very same objects in the same order."""
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(k == m and v is w for (k, v), (m, w) in zip(a.items(), b.items(), strict=True))
    if isinstance(a, set):
        return bool(a == b)
    return all(v is w for v, w in zip(a, b, strict=True))


def _refill(container: Any, items: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(items)
    else:
        container.extend(items)


def _generators() -> Any:
    """torch.cuda, or the module of another accelerator that this process uses; None without one."""
    # reading the states of a process that has not used CUDA yet would make its contexts
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call, unused-ignore]
        return torch.cuda
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type == "cuda":
        return None
    module: Any = torch.get_device_module(found)
    used = hasattr(module, "get_rng_state_all") and getattr(module, "is_initialized", lambda: True)()
    return module if used else None


def _device_states() -> tuple[Tensor, ...]:
    module = _generators()
    return () if module is None else tuple(module.get_rng_state_all())


@dataclass(frozen=True)
class RandomState:
    """Where every default generator stands: torch's of each device, Python's, NumPy's."""

    cpu: Tensor
    devices: tuple[Tensor, ...]
    python: Any
    numpy: Any

    @classmethod
    def take(cls) -> RandomState:
        """Read all generators."""
        return cls(
            torch.get_rng_state(), _device_states(), random.getstate(), np.random.get_state(legacy=False)
        )

    def restore(self) -> None:
        """Set all generators."""
        self.restore_torch()
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def restore_torch(self) -> None:
        """Set torch's generators only."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            _generators().set_rng_state_all(self.devices)

    def torch_moved(self) -> bool:
        """Whether a generator of torch has been used since."""
        devices = _device_states()
        if len(devices) != len(self.devices) or not torch.equal(self.cpu, torch.get_rng_state()):
            return True
        return not all(torch.equal(a, b) for a, b in zip(devices, self.devices, strict=True))

    def python_moved(self) -> bool:
        """Whether Python's ``random`` has been used since."""
        return bool(random.getstate() != self.python)

    def numpy_moved(self) -> bool:
        """Whether NumPy's global generator has been used since."""
        now, then = np.random.get_state(legacy=False), self.numpy
        same = now["state"]["pos"] == then["state"]["pos"] and now["has_gauss"] == then["has_gauss"]
        return not (same and np.array_equal(now["state"]["key"], then["state"]["key"]))


@dataclass(frozen=True)
class _Slot:
    """A parameter: which memory it uses, which gradient it has."""

    parameter: nn.Parameter
    data: Tensor
    grad: Tensor | None
    requires_grad: bool

    def restore(self) -> None:
        p = self.parameter
        if moved(p, self.data):
            p.data = self.data
        if p.requires_grad != self.requires_grad:
            p.requires_grad_(self.requires_grad)
        if p.grad is not self.grad:
            p.grad = self.grad


@dataclass(frozen=True)
class _OptimizerState:
    """State and options of an optimizer, shallow: its tensors are protected like parameters."""

    optimizer: torch.optim.Optimizer
    state: dict[Tensor, dict[str, Any]]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _OptimizerState:
        state = {p: dict(s) for p, s in optimizer.state.items()}
        return cls(optimizer, state, [dict(g) for g in optimizer.param_groups])

    def tensors(self) -> Iterator[Tensor]:
        values = [v for s in self.state.values() for v in s.values()]
        values += [v for g in self.groups for k, v in g.items() if k != "params"]
        return (v for v in values if isinstance(v, Tensor))

    def restore(self) -> None:
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
        for group, saved in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(saved)


def moved(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors see different memory, or the same in another shape."""
    return (
        a.data_ptr() != b.data_ptr() or a.shape != b.shape or a.stride() != b.stride() or a.dtype != b.dtype
    )


class Preserved:
    """State of modules, tensors and generators at one moment.

    Raises:
        GraphError: a lazy module was never run, so that there is nothing to put back.
    """

    def __init__(self, names: Names, tensors: Iterable[Tensor] = (), objects: Sequence[Any] = ()) -> None:
        _require_initialized(names)
        self.random = RandomState.take()
        self.modules = [ModuleState.of(m) for _, m in names.each_module()]
        self.slots = [
            _Slot(p, p.detach(), p.grad, p.requires_grad)
            for p in dict.fromkeys(p for _, p in names.parameters)
        ]
        self._buffers = [(b, b.detach().clone()) for _, b in names.each_buffer()]
        self._lazy: dict[int, Tensor] = {}
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        self._generators: dict[int, tuple[random.Random, Any]] = {}
        self._schedulers = [(o, dict(vars(o))) for o in objects if isinstance(o, LRScheduler)]
        self._optimizers = [_OptimizerState.of(o) for o in objects if isinstance(o, torch.optim.Optimizer)]
        self._protect(tensors)

    def _protect(self, tensors: Iterable[Tensor]) -> None:
        held = [t for s in self.slots for t in (s.data, s.grad) if t is not None]
        loose = [v for m in self.modules for v in m.attributes.values() if isinstance(v, Tensor)]
        kept = [t for o in self._optimizers for t in o.tensors()]
        for t in (*held, *loose, *kept, *tensors):
            key = storage_key(t)
            if key is not None:
                self._lazy.setdefault(key, t)

    def about_to_write(self, t: Tensor) -> None:
        """Keep a copy of the memory of ``t`` if it is protected and has none yet."""
        key = storage_key(t)
        if key in self._lazy and key is not None:
            owner = self._lazy.pop(key)
            if owner.device.type == "meta":
                return
            with _disable_current_modes(), torch.no_grad():
                memory = _bytes_of(owner)
                self._written[key] = (memory, memory.clone())

    def about_to_draw(self, generator: random.Random) -> None:
        """Keep the state of a Python generator of the user's own."""
        if id(generator) not in self._generators:
            self._generators[id(generator)] = (generator, generator.getstate())

    def restore(self) -> None:
        """Put everything back; only memory that was written is copied."""
        with torch.no_grad():
            for memory, copy in self._written.values():
                memory.copy_(copy)
            for module in self.modules:
                module.restore()
            for slot in self.slots:
                slot.restore()
            for optimizer in self._optimizers:
                optimizer.restore()
            for scheduler, attributes in self._schedulers:
                vars(scheduler).clear()
                vars(scheduler).update(attributes)
            for buffer, copy in self._buffers:
                buffer.data.copy_(copy)
        for generator, state in self._generators.values():
            generator.setstate(state)
        self.random.restore()


def _require_initialized(names: Names) -> None:
    lazy = [name for name, p in names.parameters if is_lazy(p)]
    if lazy:
        raise GraphError(
            f"{lazy[0]} has no memory yet (a lazy module): run the model once, as training would, before this"
        )


def _bytes_of(t: Tensor) -> Tensor:
    """The whole storage of a tensor as uint8 [nbytes], sharing memory."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


@contextmanager
def preserved(
    names: Names, tensors: Iterable[Tensor] = (), objects: Sequence[Any] = ()
) -> Iterator[Preserved]:
    """Run the block, then restore, also after an error.

    Args:
        names: the modules whose attributes, parameters, gradients and buffers come back.
        tensors: further tensors whose values come back.
        objects: the optimizers and learning rate schedulers among them come back.
    """
    state = Preserved(names, tensors, objects)
    try:
        yield state
    finally:
        state.restore()
