"""Slots and leases: the life of one buffer between `acquire` and its return to the free list.

A slot may come back when the garbage collector finds its memory unused, in any thread and in the middle of
anything. No Python code may run there: it could wait for a lock that the same thread holds, and a Ctrl-C in
it would be swallowed. So the callback of the weak reference is `SimpleQueue.put` itself, which is C and
re-entrant; whoever needs a slot next takes the returned ones from that queue.
"""

import ctypes
import functools
import math
import queue
import threading
import weakref
from typing import Any, NoReturn, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from ._errors import PoolError
from ._region import Region
from ._trace import Tracer, call_site, first_write, poison


@runtime_checkable
class Fence(Protocol):
    """Work on a device that still uses a slot; a CUDA event behind two methods is one."""

    def query(self) -> bool:
        """True once the work is done; must not block."""

    def wait(self) -> None:
        """Block the calling thread until the work is done."""


@functools.lru_cache(maxsize=1024)
def slot_type(slot_bytes: int) -> type[Any]:
    """A ctypes array class whose instances keep their region mapped."""
    return type("SlotBuffer", (ctypes.c_uint8 * slot_bytes,), {"__slots__": ("region",)})


class _Watch(weakref.ref[Any]):
    """Stands for one lease; put into the queue of returned slots by `release` or by the garbage collector."""

    __slots__ = ("fences", "index", "released")

    index: int
    released: bool
    fences: list[Fence]


class SlotTable:
    """Free list, leased slots and fenced slots of one region.

    A Ctrl-C can strike between any two lines. So a slot is busy or free by one entry, `_busy[index]`; what an
    interrupted change leaves in neither list is found again by `_recover`.

    Attributes:
        acquires, peak, collected: see PoolStats.
        noun: what a message calls one part of the region.
    """

    noun = "slot"

    def __init__(
        self, region: Region, slots: int, slot_bytes: int, stride: int, tracer: Tracer | None
    ) -> None:
        self._region: Region | None = region
        self._address = region.address
        self._type = slot_type(slot_bytes)
        self._stride = stride
        self._lock = threading.Lock()  # never taken by anything the garbage collector may call
        self._returned: queue.SimpleQueue[_Watch | None] = queue.SimpleQueue()
        self._free = list(range(slots - 1, -1, -1))
        self._busy: dict[int, _Watch] = {}  # leased or fenced
        self._fenced: dict[int, _Watch] = {}  # those of them that came back and wait for a fence
        self._waiting = 0
        self.slots = slots
        self.tracer = tracer
        self.acquires = self.peak = self.collected = 0
        if tracer is not None:
            for index in range(slots):
                poison(self.view(index))

    def try_take(self) -> "Lease | None":
        """The most recently freed slot as a lease, or None if none is free now."""
        with self._lock:
            self._settle()
            if self._fenced:
                self._sweep()
            if not self._free:
                self._recover()
            if not self._free:
                return None
            index = self._free.pop()
            if self.tracer is not None:
                self._check_poison(index, self.tracer)
            self.acquires += 1
            self.peak = max(self.peak, self.slots - len(self._free))
            if self._waiting and self._free:
                self._returned.put(None)  # we may have taken the notice that another thread waits for
            return self._lease(index)

    def wait(self, timeout: float) -> None:
        """Block until a slot may have come back, for `timeout` seconds at most."""
        with self._lock:
            self._waiting += 1
        try:
            returned = self._returned.get(timeout=timeout)
        except queue.Empty:
            return
        finally:
            with self._lock:
                self._waiting -= 1
        self._returned.put(returned)  # what comes back is sorted under the lock only

    def release(self, watch: _Watch) -> bool:
        """End a lease; False if that was done before."""
        if watch.released:
            return False
        watch.released = True
        if self.tracer is not None:
            self.tracer.note("release", watch.index)
            if not watch.fences:
                poison(self.view(watch.index))
        self._returned.put(watch)
        return True

    def counts(self) -> tuple[list[int], int, int]:
        """Indices of leased slots, number of fenced ones, number of free ones."""
        with self._lock:
            self._settle()
            return sorted(set(self._busy) - set(self._fenced)), len(self._fenced), len(self._free)

    def close(self) -> None:
        """Block until no slot is fenced, then let go of the memory; leases keep theirs."""
        with self._lock:
            self._settle()
            pending = [fence for watch in self._fenced.values() for fence in watch.fences]
        for fence in pending:
            fence.wait()
        with self._lock:
            self._sweep()
            self._region = None

    def address(self, index: int) -> int:
        """Address of a slot's first byte."""
        return self._address + index * self._stride

    def view(self, index: int) -> npt.NDArray[np.uint8]:
        """A slot's memory, leased or not."""
        return np.frombuffer(self._buffer(self.address(index)), np.uint8)

    def _settle(self) -> None:
        """Sort what came back into free and fenced slots; the lock is held."""
        while not self._returned.empty():
            watch = self._returned.get_nowait()
            # Released slots come twice, the second time when their memory is garbage.
            if watch is not None and self._busy.get(getattr(watch, "index", -1)) is watch:
                self._take_back(watch)

    def _take_back(self, watch: _Watch) -> None:
        if watch.fences:
            self._fenced[watch.index] = watch
        else:
            self._add_free(watch)
        if not watch.released:
            self.collected += 1
            if self.tracer is not None:
                self.tracer.note("collect", watch.index)

    def _sweep(self) -> None:
        """Free the slots whose fences have passed."""
        for index, watch in list(self._fenced.items()):
            if self._busy.get(index) is watch:
                if not all(fence.query() for fence in watch.fences):
                    continue
                self._add_free(watch)
            del self._fenced[index]

    def _add_free(self, watch: _Watch) -> None:
        # A slot poisoned at its release is not poisoned again: the next acquire looks for writes since then.
        stale = watch.fences or not watch.released
        if self.tracer is not None and stale and self._region is not None:
            poison(self.view(watch.index))
        del self._busy[watch.index]
        self._put_free(watch.index)

    def _put_free(self, index: int) -> None:
        self._free.append(index)

    def _recover(self) -> None:
        for index, watch in list(self._busy.items()):
            if index not in self._fenced and (watch.released or watch() is None):
                self._take_back(watch)
        if len(self._busy) + len(self._free) < self.slots:
            self._free.extend(set(range(self.slots)) - set(self._busy) - set(self._free))

    def _lease(self, index: int) -> "Lease":
        address = self.address(index)
        buffer = self._buffer(address)
        watch = _Watch(buffer, self._returned.put)
        watch.released, watch.fences = False, []
        watch.index = index
        self._busy[index] = watch
        if self.tracer is not None:
            self.tracer.note("acquire", index)
        return Lease(self, watch, buffer, address)

    def _buffer(self, address: int) -> Any:
        buffer = self._type.from_address(address)
        buffer.region = self._region
        return buffer

    def _check_poison(self, index: int, tracer: Tracer) -> None:
        offset = first_write(self.view(index))
        if offset is not None:
            poison(self.view(index))
            self._put_free(index)
            site = tracer.last_site("release", index)
            raise PoolError(f"{self.noun} {index} was written at byte {offset} after its release at {site}")


