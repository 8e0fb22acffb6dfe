"""What pools of either kind share: one region, its leases, waiting and closing."""

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt

from . import _ladder, _trace
from ._errors import Holder, PoolError, PoolTimeout
from ._lease import Lease
from ._line import Waiter
from ._pin import Registrar
from ._region import Region
from ._slots import SlotTable, slot_type

# While only fenced memory is left nobody signals us; a device event is polled this often.
_FENCE_POLL_S = 100e-6
_CLOSED_POLL_S = 0.05  # how often a waiting thread looks whether the pool was closed
_NAMED_HOLDERS = 8  # in a message; PoolTimeout.holders has all
MAX_POOL = 1 << 46  # bytes; beyond any address space, so a slip in units is caught here


class Pool:
    """A region of one memfd and the process it belongs to; subclasses lease parts of it."""

    _table: SlotTable

    def __init__(self, backing: _ladder.Backing, pin: Registrar | None, tracer: _trace.Tracer | None) -> None:
        self._backing = backing
        self._pin = pin
        self._tracer = tracer
        self._pid = os.getpid()
        self._usable = True  # neither closed nor inherited by fork
        self._lock = threading.Lock()
        self._waits = self._timeouts = 0
        self._wait_s = self._fence_wait_s = self._lock_s = 0.0
        _pools.add(self)

    @property
    def pages(self) -> str:
        """ "hugetlb", "thp" or "normal"; `stats().reason` says why."""
        return self._backing.pages

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked for a device, as `pin=` asked."""
        return self._pin is not None

    @property
    def safety(self) -> bool:
        """Whether safety mode is on: poison, red zones and traces."""
        return self._tracer is not None

    @property
    def fd(self) -> int:
        """The memfd, owned by the pool; pass it to another process for `attach`, or dup it to keep it.

        PoolError with `shared=False`.
        """
        fd = self._backing.region.fd
        if fd is None:
            raise PoolError("this pool is not shared and has no descriptor: leave shared=False out")
        return fd

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The whole memory, uint8[size], for registration with a device or a ring; it holds the mapping."""
        return _whole(self._backing.region)

    def trace(self) -> tuple[_trace.TraceEvent, ...]:
        """Events recorded in safety mode, oldest first; empty otherwise."""
        self._table.counts()
        return self._table.tracer.events() if self._table.tracer else ()

    def close(self, force: bool = False) -> None:
        """Wait for fences and give up the memory; PoolError while leases are live, unless `force`.

        Forced or not, memory that an array still shows stays mapped until that array is gone.
        Closing twice is allowed; a forked child's close does nothing, the pool is its parent's.
        """
        if not self._backing.open or os.getpid() != self._pid:
            return
        holders = self._table.holders()
        if holders and not force:
            noun = self._table.noun
            raise PoolError(f"{_named(noun, holders)} are leased: release them or close(force=True)")
        self._usable = False
        self._table.close()
        self._backing.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(force=exc[0] is not None)

    def _lock_pages(self, start: int, nbytes: int, unit: int) -> None:
        if self._pin is None:
            return
        began = time.monotonic()
        self._backing.region.lock(self._pin, start, nbytes, unit)
        self._lock_s += time.monotonic() - began

    def _wait(self, take: Callable[[], Lease | None], what: str, timeout: float | None) -> Lease:
        """What `take` gives once it is this thread's turn and there is something."""
        start, fenced_s, me = time.monotonic(), 0.0, Waiter()
        line = self._table.line
        try:
            line.append(me)
            while True:
                self._require_usable()
                left = math.inf if timeout is None else timeout - (time.monotonic() - start)
                first = line.first() is me
                lease = take() if first else None
                if lease is not None:
                    return lease
                if left <= 0:
                    raise self._timed_out(what, timeout)
                fenced_s += self._sleep(me if not first else None, left)
        finally:
            me.gone = True
            line.first()
            self._add_wait(time.monotonic() - start, fenced_s)

    def _sleep(self, me: Waiter | None, left: float) -> float:
        """Wait behind others, or (None) for memory; returns the seconds during which only a fence was waited for."""
        if me is not None:
            me.sleep(min(left, _CLOSED_POLL_S))
            return 0.0
        fenced = self._table.counts()[1]
        began = time.monotonic()
        self._table.wait(min(left, _FENCE_POLL_S if fenced else _CLOSED_POLL_S))
        return time.monotonic() - began if fenced else 0.0

    def _timed_out(self, what: str, timeout: float | None) -> PoolTimeout:
        holders, (_, fenced, _) = self._table.holders(), self._table.counts()
        with self._lock:
            self._timeouts += 1
        ahead = self._table.line.waiting() - 1
        text = f"no {what} came free in {timeout} s; {len(holders)} leased, {fenced} fenced, {ahead} others waiting"
        return PoolTimeout(f"{text}; held: {_named(self._table.noun, holders)}", holders)

    def _add_wait(self, wait: float, fence: float) -> None:
        with self._lock:
            self._waits += 1
            self._wait_s += wait
            self._fence_wait_s += fence

    def _require_usable(self) -> None:
        if not self._usable:
            if os.getpid() == self._pid:
                raise PoolError("the pool is closed")
            raise PoolError(
                f"this pool belongs to process {self._pid}: after fork make a new pool, "
                "or read a HostPool's slots with HostPool.attach(pool.fd, pool.slot_bytes)"
            )


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _disown_all() -> None:
    for pool in tuple(_pools):
        pool._usable = False
        pool._lock = threading.Lock()
        with contextlib.suppress(AttributeError):  # forked by another thread while the pool was being made
            pool._table.disown()


os.register_at_fork(after_in_child=_disown_all)


def _named(noun: str, holders: tuple[Holder, ...]) -> str:
    """ "slots [0, 3]", or with their sites in safety mode."""
    sites = [f"{h.index} ({h.nbytes} bytes) at {h.site}" if h.site else str(h.index) for h in holders]
    more = f" and {len(sites) - _NAMED_HOLDERS} more" if len(sites) > _NAMED_HOLDERS else ""
    return f"{noun}s [{', '.join(sites[:_NAMED_HOLDERS])}]{more}"


def _whole(region: Region) -> npt.NDArray[np.uint8]:
    buffer = slot_type(region.size).from_address(region.address)
    buffer.region = region
    return np.frombuffer(buffer, np.uint8)
