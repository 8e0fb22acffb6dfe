"""The books of a pool: which slots are free, leased or fenced.

A slot may come back when the garbage collector finds its memory unused, in any thread and in the middle of
anything. No Python code may run there: it could wait for a lock that the same thread holds, and a Ctrl-C in
it would be swallowed. So the callback of the weak reference is `SimpleQueue.put` itself, which is C and
re-entrant; whoever needs a slot next takes the returned ones from that queue.
"""

import ctypes
import functools
import queue
import sys
import sysconfig
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ._errors import Holder, PoolError
from ._lease import Fence, Lease, Watch
from ._line import Line
from ._region import Region
from ._trace import Tracer, first_write, poison

# References to a released memory that no array shows: the name in `release`, the argument of getrefcount. Python 3.14
# borrows some of them, and without the GIL the count may change meanwhile: nothing is reused there.
_UNSHARED = 2 if sys.version_info < (3, 14) and not sysconfig.get_config_var("Py_GIL_DISABLED") else -1


@functools.lru_cache(maxsize=1024)
def slot_type(slot_bytes: int) -> type[Any]:
    """A ctypes array class whose instances keep their region mapped."""
    return type("SlotBuffer", (ctypes.c_uint8 * slot_bytes,), {"__slots__": ("region",)})


class SlotTable:
    """Free list, leased slots and fenced slots of one region.

    A Ctrl-C can strike between any two lines. So a slot is busy or free by one entry, `_busy[index]`; what an
    interrupted change leaves in neither list is found again by `_recover`.

    Attributes:
        base, stride: address of the first slot, and bytes from one slot to the next.
        line: threads that wait for a slot.
        acquires, peak, collected: see PoolStats.
        noun: what a message calls one part of the region.
    """

    noun = "slot"

    def __init__(
        self, region: Region, slots: int, slot_bytes: int, stride: int, tracer: Tracer | None
    ) -> None:
        self._region: Region | None = region
        self.base = region.address
        self._type = slot_type(slot_bytes)
        self.stride = stride
        self._lock = threading.Lock()  # never taken by anything the garbage collector may call
        self._returned: queue.SimpleQueue[Watch | None] = queue.SimpleQueue()
        self._note_returned: Callable[[Any], None] = self._returned.put
        self._free = list(range(slots - 1, -1, -1))
        self._spare: dict[int, tuple[Any, Watch]] = {}  # free slots whose last lease left no array behind
        self._busy: dict[int, Watch] = {}  # leased or fenced
        self._fenced: dict[int, Watch] = {}  # those of them that came back and wait for a fence
        self._fences: dict[int, list[Fence]] = {}
        self.line = Line(self._lock)
        self.slots = slots
        self.tracer = tracer
        self.acquires = self.peak = self.collected = 0
        self._plain = tracer is None  # nothing to check or to note at a release
        if tracer is not None:
            for index in range(slots):
                poison(self._bytes(self.offset(index), stride))

    def take(self) -> Lease | None:
        """The most recently freed slot as a lease, or None if none is free now."""
        with self._lock:
            if not self._returned.empty():
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
                self.tracer.note("acquire", index)
            spare = self._spare.pop(index, None)
            if spare is None:
                memory = self._type.from_address(self.base + index * self.stride)
                watch = self._watch(index, memory)
            else:
                memory, watch = spare
            self._busy[index] = watch
            self.acquires += 1
            busy = len(self._busy)
            if busy > self.peak:
                self.peak = busy
            return Lease(self, index, memory)

    def release(self, lease: Lease) -> bool:
        """End a lease; False if that was done before. In safety mode PoolError if it wrote past its end."""
        index = lease.index
        with self._lock:
            memory = lease._memory
            if memory is None:
                return False
            lease._memory = lease._array = None
            if self._plain and not self._fences:
                watch = self._busy.pop(index)
                self._free.append(index)
                if sys.getrefcount(memory) == _UNSHARED:
                    self._spare[index] = memory, watch
            else:
                self._take_back(self._busy[index], "release")
        if self.line:
            self._note_returned(None)
        return True

    def wait(self, timeout: float) -> None:
        """Block until a slot may have come back, for `timeout` seconds at most."""
        try:
            self._note_returned(self._returned.get(timeout=timeout))  # sorted under the lock only
        except queue.Empty:
            return

    def add_fence(self, index: int, fence: Fence) -> None:
        """Let a leased slot wait for a fence when it comes back."""
        with self._lock:
            self._fences.setdefault(index, []).append(fence)

    def counts(self) -> tuple[list[int], int, int]:
        """Indices of leased slots, number of fenced ones, number of free ones."""
        with self._lock:
            self._settle()
            return sorted(set(self._busy) - set(self._fenced)), len(self._fenced), len(self._free)

    def holders(self) -> tuple[Holder, ...]:
        """Who has what."""
        leased, _, _ = self.counts()
        tracer = self.tracer
        sites = [tracer.last("acquire", index) if tracer is not None else "" for index in leased]
        return tuple(
            Holder(index, self.nbytes(index), site) for index, site in zip(leased, sites, strict=True)
        )

    def close(self) -> None:
        """Block until no slot is fenced, then let go of the memory; leases keep theirs."""
        with self._lock:
            self._settle()
            pending = [fence for index in self._fenced for fence in self._fences.get(index, ())]
        for fence in pending:
            fence.wait()
        with self._lock:
            self._sweep()
            self._spare.clear()  # they hold the region
            self._region = None

    def disown(self) -> None:
        """In a forked child: locks may be held by threads that are not here."""
        self._lock = threading.Lock()
        self._returned = queue.SimpleQueue()
        self.line = Line(self._lock)

    def nbytes(self, index: int) -> int:
        """Usable bytes of a slot."""
        return ctypes.sizeof(self._type)

    def offset(self, index: int) -> int:
        """First byte of a slot in the region."""
        return index * self.stride

    def _reach(self, index: int) -> int:
        """Bytes from the start of a slot to the start of the next."""
        return self.stride

    def _bytes(self, start: int, nbytes: int) -> npt.NDArray[np.uint8]:
        memory = slot_type(nbytes).from_address(self.base + start)
        memory.region = self._region
        return np.frombuffer(memory, np.uint8)

    def _settle(self) -> None:
        """Sort what the garbage collector returned into free and fenced slots; the lock is held."""
        found = False
        while not self._returned.empty():
            watch = self._returned.get_nowait()
            if watch is not None and self._busy.get(watch.index) is watch:
                found = True
                self._take_back(watch, "collect")
        if found and self.line:
            self._note_returned(None)  # we took the notice that the first in line waits for

    def _take_back(self, watch: Watch, action: str) -> None:
        index = watch.index
        if action == "collect":
            self.collected += 1
        if self.tracer is not None:
            self.tracer.note(action, index)
        if index in self._fences:
            self._fenced[index] = watch
        else:
            self._add_free(index)

    def _sweep(self) -> None:
        """Free the slots whose fences have passed."""
        for index, watch in list(self._fenced.items()):
            if self._busy.get(index) is watch:
                if not all(fence.query() for fence in self._fences.get(index, ())):
                    continue
                self._fences.pop(index, None)
                self._add_free(index)
            del self._fenced[index]

    def _add_free(self, index: int) -> None:
        past = None
        if self.tracer is not None and self._region is not None:
            start, used, reach = self.offset(index), self.nbytes(index), self._reach(index)
            past = first_write(self._bytes(start + used, reach - used)) if reach > used else None
            poison(self._bytes(start, reach))
        del self._busy[index]
        self._put_free(index)
        if past is not None and self.tracer is not None:
            where = self.tracer.last("acquire", index)
            raise PoolError(
                f"{self.noun} {index} of {used} bytes was written at byte {used + past}, past its end, "
                f"by its holder; acquired at {where}"
            )

    def _put_free(self, index: int) -> None:
        self._free.append(index)

    def _recover(self) -> None:
        for index, watch in list(self._busy.items()):
            if index not in self._fenced and watch() is None:
                self._take_back(watch, "collect")
        if len(self._busy) + len(self._free) < self.slots:
            self._free.extend(set(range(self.slots)) - set(self._busy) - set(self._free))

    def _watch(self, index: int, memory: Any) -> Watch:
        memory.region = self._region
        watch = Watch(memory, self._note_returned)
        watch.index = index
        return watch

    def _check_poison(self, index: int, tracer: Tracer) -> None:
        memory = self._bytes(self.offset(index), self._reach(index))
        offset = first_write(memory)
        if offset is not None:
            poison(memory)
            self._put_free(index)
            site = tracer.last("release", index)
            raise PoolError(f"{self.noun} {index} was written at byte {offset} after its release at {site}")