class Lease:
    """One slot, yours until `release`, or until the lease and every view of it are garbage.

    Also a context manager that releases on exit. Views taken before the release stay mapped for ever, but
    after it their bytes belong to the next holder.

    Attributes:
        index: number of the slot.
    """

    __slots__ = ("_address", "_array", "_slot", "_table", "_watch", "index")

    def __init__(self, table: SlotTable, watch: _Watch, slot: Any, address: int) -> None:
        self.index = watch.index
        self._table = table
        self._watch = watch
        self._slot = slot
        self._address = address
        self._array: npt.NDArray[np.uint8] | None = None

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The slot as writable uint8[slot_bytes]; its content is whatever the last holder left.

        Raises PoolError after `release`.
        """
        if self._array is None:
            self._array = self.view((len(self._live_slot()),), np.uint8)
        return self._array

    @property
    def address(self) -> int:
        """Address of the slot's first byte, for native code; PoolError after `release`."""
        if self._slot is None:
            self._fail("used after its release")
        return self._address

    @property
    def released(self) -> bool:
        """Whether the slot went back."""
        return self._slot is None

    def view(self, shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int = 0) -> npt.NDArray[Any]:
        """The bytes from `offset` on as an array; the slot stays leased while the array lives.

        Raises PoolError after `release`, or if the array would reach past the slot.
        """
        slot = self._slot
        if slot is None:
            self._fail("used after its release")
        try:
            return np.ndarray(shape, dtype, slot, offset)
        except (TypeError, ValueError):
            need = offset + math.prod(shape) * np.dtype(dtype).itemsize
            raise PoolError(
                f"a view of {need} bytes does not fit a {self._table.noun} of {len(slot)}"
            ) from None

    def fence(self, fence: Fence) -> None:
        """Keep the slot out of the free list after `release` until `fence.query()` is true."""
        if not isinstance(fence, Fence):
            raise PoolError(f"a fence needs query() and wait(); {type(fence).__name__} has not both")
        self._live_slot()
        self._watch.fences.append(fence)

    def release(self) -> None:
        """Give the slot back; PoolError if that was done before."""
        if not self._table.release(self._watch):
            self._fail("released twice")
        self._array = self._slot = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.released:
            self.release()

    def _live_slot(self) -> Any:
        if self._slot is None:
            self._fail("used after its release")
        return self._slot

    def _fail(self, what: str) -> NoReturn:
        tracer, text = self._table.tracer, f"{self._table.noun} {self.index}: lease {what}"
        if tracer is None:
            raise PoolError(f"{text}; LOONGFORGE_DEBUG_MEMORY=1 shows where it was released")
        raise PoolError(f"{text}, at {call_site()}; released at {tracer.last_site('release', self.index)}")
