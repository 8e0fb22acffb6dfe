"""A lease: one slot or range, in the hands of one holder."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from ._errors import PoolError
from ._trace import call_stack

if TYPE_CHECKING:
    from ._slots import SlotTable

_ndarray = np.ndarray  # a local name: `view` is called once for each batch


@runtime_checkable
class Fence(Protocol):
    """Work on a device that still uses a slot; a CUDA event behind two methods is one."""

    def query(self) -> bool:
        """True once the work is done; must not block."""

    def wait(self) -> None:
        """Block the calling thread until the work is done."""


class Watch(weakref.ref[Any]):
    """Stands for one lease in the pool's books; the garbage collector queues it when the memory is unused."""

    __slots__ = ("index",)

    index: int


class Lease:
    """One slot, yours until `release`, or until the lease and every view of it are garbage.

    Also a context manager that releases on exit. Views taken before the release stay mapped for ever, but
    after it their bytes belong to the next holder.

    Attributes:
        index: number of the slot; of a range, its first page.
    """

    __slots__ = ("_array", "_memory", "_table", "index")

    def __init__(self, table: SlotTable, index: int, memory: Any) -> None:
        self._table = table
        self.index = index
        self._memory = memory
        self._array: npt.NDArray[np.uint8] | None = None

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The slot as writable uint8[slot_bytes]; its content is whatever the last holder left.

        Raises PoolError after `release`.
        """
        if self._array is None:
            self._array = self.view((len(self._live_memory()),), np.uint8)
        return self._array

    @property
    def address(self) -> int:
        """Address of the slot's first byte, for native code; PoolError after `release`."""
        if self._memory is None:
            self._fail("used after its release")
        table = self._table
        return table.base + self.index * table.stride

    @property
    def offset(self) -> int:
        """The slot's first byte in the memfd, for a process that has attached it; PoolError after `release`."""
        self._live_memory()
        return self._table.offset(self.index)

    @property
    def released(self) -> bool:
        """Whether the slot went back."""
        return self._memory is None

    def view(self, shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int = 0) -> npt.NDArray[Any]:
        """The bytes from `offset` on as an array; the slot stays leased while the array lives.

        Raises PoolError after `release`, or if the array would reach out of the slot.
        """
        memory = self._memory
        if memory is None:
            self._fail("used after its release")
        if offset < 0:  # numpy takes it, and gives memory of another slot
            raise PoolError(f"a view from byte {offset} on: a {self._table.noun} begins at 0")
        try:
            return _ndarray(shape, dtype, memory, offset)
        except (TypeError, ValueError):
            need = offset + math.prod(shape) * np.dtype(dtype).itemsize
            noun = self._table.noun
            raise PoolError(f"a view of {need} bytes does not fit a {noun} of {len(memory)}") from None

    def fence(self, fence: Fence) -> None:
        """Keep the slot out of the free list after `release` until `fence.query()` is true."""
        if not isinstance(fence, Fence):
            raise PoolError(f"a fence needs query() and wait(); {type(fence).__name__} has not both")
        self._live_memory()
        self._table.add_fence(self.index, fence)

    def release(self) -> None:
        """Give the slot back; PoolError if that was done before."""
        if not self._table.release(self):
            self._fail("released twice")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._memory is not None:
            self.release()

    def _live_memory(self) -> Any:
        if self._memory is None:
            self._fail("used after its release")
        return self._memory

    def _fail(self, what: str) -> NoReturn:
        tracer, text = self._table.tracer, f"{self._table.noun} {self.index}: lease {what}"
        if tracer is None:
            raise PoolError(f"{text}; LOONGFORGE_DEBUG_MEMORY=1 shows where it was released")
        raise PoolError(
            f"{text}, at {call_stack()[0]}; released at {tracer.last('release', self.index)}; "
            f"acquired at {tracer.last('acquire', self.index)}"
        )
