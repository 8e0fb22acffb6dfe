"""Records every storage that operators allocate, and when each is gone."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ._plan import Kind, Lifetime
from ._sums import adds_in_place, holders_of_unshared

FOREVER = -1


@dataclass(eq=False)
class _Buffer:
    name: str
    nbytes: int  # 0 for memory that was there before
    born: int
    start: int
    saved: bool
    parameter: bool = False
    died: int = FOREVER
    end: int = FOREVER


class Recorder(TorchDispatchMode):
    """While active, notes the storages of what operators return; freed storages are noticed by weak references.

    Memory that was there before, seen as an operator's input first, is not counted. A storage is one buffer,
    whichever tensors view it, and whoever adds to it.

    Args:
        fake: tensors are fake, and sums of gradients need no value.
        device: memory of others is not counted.
    """

    def __init__(self, fake: bool, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps = 0
        self.forward_peak = 0
        self._level = 0
        self._moment = 0
        self._fake, self._device = fake, device
        self._unshared = holders_of_unshared(fake)
        self._between = False  # the engine is adding up what a node has sent
        self._where: str | None = None  # the node that is executed; None in the forward pass
        self._live: dict[int, tuple[_Buffer, weakref.ref[torch.UntypedStorage]]] = {}
        self._finished: list[_Buffer] = []

    @property
    def step(self) -> int:
        """Number of the step that is executed, from 0."""
        return max(0, self.steps - 1)

    def saved_sizes(self) -> list[int]:
        """Bytes of each buffer that lives, smallest first: what a graph does not show, such as checkpoints."""
        return sorted(buffer.nbytes for buffer, _ in self._live.values() if buffer.nbytes)

    def begin_backward(self) -> None:
        """What the forward pass left behind is saved from here on."""
        self._where, self._moment, self._finished = "backward", 0, []
        for buffer, _ in self._live.values():
            buffer.saved = buffer.nbytes > 0
            buffer.born = 0

    def enter(self, name: str) -> None:
        """The engine is about to execute this node."""
        self._where, self._between = name, False
        self.steps += 1

    def leave(self) -> None:
        """The node has been executed; what it sends is about to be added to what its consumers have."""
        self._between = True

    def name_gradient(self, gradient: torch.Tensor, name: str) -> None:
        """This tensor is the gradient of a parameter."""
        for storage in _storages(gradient):
            if storage._cdata in self._live:
                buffer = self._live[storage._cdata][0]
                buffer.parameter, buffer.name = True, name

    def finish(self) -> tuple[Lifetime, ...]:
        """Lifetimes of the backward pass, in order of birth; what still lives ends with the last step."""
        self._moment += 1
        for buffer, _ in self._live.values():
            self._close(buffer)
        self._live.clear()
        counted = [buffer for buffer in self._finished if buffer.nbytes]
        return tuple(map(_lifetime, sorted(counted, key=lambda buffer: (buffer.born, buffer.died))))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # two thirds of all calls with fake tensors
            return func(*args)
        kwargs = kwargs or {}
        self._note(_tensors((args, kwargs)), str(func), new=False)
        if self._between and func is torch.ops.aten.add.Tensor and adds_in_place(args[0], self._unshared):
            return args[0] if self._fake else args[0].add_(args[1])
        found = func(*args, **kwargs)
        self._note(_tensors(found), str(func), new=True)
        return found

    def _note(self, tensors: Iterable[torch.Tensor], operator: str, new: bool) -> None:
        for tensor in tensors:
            for storage in _storages(tensor) if tensor.device == self._device else ():
                if storage._cdata not in self._live:
                    self._born(storage, operator, storage.nbytes() if new else 0)

    def _born(self, storage: torch.UntypedStorage, operator: str, nbytes: int) -> None:
        self._moment += 1
        self._level += nbytes
        if self._where is None:
            self.forward_peak = max(self.forward_peak, self._level)
        buffer = _Buffer(self._where or operator, nbytes, self._moment, self.step, saved=False)
        self._live[storage._cdata] = (buffer, weakref.ref(storage, self._goodbye(storage._cdata)))

    def _goodbye(self, address: int) -> Callable[[object], None]:
        def gone(_: object) -> None:
            if address in self._live:
                self._moment += 1
                buffer, _reference = self._live.pop(address)
                self._level -= buffer.nbytes
                self._close(buffer)

        return gone

    def _close(self, buffer: _Buffer) -> None:
        buffer.died, buffer.end = max(self._moment, buffer.born + 1), self.step
        self._finished.append(buffer)


def _lifetime(buffer: _Buffer) -> Lifetime:
    kind: Kind = "activation"
    if buffer.saved:
        kind = "saved"
    elif buffer.parameter:
        kind = "parameter"
    elif buffer.start == buffer.end:
        kind = "temporary"
    return Lifetime(buffer.name, kind, buffer.nbytes, buffer.start, buffer.end, buffer.born, buffer.died)


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The memory behind a tensor; of a sparse one, that of its indices and values."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return [tensor.untyped_storage()]
