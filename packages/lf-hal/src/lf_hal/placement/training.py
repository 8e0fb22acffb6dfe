"""Training over mixed torch devices: modules and functions marked ``@hardware`` run where their marks say.

Parameters lie on the device of their module. Values go over edges by an autograd function, so gradients come back the
same way; losses and optimizers see nothing of it. A module's results go to the device of the module around it, but for
modules in the middle of an ``nn.Sequential``, whose results go straight to the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import Token
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lf_hal.hardware import PLACED, hardware_of
from lf_hal.placement._move import move
from lf_hal.placement.errors import AffinityUnavailableError, PoolError, TrainingPlacementError
from lf_hal.placement.pool import Device, Pool

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["EdgeCopies", "Placed", "TrainingReport", "place"]


@dataclass(frozen=True)
class EdgeCopies:
    """Copies in one direction between two devices: how many, and of how many bytes together."""

    direction: str
    source: str
    target: str
    copies: int
    nbytes: int


@dataclass(frozen=True)
class TrainingReport:
    """What lies where, and what has gone over the edges since the module was placed.

    Attributes:
        modules: (path, device) of every module that has parameters or buffers of its own.
        parameter_bytes: (device, bytes) of parameters and buffers.
        edges: copies by direction ("forward", "backward") and devices.
        replaced: names of parameters that are other objects than before, as torch cannot exchange their memory in
            place. An optimizer that was made before holds the old ones.
    """

    modules: tuple[tuple[str, str], ...]
    parameter_bytes: tuple[tuple[str, int], ...]
    edges: tuple[EdgeCopies, ...]
    replaced: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{path or 'the module itself'}: {device}" for path, device in self.modules]
        lines += [
            f"{device}: {nbytes} bytes of parameters and buffers" for device, nbytes in self.parameter_bytes
        ]
        lines += [
            f"{e.direction} {e.source} -> {e.target}: {e.copies} copies, {e.nbytes} bytes" for e in self.edges
        ]
        return "\n".join(lines)


def place(module: nn.Module, pool: Pool, *, default: str | None = None) -> Placed:
    """Put ``module`` and its parts on their devices until the returned handle is removed.

    A part goes to the device that its ``@hardware`` mark names (see :meth:`~lf_hal.placement.Device.answers_to`), else
    to that of the module around it; the outermost, unmarked, to ``default`` or the pool's first device. Functions that
    are marked run on their device while the module's forward does. Make the optimizer afterwards.

    Raises:
        AffinityUnavailableError: a mark that no device of the pool answers to; nothing is used in its place.
        TrainingPlacementError: a mark for a C target or a simulated device, or parameters that two devices want.
        PoolError: torch cannot use a device, or ``default`` is not in the pool.
    """
    devices = _Devices(pool)
    first = pool.devices[0] if default is None else pool.device(default)
    where: dict[nn.Module, Device] = {}
    for path, part, around in _parts(module):
        mark = hardware_of(part)
        inherited = first if around is None else where[around]
        chosen = inherited if mark is None else devices.meant(path, mark)
        if where.setdefault(part, chosen) != chosen:
            raise TrainingPlacementError(
                path, f"is used twice, on {where[part].name} and {chosen.name}; mark both uses alike"
            )
    devices.check(set(where.values()))
    return Placed(module, where, devices)


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Path, module and the module around it, from outside in; a module that is used twice comes twice."""
    pending: list[tuple[str, nn.Module, nn.Module | None]] = [("", module, None)]
    while pending:
        path, part, around = pending.pop(0)
        yield path, part, around
        pending += [(f"{path}.{n}" if path else n, child, part) for n, child in part.named_children()]


