"""Gradients that the optimizer takes within the backward, each as soon as it is complete, and that are then free.

lf_memory.gradients calls this mode "fused". The update of a parameter is one of the operations of the captured
backward. The parameter's old value is not read any more by then: its gradient is complete when every node that uses it
has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lf_graph._adamw import FusedAdamW

# Bytes of gradients that wait for each other: neighbours share a launch, and a launch of so many fills any card.
TOGETHER = 32 << 20


@runtime_checkable
class EarlySink(Protocol):
    """Receives each gradient while the backward goes on."""

    def take_one(self, parameter: Tensor, gradient: Tensor) -> None:
        """The gradient is contiguous and nobody else's; it is freed when the sink lets go of it."""
        ...

    def flush(self) -> None:
        """The backward is over."""
        ...


class Applied:
    """Steps an AdamW from gradients as they come; see :class:`EarlySink`.

    Used in this order: :meth:`begin` under capture, the backward under capture, :meth:`settle`.

    Args:
        fused: whose ``gate`` and ``clip`` are off; it was told the gradients' dtypes.
        index: place in flat order by id of what the forward reads.
        together: bytes of gradients that wait for each other.
    """

    adds = False

    def __init__(self, fused: FusedAdamW, index: dict[int, int], together: int = TOGETHER) -> None:
        self._fused, self._index, self._together = fused, index, together
        device = fused.flat.master.device
        self._addresses = torch.zeros(len(fused.flat.parameters), dtype=torch.int64, device=device)
        # what runs at once reads the table at once; a capture runs later, and may not copy from the host
        self._host = (
            self._addresses if device.type == "cpu" else torch.zeros_like(self._addresses, device="cpu")
        )
        self._numbers = self._host.numpy()
        self._waiting: dict[int, Tensor] = {}
        self.taken = 0

    def begin(self, scale: Tensor) -> None:
        """What an update needs besides gradients; ``scale`` [] multiplies them."""
        self._fused.begin(scale)

    def take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """As :class:`~lf_graph._gradients.GradientSink`: all of them at once."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self.take_one(parameter, gradient)

    def take_one(self, parameter: Tensor, gradient: Tensor) -> None:
        """Update this parameter, with others as soon as they are worth a launch."""
        self._waiting[self._index[id(parameter)]] = gradient
        if sum(g.nbytes for g in self._waiting.values()) >= self._together:
            self.flush()

    def flush(self) -> None:
        """Update what waits."""
        if not self._waiting:
            return
        for i, gradient in self._waiting.items():
            self._numbers[i] = gradient.data_ptr()
        self._fused.step_some(self._waiting, self._addresses)
        self.taken += len(self._waiting)
        self._waiting = {}

    def settle(self) -> None:
        """After the capture: tell the device where gradients lie."""
        if self._host is not self._addresses:
            self._addresses.copy_(self._host)


@contextmanager
def handing_over(
    parameters: Sequence[Tensor], sink: Any, own: Callable[[Tensor], Tensor]
) -> Iterator[set[int]]:
    """Give ``sink`` each gradient of a backward inside while it goes on, where it is an :class:`EarlySink`.

    Hooks of the leaves take the gradients; ``torch.autograd.grad`` inside returns one element, expanded, in the
    place of each. Yields the ids of the parameters whose gradients were taken.

    Args:
        own: makes a gradient contiguous, if it is not.
    """
    taken: set[int] = set()
    if not isinstance(sink, EarlySink):
        yield taken
        return

    def take(parameter: Tensor, gradient: Tensor) -> Tensor:
        taken.add(id(parameter))
        sink.take_one(parameter, own(gradient))
        return gradient.new_empty(()).expand(gradient.shape)  # never read

    with ExitStack() as stack:
        for parameter in parameters:
            hook = parameter.register_hook(lambda g, p=parameter: take(p, g))
            stack.callback(hook.remove)
        yield taken
    sink.flush()
