"""HostPool: fixed slots in one memfd."""

import math
import os
import threading
import time
from typing import Self

import numpy as np
import numpy.typing as npt

from . import _ladder, _trace
from ._errors import PoolError, PoolTimeout
from ._region import PAGE, Region, round_up
from ._slots import Lease, SlotTable, slot_type
from ._stats import PoolStats

# While only fenced slots are left nobody signals us; a device event is polled this often.
_FENCE_POLL_S = 100e-6
_CLOSED_POLL_S = 0.05  # how often a waiting thread looks whether the pool was closed
_MAX_POOL = 1 << 46  # bytes; beyond any address space, so a slip in units is caught here


class HostPool:
    """Fixed-size slots in one preallocated memfd, leased in O(1), last freed first.

    Args:
        slot_bytes: usable bytes of a slot; slots start at multiples of the page size.
        slots: how many.
        hugepages: "auto" takes reserved 2 MiB pages if enough are free, else transparent huge pages, else
            normal pages; "hugetlb", "thp" and "off" ask for one of these and nothing else.

    Raises PoolError if the memory or the asked-for pages cannot be had. Every page is allocated here, so
    nothing is killed by SIGBUS later. Threads may share a pool. After fork the pool belongs to the parent:
    `acquire` in the child raises; use `attach(fd, ...)` to read there.
    """

    def __init__(self, slot_bytes: int, slots: int, hugepages: str = "auto") -> None:
        if slot_bytes < 1 or slots < 1:
            raise PoolError(f"slot_bytes={slot_bytes}, slots={slots}: both must be at least 1")
        stride = round_up(slot_bytes, PAGE)
        if stride * slots > _MAX_POOL:
            raise PoolError(f"a pool of {stride * slots} bytes is not possible", needed=stride * slots)
        backing = _ladder.build(stride * slots, hugepages)
        tracer = _trace.Tracer() if _trace.enabled() else None
        self._region: Region | None = backing.region
        self._size = backing.region.size
        self._pages, self._reason = backing.pages, backing.reason
        self._table = SlotTable(backing.region, slots, slot_bytes, stride, tracer)
        self._slot_bytes = slot_bytes
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._wait_s = self._fence_wait_s = 0.0

    @property
    def pages(self) -> str:
        """ "hugetlb", "thp" or "normal"; `stats().reason` says why."""
        return self._pages

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self._table.slots

    @property
    def slot_bytes(self) -> int:
        """Usable bytes of one slot."""
        return self._slot_bytes

    @property
    def fd(self) -> int:
        """The memfd, owned by the pool; pass it to another process for `attach`, or dup it to keep it."""
        return self._open_region().fd

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The whole memory, uint8[size], for registration with a device or a ring; it holds the mapping."""
        return _whole(self._open_region())

    def acquire(self, timeout: float | None = None) -> Lease:
        """Lease a slot, waiting up to `timeout` seconds (None: for ever, 0: not at all).

        Raises PoolTimeout when none came free, PoolError when the pool is closed or was inherited by fork.
        """
        self._require_usable()
        return self._table.try_take() or self._wait(timeout)

    def try_acquire(self) -> Lease | None:
        """Lease a slot that is free now, or None; PoolError as for `acquire`."""
        if self._region is None or os.getpid() != self._pid:
            self._require_usable()
        return self._table.try_take()

    def stats(self) -> PoolStats:
        """A snapshot; see PoolStats for the fields."""
        table = self._table
        leased, fenced, free = table.counts()
        return PoolStats(
            pages=self.pages,
            reason=self._reason,
            slots=self.slots,
            slot_bytes=self._slot_bytes,
            live=len(leased),
            fenced=fenced,
            free=free,
            peak=table.peak,
            acquires=table.acquires,
            collected=table.collected,
            wait_s=self._wait_s,
            fence_wait_s=self._fence_wait_s,
            bytes=self._size,
            waste_bytes=self._size - self.slots * self._slot_bytes,
        )

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
            raise PoolError(f"slots {leased} are leased: release them or close(force=True)")
        self._table.close()
        self._region = None

    @staticmethod
    def attach(fd: int, slot_bytes: int) -> "AttachedPool":
        """Map another process's pool read-only; `fd` is duplicated. PoolError if it is no such memory."""
        return AttachedPool(fd, slot_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(force=exc[0] is not None)

    def _wait(self, timeout: float | None) -> Lease:
        start = time.monotonic()
        fenced_s = 0.0
        try:
            while True:
                self._require_usable()
                left = math.inf if timeout is None else timeout - (time.monotonic() - start)
                leased, fenced, _ = self._table.counts()
                if left <= 0:
                    held = f"{len(leased)} leased, {fenced} fenced"
                    raise PoolTimeout(f"no slot of {self.slots} came free in {timeout} s; {held}")
                began = time.monotonic()
                self._table.wait(min(left, _FENCE_POLL_S if fenced else _CLOSED_POLL_S))
                fenced_s += time.monotonic() - began if fenced else 0.0
                lease = self._table.try_take()
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
                f"this pool belongs to process {self._pid}: after fork make a new HostPool, "
                "or read its slots with HostPool.attach(pool.fd, pool.slot_bytes)"
            )


class AttachedPool:
    """Another pool's memory, read-only. Which slots hold what is for the two processes to agree on."""

    def __init__(self, fd: int, slot_bytes: int) -> None:
        size = os.fstat(fd).st_size
        stride = round_up(slot_bytes, PAGE)
        if slot_bytes < 1 or size < stride:
            raise PoolError(f"descriptor {fd} holds {size} bytes, not even one slot of {slot_bytes}")
        try:
            self._region = Region(os.dup(fd), size, writable=False)
        except OSError as error:
            raise PoolError(f"descriptor {fd} cannot be mapped: {error.strerror}") from error
        self._type = slot_type(slot_bytes)
        self._stride = stride
        self.slots = size // stride

    def slot(self, index: int) -> npt.NDArray[np.uint8]:
        """Slot `index` as read-only uint8[slot_bytes]; PoolError if there is no such slot."""
        if not 0 <= index < self.slots:
            raise PoolError(f"slot {index} of {self.slots}")
        buffer = self._type.from_address(self._region.address + index * self._stride)
        buffer.region = self._region
        view = np.frombuffer(buffer, np.uint8)
        view.flags.writeable = False
        return view


def _whole(region: Region) -> npt.NDArray[np.uint8]:
    buffer = slot_type(region.size).from_address(region.address)
    buffer.region = region
    return np.frombuffer(buffer, np.uint8)
