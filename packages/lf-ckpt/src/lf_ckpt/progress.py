"""How far the staging of a save is, and how others wait for a part of it."""

from __future__ import annotations

import threading

import torch

from .accelerators import DeviceEvent, streams_of


class Progress:
    """Counts the streams of a plan that have been copied, in order. Thread-safe.

    A copy from a device counts once it is queued: whoever changes the tensor makes its own stream wait for the copy's
    event, and the host goes on.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._streams = 0
        self._over = False
        self._events: list[tuple[int, torch.device, DeviceEvent]] = []

    def advance(self, stream: int, device: torch.device, event: DeviceEvent | None) -> None:
        """Streams up to number `stream` are copied, or queued up to `event`."""
        with self._changed:
            self._streams = stream + 1
            if event is not None:
                self._events.append((stream, device, event))
            self._changed.notify_all()

    def finish(self) -> None:
        """No more copies will be made: all have been, or the save has failed."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def arrived(self) -> bool:
        """Whether nothing is left to wait for: no copy will be queued any more, and those that were have ended."""
        with self._changed:
            return self._over and all(event.query() for _, _, event in self._events)

    def fence(self, streams: int | None = None) -> None:
        """Return when the calling thread may change the first `streams` streams (None: all), or queue such work.

        The host waits until the copies are queued (from host memory: done); the current stream of each device waits for
        the copies themselves.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or (streams is not None and self._streams >= streams))
            last = {
                device: event for number, device, event in self._events if streams is None or number < streams
            }
        for device, event in last.items():
            streams_of(device.type).current_stream(device).wait_event(event)
