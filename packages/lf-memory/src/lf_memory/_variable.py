"""VariablePool: allocations of any size in one memfd."""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from ._base import Pool
from ._best_fit import BestFit
from ._errors import PoolError
from ._pin import Registrar
from ._region import PAGE, Region, round_up
from ._slots import Lease, SlotTable, slot_type
from ._stats import VariableStats
from ._trace import Tracer, poison


class _RangeTable(SlotTable):
    """Ranges instead of slots; the index of a range is its first page.

    As there, `_busy` alone says what is out: an interrupted change leaves `_fit` marked stale, and it is made
    again from `_busy` and `_asked`.
    """

    noun = "range"

    def __init__(self, region: Region, tracer: Tracer | None) -> None:
        super().__init__(region, 0, PAGE, PAGE, None)
        self.slots = region.size // PAGE
        self.tracer = tracer
        self._fit = BestFit(self.slots)
        self._stale = False
        self._asked: dict[int, int] = {}  # bytes of the range that starts at a page
        if tracer is not None:
            poison(np.frombuffer(self._part(0, region.size), np.uint8))

    def try_take_bytes(self, nbytes: int) -> Lease | None:
        """The tightest range that holds `nbytes`, or None."""
        with self._lock:
            self._settle()
            if self._fenced:
                self._sweep()
            index = self._find(nbytes)
            if index is None:
                self._recover()
                index = self._find(nbytes)
            if index is None:
                return None  # another waiting thread may fit; it looks by itself every few hundredths of a second
            self._asked[index] = nbytes
            if self.tracer is not None:
                self._check_poison(index, self.tracer)
            self.acquires += 1
            lease = self._lease(index)
            self._stale = False
            self.peak = max(self.peak, self.slots - self._fit.free)
            if self._waiting and self._fit.free:
                self._returned.put(None)
            return lease

    def usage(self) -> tuple[int, int, BestFit]:
        """Bytes asked for by ranges that are out, bytes they take, and the holes."""
        with self._lock:
            self._settle()
            self._sweep()
            asked = [self._asked[index] for index in self._busy]
            return sum(asked), sum(round_up(n, PAGE) for n in asked), self._holes()

    def view(self, index: int) -> npt.NDArray[np.uint8]:
        """See SlotTable."""
        return np.frombuffer(self._part(index, self._asked[index]), np.uint8)

    def _part(self, index: int, nbytes: int) -> Any:
        buffer = slot_type(nbytes).from_address(self.address(index))
        buffer.region = self._region
        return buffer

    def _buffer(self, address: int) -> Any:
        index = (address - self._address) // PAGE
        return self._part(index, self._asked[index])

    def _find(self, nbytes: int) -> int | None:
        fit = self._holes()
        self._stale = True  # until the range is in `_busy`
        index = fit.take(_pages(nbytes))
        self._stale = index is not None
        return index

    def _holes(self) -> BestFit:
        if self._stale:
            live = ((index, _pages(self._asked[index])) for index in self._busy)
            self._fit = BestFit.around(self.slots, live)
            self._stale = False
        return self._fit

    def _put_free(self, index: int) -> None:
        fit, self._stale = self._holes_before(index), True
        fit.give(index, _pages(self._asked[index]))
        self._stale = False

    def _holes_before(self, index: int) -> BestFit:
        """The holes without the range that is being freed, which is no longer in `_busy`."""
        if self._stale:
            live = ((i, _pages(self._asked[i])) for i in [*self._busy, index])
            self._fit = BestFit.around(self.slots, live)
        return self._fit

    def _recover(self) -> None:
        for index, watch in list(self._busy.items()):
            if index not in self._fenced and (watch.released or watch() is None):
                self._take_back(watch)
        self._stale = True  # a range that was freed halfway is found by looking at what is out


class VariablePool(Pool):
    """Allocations of exact size, rounded to pages only, in one preallocated memfd.

    Args:
        max_bytes: bytes of the pool; all of them are allocated here, none later.
        hugepages, pin: as for HostPool.

    Allocations take the tightest hole and neighbours join when they are freed. A lease, its fences and its life
    are those of HostPool. Raises PoolError if the memory, the pages or the page-locking cannot be had.
    """

    _table: _RangeTable

    def __init__(self, max_bytes: int, hugepages: str = "auto", *, pin: Registrar | None = None) -> None:
        if max_bytes < 1:
            raise PoolError(f"max_bytes={max_bytes}: it must be at least 1")
        super().__init__(round_up(max_bytes, PAGE), hugepages, pin)
        self._table = _RangeTable(self._open_region(), self._tracer)

    def acquire(self, nbytes: int, timeout: float | None = None) -> Lease:
        """Lease `nbytes` >= 1, waiting up to `timeout` seconds (None: for ever, 0: not at all).

        Raises PoolTimeout when no hole was large enough in that time; PoolError at once for more bytes than the
        pool has, and when the pool is closed or was inherited by fork.
        """
        self._require_usable()
        if not 1 <= nbytes <= self._size:
            message = f"an allocation of {nbytes} bytes: the pool has {self._size}; raise max_bytes"
            raise PoolError(message, needed=nbytes, available=self._size)
        take = functools.partial(self._table.try_take_bytes, nbytes)
        return take() or self._wait(take, f"range of {nbytes} bytes", timeout)

    def stats(self) -> VariableStats:
        """A snapshot; see VariableStats for the fields."""
        leased, fenced, _ = self._table.counts()
        asked, taken, fit = self._table.usage()
        return VariableStats(
            pages=self.pages,
            reason=self._reason,
            pinned=self._pinned,
            bytes=self._size,
            live=len(leased),
            fenced=fenced,
            live_bytes=asked,
            waste_bytes=taken - asked,
            free_bytes=fit.free * PAGE,
            largest_free=fit.largest * PAGE,
            holes=len(fit.holes),
            peak_bytes=self._table.peak * PAGE,
            acquires=self._table.acquires,
            collected=self._table.collected,
            wait_s=self._wait_s,
            fence_wait_s=self._fence_wait_s,
        )


def _pages(nbytes: int) -> int:
    return round_up(nbytes, PAGE) // PAGE
