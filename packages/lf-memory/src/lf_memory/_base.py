"""What pools of either kind share: one region, its leases, waiting and closing."""

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt

from . import _ladder, _trace
from ._errors import PoolError, PoolTimeout
from ._pin import Registrar
from ._region import Region
from ._slots import Lease, SlotTable, slot_type

# While only fenced memory is left nobody signals us; a device event is polled this often.
_FENCE_POLL_S = 100e-6
_CLOSED_POLL_S = 0.05  # how often a waiting thread looks whether the pool was closed
MAX_POOL = 1 << 46  # bytes; beyond any address space, so a slip in units is caught here


class Pool:
    """A region of one memfd and the process it belongs to; subclasses lease parts of it."""

    _table: SlotTable

    def __init__(self, size: int, hugepages: str, pin: Registrar | None) -> None:
        if size > MAX_POOL:
            raise PoolError(f"a pool of {size} bytes is not possible", needed=size)
        backing = _ladder.build(size, hugepages)
        if pin is not None:
            backing.region.lock(pin)
        self._region: Region | None = backing.region
        self._size = backing.region.size
        self._pages, self._reason = backing.pages, backing.reason
        self._pinned = pin is not None
        self._tracer = _trace.Tracer() if _trace.enabled() else None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._wait_s = self._fence_wait_s = 0.0

    @property
    def pages(self) -> str:
        """ "hugetlb", "thp" or "normal"; `stats().reason` says why."""
        return self._pages

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked for a device, as `pin=` asked."""
        return self._pinned

    @property
    def fd(self) -> int:
        """The memfd, owned by the pool; pass it to another process for `attach`, or dup it to keep it."""
        return self._open_region().fd

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The whole memory, uint8[size], for registration with a device or a ring; it holds the mapping."""
        return _whole(self._open_region())

    def trace(self) -> tuple[_trace.TraceEvent, ...]:
        """Events recorded in debug mode, oldest first; empty unless LOONGFORGE_DEBUG_MEMORY=1."""
        self._table.counts()
        return self._table.tracer.events() if self._table.tracer else ()

    def close(self, force: bool = False) -> None:
        """Wait for fences and give up the memory; PoolError while leases are live, unless `force`.

        Forced or not, memory that an array still shows stays mapped until that array is gone.
        Closing twice is allowed; a forked child's close does nothing, the pool is its parent's.
        """
        if self._region is None or os.getpid() != self._pid:
            return
        leased, _, _ = self._table.counts()
        if leased and not force:
            raise PoolError(f"{self._table.noun}s {leased} are leased: release them or close(force=True)")
        self._table.close()
        self._region = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(force=exc[0] is not None)

    def _wait(self, take: Callable[[], Lease | None], what: str, timeout: float | None) -> Lease:
        start = time.monotonic()
        fenced_s = 0.0
        try:
            while True:
                self._require_usable()
                left = math.inf if timeout is None else timeout - (time.monotonic() - start)
                leased, fenced, _ = self._table.counts()
                if left <= 0:
                    held = f"{len(leased)} leased, {fenced} fenced"
                    raise PoolTimeout(f"no {what} came free in {timeout} s; {held}")
                began = time.monotonic()
                self._table.wait(min(left, _FENCE_POLL_S if fenced else _CLOSED_POLL_S))
                fenced_s += time.monotonic() - began if fenced else 0.0
                lease = take()
                if lease is not None:
                    return lease
        finally:
            self._add_wait(time.monotonic() - start, fenced_s)

    def _add_wait(self, wait: float, fence: float) -> None:
        with self._lock:
            self._wait_s += wait
            self._fence_wait_s += fence

    def _open_region(self) -> Region:
        if self._region is None:
            raise PoolError("the pool is closed")
        return self._region

    def _require_usable(self) -> None:
        self._open_region()
        if os.getpid() != self._pid:
            raise PoolError(
                f"this pool belongs to process {self._pid}: after fork make a new pool, "
                "or read a HostPool's slots with HostPool.attach(pool.fd, pool.slot_bytes)"
            )


def _whole(region: Region) -> npt.NDArray[np.uint8]:
    buffer = slot_type(region.size).from_address(region.address)
    buffer.region = region
    return np.frombuffer(buffer, np.uint8)
