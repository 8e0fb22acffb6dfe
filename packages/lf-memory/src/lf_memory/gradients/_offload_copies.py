"""Copies between a device and leased host memory: at once on the host, on a stream of their own elsewhere."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

IN_FLIGHT = (
    4  # copies out that may hold device memory; more would lengthen the peak, fewer would wait for each
)
Copy = Callable[[Tensor, Tensor], None]


class Copies(Protocol):
    """Copies bytes out and back; the caller's work sees them in order.

    Attributes:
        beside: whether copies run beside the caller's work, so that it pays to begin one early.
    """

    beside: bool

    def out(self, source: Tensor, slot: Tensor) -> Any:
        """Copy `source` into host memory; returns an event that passes when that is done, or None if it is."""

    def back(self, slot: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """A new tensor on `device` with the bytes of `slot`, and the event to wait for before using it."""

    def equal(self, source: Tensor, slot: Tensor) -> bool:
        """Whether `slot`, a copy of `source`, still has its bytes; True where only waiting could tell."""

    def wait(self, event: Any) -> None:
        """Order the caller's further work behind an event; None is no event."""

    def abandon(self, target: Tensor) -> None:
        """Memory of a copy back is given up before anyone waited for the copy."""

    def settle(self) -> None:
        """Order the caller's further work behind all copies out."""


class DirectCopies:
    """Copies that are done when the call returns."""

    beside = False

    def out(self, source: Tensor, slot: Tensor) -> Any:
        """See Copies."""
        slot.copy_(source)

    def back(self, slot: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """See Copies."""
        return slot.clone(), None

    def equal(self, source: Tensor, slot: Tensor) -> bool:
        """See Copies."""
        return torch.equal(source, slot)

    def wait(self, event: Any) -> None:
        """See Copies."""

    def abandon(self, target: Tensor) -> None:
        """See Copies."""

    def settle(self) -> None:
        """See Copies."""


class StreamCopies:
    """Copies on one stream beside the caller's, in the order in which they were asked for.

    Device memory that is being copied out is held for IN_FLIGHT copies; then the caller's stream, not the host,
    waits for the oldest, so that the peak does not depend on how far the host is ahead.

    Args:
        device: of the tensors.
        module: torch.cuda or another with Stream, stream and current_stream.
        copy: copies (target, source) on the current stream without waiting.
        hold: keeps the memory of (tensor), once it is freed, until a (stream) has done what it has to do by then.
    """

    beside = True

    def __init__(
        self, device: torch.device, module: Any, copy: Copy, hold: Callable[[Tensor, Any], None]
    ) -> None:
        self._device = device
        self._module = module
        self._copy = copy
        self._hold = hold
        self._side = module.Stream(device)
        self._flying: deque[tuple[Any, Tensor]] = deque()

    def out(self, source: Tensor, slot: Tensor) -> Any:
        """See Copies."""
        event = self._behind_caller(slot, source)
        self._flying.append((event, source))
        while len(self._flying) > IN_FLIGHT:
            self.wait(self._flying.popleft()[0])
        return event

    def back(self, slot: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """See Copies."""
        # Allocated for the caller's stream, whose earlier work may still read the block: the copy comes behind it.
        target = torch.empty(slot.numel(), dtype=torch.uint8, device=device)
        return target, self._behind_caller(target, slot)

    def equal(self, source: Tensor, slot: Tensor) -> bool:
        """See Copies."""
        return True

    def wait(self, event: Any) -> None:
        """See Copies."""
        if event is not None:
            self._caller().wait_event(event)

    def abandon(self, target: Tensor) -> None:
        """See Copies."""
        self._hold(target, self._side)

    def settle(self) -> None:
        """See Copies."""
        while self._flying:
            self.wait(self._flying.popleft()[0])

    def _behind_caller(self, target: Tensor, source: Tensor) -> Any:
        self._side.wait_stream(self._caller())
        with self._module.stream(self._side):
            self._copy(target, source)
            return self._side.record_event()

    def _caller(self) -> Any:
        return self._module.current_stream(self._device)


class EventFence:
    """A device event as a fence of a lease."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def query(self) -> bool:
        """See Fence."""
        return bool(self._event.query())

    def wait(self) -> None:
        """See Fence."""
        self._event.synchronize()


@functools.cache
def copies_for(device: torch.device) -> Copies:
    """The copies of a device: one side stream each, for all of the process."""
    if device.type == "cpu":
        return DirectCopies()
    return StreamCopies(device, torch.get_device_module(device), _copy, Tensor.record_stream)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
