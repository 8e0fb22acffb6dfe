"""HostPool: fixed slots in one piece of memory."""

from . import _ladder, _trace
from ._attach import AttachedPool, layout_name
from ._base import MAX_POOL, Pool
from ._errors import PoolError
from ._lease import Lease
from ._pin import Registrar
from ._region import PAGE, round_up
from ._slots import SlotTable
from ._stats import PoolStats

_RED_ZONE = PAGE  # behind each slot in safety mode: nobody may write there


class HostPool(Pool):
    """Fixed-size slots in one preallocated memory, leased in O(1), last freed first.

    Args:
        slot_bytes: usable bytes of a slot; slots start at multiples of the page size.
        slots: how many.
        hugepages: "auto" takes reserved 2 MiB pages if enough are free, else transparent huge pages, else
            normal pages; "hugetlb", "thp" and "off" ask for one of these and nothing else.
        pin: page-locks the memory until it is unmapped; see Registrar.
        shared: False takes memory of this process alone: no descriptor, a forked child sees a copy, and most
            systems give transparent huge pages to it though they do not to shared memory.
        safety: finds writes past a slot's end and after its release, and records who holds what; None asks
            LOONGFORGE_DEBUG_MEMORY. Costs a fill and a comparison of the slot for each lease.

    Raises PoolError if the memory or the asked-for pages cannot be had. Every page is allocated here, by several
    threads, so nothing is killed by SIGBUS later. Threads may share a pool. After fork the pool belongs to the
    parent: `acquire` in the child raises; use `attach(fd, ...)` to read there.
    """

    def __init__(
        self, slot_bytes: int, slots: int, hugepages: str = "auto", *, pin: Registrar | None = None,
        shared: bool = True, safety: bool | None = None,
    ) -> None:  # fmt: skip
        if slot_bytes < 1 or slots < 1:
            raise PoolError(f"slot_bytes={slot_bytes}, slots={slots}: both must be at least 1")
        tracer = _trace.Tracer() if _trace.wanted(safety) else None
        stride = round_up(slot_bytes, PAGE) + (_RED_ZONE if tracer is not None else 0)
        size = stride * slots
        if size > MAX_POOL:
            raise PoolError(f"a pool of {size} bytes is not possible", needed=size)
        backing = _ladder.build(size, hugepages, size, layout_name(slot_bytes, stride) if shared else None)
        super().__init__(backing, pin, tracer)
        self._lock_pages(0, backing.region.size, stride)
        self._table = SlotTable(backing.region, slots, slot_bytes, stride, tracer)
        self._slot_bytes = slot_bytes

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self._table.slots

    @property
    def slot_bytes(self) -> int:
        """Usable bytes of one slot."""
        return self._slot_bytes

    def acquire(self, timeout: float | None = None) -> Lease:
        """Lease a slot, waiting up to `timeout` seconds (None: for ever, 0: not at all); first come, first served.

        Raises PoolTimeout when none came free, PoolError when the pool is closed or was inherited by fork.
        """
        return self.try_acquire() or self._wait(self._table.take, f"slot of {self.slots}", timeout)

    def try_acquire(self) -> Lease | None:
        """Lease a slot that is free now, or None, also when others wait for one; PoolError as for `acquire`."""
        table = self._table
        if self._usable and not table.line:
            return table.take()
        self._require_usable()
        return table.take() if table.line.first() is None else None

    def stats(self) -> PoolStats:
        """A snapshot; see PoolStats for the fields."""
        table, backing = self._table, self._backing
        leased, fenced, free = table.counts()
        size = backing.size
        return PoolStats(
            pages=backing.pages,
            reason=backing.reason,
            slots=self.slots,
            slot_bytes=self._slot_bytes,
            live=len(leased),
            fenced=fenced,
            free=free,
            waiting=table.line.waiting(),
            peak=table.peak,
            acquires=table.acquires,
            collected=table.collected,
            waits=self._waits,
            timeouts=self._timeouts,
            wait_s=self._wait_s,
            fence_wait_s=self._fence_wait_s,
            populate_s=backing.populate_s,
            lock_s=self._lock_s,
            bytes=size,
            waste_bytes=size - self.slots * self._slot_bytes,
            pinned=self.pinned,
        )

    @staticmethod
    def attach(fd: int, slot_bytes: int | None = None, *, writable: bool = False) -> AttachedPool:
        """Map another process's pool; `fd` is duplicated. See AttachedPool for the errors."""
        return AttachedPool(fd, slot_bytes, writable=writable)
