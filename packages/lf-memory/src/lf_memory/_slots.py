"""Slots and leases: the life of one buffer between `acquire` and its return to the free list.

A slot may come back from `__del__`, which the garbage collector can run in any thread in the middle of
anything, even of this module's own code. So nothing here takes a lock on the way back: the free list is a
list (append and pop are atomic) counted by a SimpleQueue, whose `put` is re-entrant.
"""

import ctypes
import itertools
import math
import queue
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


class _Slot:
    """Mixed into a ctypes array: memory of one lease that goes back when nothing refers to it any more."""

    __slots__ = ()

    region: Region
    table: "SlotTable"
    index: int
    serial: int
    fences: list[Fence]

    def __del__(self) -> None:
        self.table.collect(self)


def slot_type(slot_bytes: int, *, leased: bool = False) -> type[Any]:
    """A ctypes array class whose instances keep their region mapped."""
    array = ctypes.c_uint8 * slot_bytes
    if leased:
        slots = ("region", "table", "index", "serial", "fences")
        return type("LeasedSlot", (_Slot, array), {"__slots__": slots})
    return type("SlotBuffer", (array,), {"__slots__": ("region",)})


class SlotTable:
    """Free list, leased slots and fenced slots of one region.

    Attributes:
        free: indices of free slots, the last freed at the end.
        live: slots leased now, by the lease's serial number; whoever pops an entry has ended that lease.
        fenced: indices of returned slots with the fences they wait for.
        peak, collected: see PoolStats; a race between two threads may lose a count, never a slot.
    """

    def __init__(
        self, region: Region, slots: int, slot_bytes: int, stride: int, tracer: Tracer | None
    ) -> None:
        self._region = region
        self._type = slot_type(slot_bytes)
        self._leased_type = slot_type(slot_bytes, leased=True)
        self._stride = stride
        self._serials = itertools.count()
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.slots = slots
        self.tracer = tracer
        self.acquires = self.peak = self.collected = 0
        self.free: list[int] = []
        self.live: dict[int, int] = {}
        self.fenced: dict[int, list[Fence]] = {}
        for index in reversed(range(slots)):
            self._free(index)

    def take(self, timeout: float | None) -> "Lease | None":
        """The most recently freed slot as a lease; None if none is free within `timeout` seconds."""
        try:
            self._tokens.get(timeout != 0, timeout)
        except queue.Empty:
            return None
        index = self.free.pop()
        if self.tracer is not None:
            self._check_poison(index, self.tracer)
            self.tracer.note("acquire", index)
        self.acquires += 1
        used = self.slots - len(self.free)
        if used > self.peak:
            self.peak = used
        return self._lease(index)

    def _lease(self, index: int) -> "Lease":
        address = self.address(index)
        slot = self._leased_type.from_address(address)
        slot.region, slot.table, slot.index, slot.fences = self._region, self, index, []
        slot.serial = serial = next(self._serials)
        self.live[serial] = index
        return Lease(slot, address)

    def collect(self, slot: _Slot) -> None:
        """A slot's memory became garbage; nothing to do if it was released before."""
        if self.live.pop(slot.serial, None) is not None:
            self.collected += 1
            self._return(slot, "collect")

    def release(self, slot: _Slot) -> bool:
        """End a lease; False if that was done before."""
        if self.live.pop(slot.serial, None) is None:
            return False
        self._return(slot, "release")
        return True

    def _return(self, slot: _Slot, action: str) -> None:
        if self.tracer is not None:
            self.tracer.note(action, slot.index)
        if slot.fences:
            self.fenced[slot.index] = slot.fences
        else:
            self._free(slot.index)

    def sweep(self) -> int:
        """Free every fenced slot whose fences have passed; returns how many are still fenced."""
        for index, fences in list(self.fenced.items()):
            # pop() decides between two threads that sweep at the same time
            if all(fence.query() for fence in fences) and self.fenced.pop(index, None) is not None:
                self._free(index)
        return len(self.fenced)

    def wait_fences(self) -> None:
        """Block until no slot is fenced."""
        for fences in list(self.fenced.values()):
            for fence in fences:
                fence.wait()
        self.sweep()

    def address(self, index: int) -> int:
        """Address of a slot's first byte."""
        return self._region.address + index * self._stride

    def _free(self, index: int) -> None:
        if self.tracer is not None:
            poison(self._view(index))
        self.free.append(index)
        self._tokens.put(None)

    def _view(self, index: int) -> npt.NDArray[np.uint8]:
        buffer = self._type.from_address(self.address(index))
        buffer.region = self._region
        return np.frombuffer(buffer, np.uint8)

    def _check_poison(self, index: int, tracer: Tracer) -> None:
        offset = first_write(self._view(index))
        if offset is not None:
            self._free(index)
            site = tracer.last_site("release", index)
            raise PoolError(f"slot {index} was written at byte {offset} after its release at {site}")


class Lease:
    """One slot, yours until `release`, or until the lease and every view of it are garbage.

    Also a context manager that releases on exit. Views taken before the release stay mapped for ever, but
    after it their bytes belong to the next holder.

    Attributes:
        index: number of the slot.
    """

    __slots__ = ("_address", "_array", "_slot", "_table", "index")

    def __init__(self, slot: Any, address: int) -> None:
        self.index: int = slot.index
        self._table: SlotTable = slot.table
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
            raise PoolError(f"a view of {need} bytes does not fit a slot of {len(slot)}") from None

    def fence(self, fence: Fence) -> None:
        """Keep the slot out of the free list after `release` until `fence.query()` is true."""
        if not isinstance(fence, Fence):
            raise PoolError(f"a fence needs query() and wait(); {type(fence).__name__} has not both")
        self._live_slot().fences.append(fence)

    def release(self) -> None:
        """Give the slot back; PoolError if that was done before."""
        slot = self._slot
        if slot is None or not self._table.release(slot):
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
        tracer, text = self._table.tracer, f"slot {self.index}: lease {what}"
        if tracer is None:
            raise PoolError(f"{text}; LOONGFORGE_DEBUG_MEMORY=1 shows where it was released")
        raise PoolError(f"{text}, at {call_site()}; released at {tracer.last_site('release', self.index)}")
