"""VariablePool: allocations of any size, in memory that grows to a bound."""

import functools
import threading

import numpy as np
import numpy.typing as npt

from . import _ladder, _trace
from ._attach import layout_name
from ._base import MAX_POOL, Pool
from ._best_fit import Range
from ._errors import PoolError
from ._lease import Lease
from ._pin import Registrar
from ._ranges import RangeTable
from ._region import PAGE, round_up
from ._stats import VariableStats

GROW_BYTES = 64 << 20  # large enough that growing is rare, small enough that the last step wastes little


class VariablePool(Pool):
    """Allocations of exact size, rounded to pages only, in one piece of address space.

    Args:
        max_bytes: bound of the pool.
        hugepages, pin, shared, safety: as for HostPool.
        initial_bytes: bytes allocated here; None for all of them, so that nothing is allocated later.
        grow_bytes: bytes added at least, when nothing fits and the bound allows it.

    Allocations take the tightest hole and neighbours join when they are freed, but not across what was added at
    different times. A lease, its fences and its life are those of HostPool. Raises PoolError if the memory, the
    pages or the page-locking cannot be had.
    """

    _table: RangeTable

    def __init__(
        self, max_bytes: int, hugepages: str = "auto", *, pin: Registrar | None = None, shared: bool = True,
        safety: bool | None = None, initial_bytes: int | None = None, grow_bytes: int = GROW_BYTES,
    ) -> None:  # fmt: skip
        first = max_bytes if initial_bytes is None else initial_bytes
        if max_bytes < 1 or grow_bytes < 1 or not 0 <= first <= max_bytes:
            asked = f"max_bytes={max_bytes}, initial_bytes={initial_bytes}, grow_bytes={grow_bytes}"
            raise PoolError(f"{asked}: sizes are at least 1, and initial_bytes between 0 and max_bytes")
        if max_bytes > MAX_POOL:
            raise PoolError(f"a pool of {max_bytes} bytes is not possible", needed=max_bytes)
        tracer = _trace.Tracer() if _trace.wanted(safety) else None
        size = round_up(max_bytes, PAGE)
        backing = _ladder.build(size, hugepages, first, layout_name(size, size) if shared else None)
        super().__init__(backing, pin, tracer)
        self._size = backing.size
        self._grow_bytes = round_up(grow_bytes, backing.unit)
        self._growing = threading.Lock()
        self._grown = self._trimmed = 0
        self._table = RangeTable(backing.region, tracer)
        first = round_up(first, backing.unit)
        if first:
            self._lock_pages(0, first, first)
            self._table.add_extent(0, first // PAGE)

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The whole memory, uint8[size], for registration; PoolError while some of it is not allocated."""
        if self._committed() < self._size:
            raise PoolError("a pool that may still grow has no whole to register: leave initial_bytes out")
        return super().buffer

    def acquire(self, nbytes: int, timeout: float | None = None) -> Lease:
        """Lease `nbytes` >= 1, waiting up to `timeout` seconds (None: for ever, 0: not at all).

        First come, first served: who waits for a large range is not overtaken by small ones. Raises PoolTimeout
        when no hole was large enough in that time; PoolError at once for more bytes than the pool may have, when
        the kernel has no memory to grow into, and when the pool is closed or was inherited by fork.
        """
        lease = self.try_acquire(nbytes)
        if lease is None:
            take = functools.partial(self._take, nbytes)
            lease = self._wait(take, f"range of {nbytes} bytes", timeout)
        return lease

    def try_acquire(self, nbytes: int) -> Lease | None:
        """Lease `nbytes` that can be had now, or None, also when others wait; PoolError as for `acquire`."""
        self._require_usable()
        if nbytes < 1 or self._table.span(nbytes) * PAGE > self._size:
            message = f"an allocation of {nbytes} bytes: the pool has {self._size}; raise max_bytes"
            raise PoolError(message, needed=nbytes, available=self._size)
        return self._take(nbytes) if self._table.line.first() is None else None

    def trim(self) -> int:
        """Give back the memory of which nothing is leased; returns its bytes. The pool grows again on demand.

        What was allocated in one step goes only as a whole, and arrays of released leases there read zeros.
        """
        self._require_usable()
        with self._growing:
            return self._trim()

    def stats(self) -> VariableStats:
        """A snapshot; see VariableStats for the fields."""
        table, backing = self._table, self._backing
        leased, fenced, _ = table.counts()
        asked, taken, fit = table.usage()
        return VariableStats(
            pages=backing.pages,
            reason=backing.reason,
            pinned=self.pinned,
            max_bytes=self._size,
            bytes=self._committed(),
            extents=len(table.extents),
            grown=self._grown,
            trimmed=self._trimmed,
            live=len(leased),
            fenced=fenced,
            waiting=table.line.waiting(),
            live_bytes=asked,
            waste_bytes=taken - asked,
            free_bytes=fit.free * PAGE,
            largest_free=fit.largest * PAGE,
            holes=len(fit.holes),
            fragmentation=1 - fit.largest / fit.free if fit.free else 0.0,
            peak_bytes=table.peak * PAGE,
            acquires=table.acquires,
            collected=table.collected,
            waits=self._waits,
            timeouts=self._timeouts,
            wait_s=self._wait_s,
            fence_wait_s=self._fence_wait_s,
            populate_s=backing.populate_s,
            lock_s=self._lock_s,
        )

    def _take(self, nbytes: int) -> Lease | None:
        lease = self._table.take_bytes(nbytes)
        while lease is None and self._growable() and self._grow(nbytes):
            lease = self._table.take_bytes(nbytes)
        return lease

    def _growable(self) -> bool:
        """Whether growing, or joining what was allocated in several steps, may ever help."""
        return self._committed() < self._size or len(self._table.extents) > 1

    def _committed(self) -> int:
        return sum(pages for _, pages in self._table.extents) * PAGE

    def _grow(self, nbytes: int) -> bool:
        """Add an extent that holds `nbytes`; False if the bound forbids it."""
        with self._growing:
            if self._table.fits(nbytes):
                return True  # by another thread, meanwhile
            need = round_up(self._table.span(nbytes) * PAGE, self._backing.unit)
            found = self._room(need)
            if found is None and self._room(need, self._table.unused()) is not None:
                self._trim()  # extents that are too small one by one
                found = self._room(need)
            if found is None:
                return False
            self._add(*found)
            self._grown += 1
            return True

    def _room(self, need: int, without: tuple[Range, ...] = ()) -> Range | None:
        """(start, bytes) of a possible extent of at least `need` bytes, or of one if some extents were gone."""
        left = self._size - self._committed() + sum(pages for _, pages in without) * PAGE
        for length in (min(max(need, self._grow_bytes), left), need):
            start = self._table.gap(length // PAGE, without) if need <= length <= left else None
            if start is not None:
                return start * PAGE, length
        return None

    def _add(self, start: int, nbytes: int) -> None:
        self._backing.commit(start, nbytes)
        try:
            self._lock_pages(start, nbytes, nbytes)
            self._table.add_extent(start // PAGE, nbytes // PAGE)
        except BaseException:
            self._give_back(start, nbytes)
            raise

    def _trim(self) -> int:
        freed = 0
        for extent in self._table.unused():
            if self._table.drop(extent):
                start, nbytes = extent[0] * PAGE, extent[1] * PAGE
                self._give_back(start, nbytes)
                freed += nbytes
        self._trimmed += freed
        return freed

    def _give_back(self, start: int, nbytes: int) -> None:
        self._backing.region.unlock(start, nbytes)
        self._backing.region.punch(start, nbytes)
