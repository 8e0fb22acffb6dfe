"""Decoded extents on their way to an accelerator: a small ring of page-locked slots, copied on a side stream.

No whole copy of a tensor is ever made on the host, and the threads that read and decode do not wait for copies.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .accelerators import DeviceEvent, queues, streams_of
from .format import EXTENT_BYTES


class Lane(Protocol):
    """How copies to one device are queued."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 host memory that copies may read from."""

    def follow(self) -> None:
        """Order later copies behind what the caller has queued on the device so far."""

    def queue(self, work: Callable[[], None]) -> Any:
        """Queue the copies that `work` makes; returns what `wait` takes."""

    def wait(self, fence: Any) -> None:
        """Return when the copies before `fence` have read their source."""

    def finish(self) -> None:
        """Return when everything queued has arrived."""


class StreamLane:
    """A side stream of a device that has streams."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, streams_of(device.type)
        self._stream = self._module.Stream(device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See Lane; page-locked for CUDA, so that the device reads it by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=_page_locked(self._device))

    def follow(self) -> None:
        """See Lane: memory that is about to be filled may still be in use by kernels of its owner before."""
        self._stream.wait_stream(self._module.current_stream(self._device))

    def queue(self, work: Callable[[], None]) -> DeviceEvent:
        """See Lane."""
        with self._module.stream(self._stream):
            work()
            event = self._module.Event()
            event.record(self._stream)
        queued: DeviceEvent = event
        return queued

    def wait(self, fence: DeviceEvent) -> None:
        """See Lane."""
        fence.synchronize()

    def finish(self) -> None:
        """See Lane."""
        self._stream.synchronize()


class BlockingLane:
    """Copies that have been made when they return: devices without streams."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See Lane."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def follow(self) -> None:
        """Nothing is queued."""

    def queue(self, work: Callable[[], None]) -> None:
        """Do it."""
        work()

    def wait(self, fence: None) -> None:
        """Nothing is queued."""

    def finish(self) -> None:
        """Nothing is queued."""


@dataclass
class _Slot:
    memory: torch.Tensor
    fence: Any = None


class Ring:
    """`slots` pieces of 1 MiB; a slot is handed out again when the device has read it. Thread-safe."""

    def __init__(self, lane: Lane, slots: int) -> None:
        self.slots, self.lane = slots, lane
        memory = lane.allocate(slots * EXTENT_BYTES)
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for number in range(slots):
            self._free.put(_Slot(memory[number * EXTENT_BYTES : (number + 1) * EXTENT_BYTES]))

    @contextmanager
    def slot(self) -> Iterator[_Slot]:
        """A free slot, waited for; give what must leave it to `send` before the block ends."""
        slot = self._free.get()
        try:
            if slot.fence is not None:
                self.lane.wait(slot.fence)
                slot.fence = None
            yield slot
        finally:
            self._free.put(slot)

    def send(self, slot: _Slot, work: Callable[[], None]) -> None:
        """Queue `work`, which copies from the slot to the device."""
        slot.fence = self.lane.queue(work)


def lane_for(device: torch.device) -> Lane:
    """The best way to a device."""
    return StreamLane(device) if queues(device) else BlockingLane()


def describe_ring(device: torch.device, ring: Ring) -> str:
    """For reports."""
    how = "page-locked slots" if _page_locked(device) else "slots"
    how = how if queues(device) else f"{how}, copied one by one"
    return f"{device}: streamed through {ring.slots} {how} of 1 MiB"


def _page_locked(device: torch.device) -> bool:
    """Other devices than CUDA take pageable memory: whether they have any other depends on their torch."""
    return device.type == "cuda"