class _Devices:
    """The torch devices of a pool, by mark."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._usable: set[Device] = set()

    def meant(self, what: str, mark: str) -> Device:
        found = [d for d in self.pool.devices if d.answers_to(mark)]
        if not found:
            raise AffinityUnavailableError(what, mark, self.pool.names)
        return next((d for d in found if d.runs == "torch"), found[0])

    def check(self, used: set[Device]) -> None:
        import torch

        for device in sorted(used - self._usable, key=lambda d: d.name):
            if device.runs == "c":
                raise TrainingPlacementError(
                    device.name, "a C target has no backward pass; use a torch device"
                )
            if device.where != device.name:
                raise TrainingPlacementError(
                    device.name, f"it is simulated on {device.where}; training needs a device that torch has"
                )
            try:
                torch.empty(1, device=device.where)
            except Exception as error:
                raise PoolError(device.name, f"torch cannot use {device.where}: {error}") from error
            self._usable.add(device)


def _same(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index or 0) == (b.index or 0)


class Placed:
    """A module on its devices; a context manager. :meth:`remove` takes the hooks out and brings parameters back."""

    def __init__(self, module: nn.Module, where: Mapping[nn.Module, Device], devices: _Devices) -> None:
        self._module, self._where, self._devices = module, dict(where), devices
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._bytes: Counter[tuple[str, str, str]] = Counter()
        self._hooks: list[Any] = []
        self._tokens: list[Token[Any]] = []
        self._originals: list[tuple[nn.Module, str, torch.Tensor, torch.device]] = []
        self._replaced: list[str] = []
        self._check_tied()
        self._move_tensors()
        self._add_hooks()

    def report(self) -> TrainingReport:
        """What lies where, and the copies so far."""
        sizes: Counter[str] = Counter()
        modules, seen = [], set()
        for path, part in self._module.named_modules():
            own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            if own:
                modules.append((path, self._where[part].name))
            for tensor in own:
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    sizes[self._where[part].name] += tensor.nbytes
        edges = (EdgeCopies(*key, n, self._bytes[key]) for key, n in sorted(self._counts.items()))
        return TrainingReport(
            tuple(modules), tuple(sorted(sizes.items())), tuple(edges), tuple(sorted(self._replaced))
        )

    def remove(self) -> None:
        """Take the placement back: hooks out, parameters and buffers to where they were. Twice is once."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for part, name, original, device in self._originals:
            now = getattr(part, name)
            grad = None if now.grad is None else now.grad.to(device)
            data = now.detach().to(device)
            original.grad = None
            original.data = data
            original.grad = grad
            setattr(part, name, original)
        self._originals.clear()

    def __enter__(self) -> Placed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _own(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        """Path, module, name and tensor of every parameter and buffer, tied ones each time."""
        for path, part in self._module.named_modules():
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None:
                    yield f"{path}.{name}" if path else name, part, name, tensor

    def _check_tied(self) -> None:
        wanted: dict[int, tuple[str, Device]] = {}
        for path, part, _, tensor in self._own():
            first, device = wanted.setdefault(id(tensor), (path, self._where[part]))
            if device != self._where[part]:
                reason = f"is the same tensor as {first!r} on {device.name}, but belongs to {self._where[part].name}"
                raise TrainingPlacementError(path, f"{reason}; mark their modules alike, or untie them")

    def _move_tensors(self) -> None:
        import torch

        moved: dict[int, torch.Tensor] = {}
        for path, part, name, tensor in list(self._own()):
            device = torch.device(self._where[part].where)
            if _same(tensor.device, device):
                continue
            self._originals.append((part, name, tensor, tensor.device))
            if id(tensor) not in moved:
                moved[id(tensor)] = self._on(tensor, device)
            if moved[id(tensor)] is not tensor:
                self._replaced.append(path)
            setattr(part, name, moved[id(tensor)])

    def _on(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor itself with its memory on ``device``, or another one where torch cannot exchange it."""
        import torch

        data = tensor.detach().to(device)
        grad = None if tensor.grad is None else tensor.grad.to(device)
        if torch._has_compatible_shallow_copy_type(tensor.data, data):
            tensor.grad = None
            tensor.data = data
            made = tensor
        elif isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(data, tensor.requires_grad)
        else:
            made = data
        if grad is not None:
            made.grad = grad
        return made

    def _add_hooks(self) -> None:
        from torch import nn

        seen: set[nn.Module] = set()
        for _, part, around in _parts(self._module):
            if part in seen:
                continue
            seen.add(part)
            device = self._where[part]
            if around is None:
                self._hooks.append(part.register_forward_pre_hook(self._enter))
                self._hooks.append(part.register_forward_hook(self._leave, always_call=True))
                self._hooks.append(part.register_forward_pre_hook(self._mover(device), with_kwargs=True))
                continue
            children = list(around.children())
            in_row = isinstance(around, nn.Sequential)
            spread = in_row and len({self._where[c].name for c in children} | {self._where[around].name}) > 1
            if device != self._where[around] or spread:
                self._hooks.append(part.register_forward_pre_hook(self._mover(device), with_kwargs=True))
                if not in_row or part is children[-1]:
                    self._hooks.append(part.register_forward_hook(self._returner(self._where[around])))

    def _mover(self, device: Device) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self.to(args, device), self.to(kwargs, device)

        return hook

    def _returner(self, device: Device) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return self.to(output, device)

        return hook

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._tokens.append(PLACED.set(self._call))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        PLACED.reset(self._tokens.pop())

    def _call(
        self, function: Callable[..., Any], mark: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A marked function, on its device; its results go to where its first tensor came from."""
        import torch
        from torch.utils._pytree import tree_leaves

        device = self._devices.meant(getattr(function, "__qualname__", repr(function)), mark)
        self._devices.check({device})
        came = [t.device for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        out = function(*self.to(args, device), **self.to(kwargs, device))
        return self._to(out, came[0]) if came else out

    def to(self, values: Any, device: Device) -> Any:
        """``values`` with every tensor in them on ``device``, by a counted copy if it is not there already."""
        import torch

        return self._to(values, torch.device(device.where))

    def _to(self, values: Any, device: torch.device) -> Any:
        import torch
        from torch.utils._pytree import tree_map

        def one(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or _same(value.device, device):
                return value
            return move(value, device, self._count)

        return tree_map(one, values)

    def _count(self, direction: str, tensor: torch.Tensor, target: torch.device) -> None:
        key = (direction, _name(tensor.device), _name(target))
        self._counts[key] += 1
        self._bytes[key] += tensor.nbytes


def _name(device: torch.device) -> str:
    return f"{device.type}:{device.index or 0}"
