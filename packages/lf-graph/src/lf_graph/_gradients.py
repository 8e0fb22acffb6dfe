"""Where a captured backward leaves the gradients of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lf_graph._errors import AddressError, SignatureError


class GradientSink(Protocol):
    """Receives parameter gradients inside a captured backward; must only queue device operations."""

    def take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Called once per piece; both sequences have the same length."""
        ...


class Collect:
    """Notes which parameters get a gradient and drops it: for warm-up runs."""

    def __init__(self) -> None:
        self._found: dict[int, Tensor] = {}

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters seen, each once."""
        return list(self._found.values())

    def take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Note the parameters."""
        self._found |= {id(p): p for p in parameters}


# one buffer per parameter for the whole process, so that tied weights of several graphs add into one place
_BUFFERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _kind(parameter: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return parameter.shape, parameter.dtype, parameter.device


def _buffer_of(parameter: Tensor) -> Tensor:
    known = _BUFFERS.get(parameter)
    if known is None or (known.shape, known.dtype, known.device) != _kind(
        parameter
    ):  # model.to() keeps the object
        _BUFFERS[parameter] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    found: Tensor = _BUFFERS[parameter]
    return found


class InPlace:
    """Adds gradients into buffers that this package owns, inside the graph, and shows them as ``.grad``.

    A graph that returned its gradients would have them stolen by AccumulateGrad and overwritten by the next replay
    (pytorch#181723). Here ``.grad`` is the buffer; ``zero_grad`` in both forms works: before a replay a missing
    ``.grad`` means zero, and another tensor in its place is copied in.

    Args:
        stand_ins: what the captured forward reads in the place of parameters.
    """

    def __init__(self, stand_ins: dict[Tensor, Tensor] | None = None) -> None:
        self._originals = {id(new): old for old, new in (stand_ins or {}).items()}
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._data: dict[int, int] = {}

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters that receive gradients, in order of first use."""
        return [p for p, _ in self._buffers.values()]

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers behind ``.grad``."""
        return [b for _, b in self._buffers.values()]

    def prepare(self, parameters: Sequence[Tensor]) -> None:
        """Allocate buffers outside the graph's pool; before the capture."""
        for p in (self._original(p) for p in parameters):
            self._buffers[id(p)] = (p, _buffer_of(p))
            self._data[id(p)] = p.data_ptr()

    def take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add, inside the capture."""
        with torch.no_grad():
            buffers = [self._buffers[id(self._original(p))][1] for p in parameters]
            torch._foreach_add_(buffers, list(gradients))

    def _original(self, parameter: Tensor) -> Tensor:
        return self._originals.get(id(parameter), parameter)

    def attach(self) -> None:
        """Make every ``.grad`` the buffer the graph adds into; before each replay of the backward."""
        fresh: list[Tensor] = []
        for parameter, buffer in self._buffers.values():
            grad = parameter.grad
            if grad is buffer:
                continue
            if grad is None:
                fresh.append(buffer)
            else:
                buffer.copy_(grad)
            parameter.grad = buffer
        if fresh:
            torch._foreach_zero_(fresh)

    def verify(self, name: str) -> None:
        """Refuse a replay after a parameter was moved, or frozen: the graph would go on adding to its gradient.

        Raises:
            AddressError: naming the shape of the parameter that was moved.
            SignatureError: naming the shape of the parameter that was frozen.
        """
        for parameter, _ in self._buffers.values():
            if not parameter.requires_grad:
                what = f"requires_grad of a parameter of shape {list(parameter.shape)}: True -> False"
                raise SignatureError(name, [what], "capture again after freezing or unfreezing parameters")
            if parameter.data_ptr() != self._data[id(parameter)]:
                raise AddressError(
                    f"{name}: a parameter of shape {list(parameter.shape)} lies elsewhere than at capture "
                    "(its .data was replaced); copy values in place with copy_(), or capture again"
                )
