"""HostPool: fixed slots in one memfd."""

import os

import numpy as np
import numpy.typing as npt

from ._base import Pool
from ._errors import PoolError
from ._pin import Registrar
from ._region import PAGE, Region, round_up
from ._slots import Lease, SlotTable, slot_type
from ._stats import PoolStats


class HostPool(Pool):
    """Fixed-size slots in one preallocated memfd, leased in O(1), last freed first.

    Args:
        slot_bytes: usable bytes of a slot; slots start at multiples of the page size.
        slots: how many.
        hugepages: "auto" takes reserved 2 MiB pages if enough are free, else transparent huge pages, else
            normal pages; "hugetlb", "thp" and "off" ask for one of these and nothing else.
        pin: page-locks the memory until it is unmapped; see Registrar.

    Raises PoolError if the memory or the asked-for pages cannot be had. Every page is allocated here, so
    nothing is killed by SIGBUS later. Threads may share a pool. After fork the pool belongs to the parent:
    `acquire` in the child raises; use `attach(fd, ...)` to read there.
    """

    def __init__(
        self, slot_bytes: int, slots: int, hugepages: str = "auto", *, pin: Registrar | None = None
    ) -> None:
        if slot_bytes < 1 or slots < 1:
            raise PoolError(f"slot_bytes={slot_bytes}, slots={slots}: both must be at least 1")
        stride = round_up(slot_bytes, PAGE)
        super().__init__(stride * slots, hugepages, pin)
        self._table = SlotTable(self._open_region(), slots, slot_bytes, stride, self._tracer)
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
        """Lease a slot, waiting up to `timeout` seconds (None: for ever, 0: not at all).

        Raises PoolTimeout when none came free, PoolError when the pool is closed or was inherited by fork.
        """
        self._require_usable()
        return self._table.try_take() or self._wait(self._table.try_take, f"slot of {self.slots}", timeout)

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
            pinned=self._pinned,
        )

    @staticmethod
    def attach(fd: int, slot_bytes: int) -> "AttachedPool":
        """Map another process's pool read-only; `fd` is duplicated. PoolError if it is no such memory."""
        return AttachedPool(fd, slot_bytes)


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
