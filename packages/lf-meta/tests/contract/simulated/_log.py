"""What the device was asked to do, in order, and whether the order of its streams allowed it.

Each stream has a vector clock. An operator on stream S that reads memory last written on stream T must know of that
write: through an event or a stream that S waited for, or through a host that waited. What does not is a violation, even
though the simulation, which computes at once, gives the right result.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


class ContractError(RuntimeError):
    """The device was used in a way that a real one would answer with wrong results or an error."""


@dataclass(frozen=True)
class Call:
    """One entry.

    Attributes:
        number: place in the log, from 0.
        kind: op, fallback, copy, record, wait, host_wait, allocate, cuda or violation.
        what: operator, direction of the copy, or what was recorded and waited for.
        stream: number of the stream; 0 is the default one, -1 the host.
    """

    number: int
    kind: str
    what: str
    stream: int = -1


Clock = dict[int, int]


def _join(into: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if into.get(stream, 0) < tick:
            into[stream] = tick


@dataclass
class _Cell:
    """Who touched an allocation last."""

    written: tuple[int, int] | None = None
    read: Clock = field(default_factory=dict)


class CallLog:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._calls: list[Call] = []
        self._clocks: dict[int, Clock] = {}
        self._host: Clock = {}  # one for all threads: a hand-over between them is taken to be ordered
        self._cells: dict[int, _Cell] = {}

    @property
    def calls(self) -> tuple[Call, ...]:
        """Everything since the start, in order."""
        with self._lock:
            return tuple(self._calls)

    def since(self, number: int) -> tuple[Call, ...]:
        """Calls from `number` on."""
        return self.calls[number:]

    def mark(self) -> int:
        """The number that the next call will have."""
        with self._lock:
            return len(self._calls)

    def counted(self, kind: str, since: int = 0) -> Counter[str]:
        """How often each `what` of a kind occurs."""
        return Counter(call.what for call in self.since(since) if call.kind == kind)

    def violations(self, since: int = 0) -> list[str]:
        """What a real device might have answered with wrong bytes."""
        return [call.what for call in self.since(since) if call.kind == "violation"]

    def add(self, kind: str, what: str, stream: int = -1) -> None:
        """Append one call."""
        with self._lock:
            self._calls.append(Call(len(self._calls), kind, what, stream))

    def work(self, kind: str, what: str, stream: int, reads: Iterable[int], writes: Iterable[int]) -> None:
        """An operator on a stream; reads and writes are addresses of storages."""
        with self._lock:
            self.add(kind, what, stream)
            clock = self._clocks.setdefault(stream, {})
            _join(clock, self._host)
            clock[stream] = clock.get(stream, 0) + 1
            for address in reads:
                cell = self._cells.setdefault(address, _Cell())
                self._must_know(clock, stream, cell.written, f"{what} reads")
                cell.read[stream] = clock[stream]
            for address in writes:
                cell = self._cells.setdefault(address, _Cell())
                self._must_know(clock, stream, cell.written, f"{what} overwrites")
                for reader in cell.read.items():
                    self._must_know(clock, stream, reader, f"{what} overwrites, under a reader,")
                cell.written, cell.read = (stream, clock[stream]), {}

    def _must_know(self, clock: Clock, stream: int, access: tuple[int, int] | None, what: str) -> None:
        if access is not None and clock.get(access[0], 0) < access[1]:
            self.add("violation", f"{what} on stream {stream} what stream {access[0]} may still use", stream)

    def allocated(self, address: int) -> None:
        """Memory at an address is new."""
        with self._lock:
            self._cells[address] = _Cell()

    def snapshot(self, stream: int) -> Clock:
        """What is known behind all work queued on a stream so far."""
        with self._lock:
            clock = dict(self._clocks.get(stream, {}))
            _join(clock, self._host)
            return clock

    def stream_learns(self, stream: int, clock: Clock) -> None:
        """A stream waits for others."""
        with self._lock:
            _join(self._clocks.setdefault(stream, {}), clock)

    def host_learns(self, clock: Clock) -> None:
        """The host waits."""
        with self._lock:
            _join(self._host, clock)
