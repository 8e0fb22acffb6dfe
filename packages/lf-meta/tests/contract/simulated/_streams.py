"""Streams and events of the simulated device.

The worst that a real device may do with an asynchronous copy is simulated: one to the host arrives when the host or a
stream waits for it and not before; one from the host reads its source when the next operator of the
stream runs, or at a wait.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from ._log import CallLog, Clock, ContractError

Work = Callable[[], None]
_PRIVATE_USE = 20  # c10::DeviceType::PrivateUse1


class Queue:
    """What a stream still owes."""

    def __init__(self) -> None:
        self.position = itertools.count(1)
        self.last = 0
        self.reads: list[tuple[int, Work]] = []  # of host memory
        self.arrivals: list[tuple[int, Work]] = []  # in host memory


class Streams:
    """All streams of the device, and which is current in which thread."""

    def __init__(self, log: CallLog) -> None:
        self.log = log
        self._lock = threading.RLock()
        self._local = threading.local()
        self._queues: dict[int, Queue] = {0: Queue()}
        self._numbers = itertools.count(1)
        self.of_backward: Any = None  # autograd's own threads take the stream of the caller

    def new(self) -> int:
        """The number of a new stream."""
        with self._lock:
            number = next(self._numbers)
            self._queues[number] = Queue()
            return number

    def current(self) -> int:
        """The number of the calling thread's current stream."""
        found = getattr(self._local, "stream", None)
        if found is None and isinstance(threading.current_thread(), threading._DummyThread):
            found = self.of_backward
        return 0 if found is None else int(found)

    def set_current(self, number: int) -> None:
        """For the calling thread."""
        self._local.stream = number

    def later(self, stream: int, work: Work, *, arrives: bool) -> None:
        """Owe a copy: into host memory (`arrives`) or from it."""
        with self._lock:
            queue = self._queues[stream]
            queue.last = next(queue.position)
            (queue.arrivals if arrives else queue.reads).append((queue.last, work))

    def position(self, stream: int) -> int:
        """How much has been queued on a stream."""
        with self._lock:
            return self._queues[stream].last

    def read_host(self, stream: int) -> None:
        """Let the copies from the host read their source, behind the earlier copies to it."""
        with self._lock:
            reads = self._queues[stream].reads
            if reads:
                self.catch_up(stream, reads[-1][0])

    def catch_up(self, stream: int, position: int | None = None) -> None:
        """Somebody waits: let everything up to a position be done, in order."""
        with self._lock:
            queue = self._queues[stream]
            last = queue.last if position is None else position
            due = [item for item in [*queue.reads, *queue.arrivals] if item[0] <= last]
            queue.reads = [item for item in queue.reads if item[0] > last]
            queue.arrivals = [item for item in queue.arrivals if item[0] > last]
            for _, work in sorted(due, key=lambda item: item[0]):
                work()

    def owes(self, stream: int, position: int) -> bool:
        """Whether something up to a position is not done."""
        with self._lock:
            queue = self._queues[stream]
            return any(at <= position for at, _ in [*queue.reads, *queue.arrivals])

    def wait_for_all(self) -> None:
        """The host waits for the whole device."""
        self.log.add("host_wait", "device")
        for number in list(self._queues):
            self.catch_up(number)
            self.log.host_learns(self.log.snapshot(number))


def stream_types(streams: Streams) -> tuple[type, type, type]:
    """(Stream, Event, StreamContext) for a device module."""

    class Stream(torch.Stream):
        """As torch.cuda.Stream; number 0 is the default one."""

        def __new__(cls, device: object = None, priority: int = 0, number: int | None = None) -> Stream:
            at = streams.new() if number is None else number
            made: Stream = super().__new__(cls, stream_id=at, device_index=0, device_type=_PRIVATE_USE)
            return made

        def wait_event(self, event: Event) -> None:
            """Later work of this stream comes behind the event."""
            event.wait(self)

        def wait_stream(self, other: Stream) -> None:
            """Later work of this stream comes behind everything queued on another."""
            streams.log.add("wait", f"stream {other.stream_id}", self.stream_id)
            streams.catch_up(other.stream_id)
            streams.log.stream_learns(self.stream_id, streams.log.snapshot(other.stream_id))

        def record_event(self, event: Event | None = None) -> Event:
            """Record an event, a new one by default."""
            event = Event() if event is None else event
            event.record(self)
            return event

        def synchronize(self) -> None:
            """The host waits for everything queued."""
            streams.log.add("host_wait", f"stream {self.stream_id}")
            streams.catch_up(self.stream_id)
            streams.log.host_learns(streams.log.snapshot(self.stream_id))

        def query(self) -> bool:
            """Whether nothing is owed; what is, gets done behind this call."""
            owed = streams.owes(self.stream_id, streams.position(self.stream_id))
            streams.catch_up(self.stream_id)
            return not owed

    class Event:
        """As torch.cuda.Event, but waiting for one that was never recorded is an error instead of no wait at all."""

        _numbers = itertools.count()

        def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: object) -> None:
            self.number = next(Event._numbers)
            self._recorded: tuple[int, int, Clock] | None = None

        def record(self, stream: Stream | None = None) -> None:
            """Behind what is queued on a stream, the current one by default."""
            at = streams.current() if stream is None else stream.stream_id
            streams.log.add("record", f"event {self.number}", at)
            self._recorded = at, streams.position(at), streams.log.snapshot(at)

        def wait(self, stream: Stream | None = None) -> None:
            """Let a stream wait."""
            at = streams.current() if stream is None else stream.stream_id
            source, position, clock = self._known("waited for")
            streams.log.add("wait", f"event {self.number}", at)
            streams.catch_up(source, position)
            streams.log.stream_learns(at, clock)

        def synchronize(self) -> None:
            """The host waits."""
            source, position, clock = self._known("synchronized")
            streams.log.add("host_wait", f"event {self.number}")
            streams.catch_up(source, position)
            streams.log.host_learns(clock)

        def query(self) -> bool:
            """Whether it has fired: not at the first look while a copy is owed, at the next one."""
            source, position, clock = self._known("queried")
            owed = streams.owes(source, position)
            streams.catch_up(source, position)
            if not owed:
                streams.log.host_learns(clock)
            return not owed

        def elapsed_time(self, other: Event) -> float:
            """Milliseconds; the simulation has no time."""
            self._known("timed")
            other._known("timed")
            return 0.0

        def _known(self, how: str) -> tuple[int, int, Clock]:
            if self._recorded is None:
                what = f"event {self.number} is {how} before it is recorded"
                streams.log.add("violation", what)
                raise ContractError(what)
            return self._recorded

    class StreamContext:
        """Makes a stream current in the calling thread; None changes nothing."""

        def __init__(self, stream: Stream | None) -> None:
            self._stream, self._before = stream, 0

        def __enter__(self) -> None:
            self._before = streams.current()
            if self._stream is not None:
                streams.set_current(self._stream.stream_id)

        def __exit__(
            self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
        ) -> None:
            streams.set_current(self._before)

    return Stream, Event, StreamContext
