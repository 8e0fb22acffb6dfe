"""Another process's pool, seen through its descriptor."""

import fcntl
import os
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from ._errors import PoolError
from ._region import PAGE, Region
from ._slots import slot_type

_MAX_ATTACH = 1 << 46  # bytes; as for a pool


def layout_name(slot_bytes: int, stride: int) -> str:
    """The name of a pool's memfd; it tells whoever gets the descriptor how the slots lie."""
    return f"lf-memory-{slot_bytes}-{stride}"


def layout_of(fd: int) -> tuple[int, int, int]:
    """(slot_bytes, stride, size) of a pool's memfd.

    PoolError for any other descriptor, for sizes that do not belong together, and where the size could still shrink
    (reading would then kill this process with SIGBUS).
    """
    try:
        size = os.fstat(fd).st_size
        name = os.readlink(f"/proc/self/fd/{fd}")  # /proc has to be mounted
    except OSError as error:
        raise PoolError(f"descriptor {fd}: {error.filename or 'fstat'}: {error.strerror}") from None
    found = re.fullmatch(r"/memfd:lf-memory-(\d{1,15})-(\d{1,15}) \(deleted\)", name)
    if found is None:
        raise PoolError(f"descriptor {fd} is {name}, not the memory of a pool")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise PoolError(f"descriptor {fd} is not sealed: its sender could truncate it under us")
    slot_bytes, stride = int(found[1]), int(found[2])
    if slot_bytes < 1 or stride < slot_bytes or stride % PAGE or not stride <= size <= _MAX_ATTACH:
        raise PoolError(
            f"descriptor {fd} has {size} bytes, which slots of {slot_bytes} every {stride} do not fit"
        )
    return slot_bytes, stride, size


class AttachedPool:
    """Another pool's memory. Which slots hold what is for the two processes to agree on.

    Attributes:
        slots, slot_bytes: as of the pool; a VariablePool is one slot.
    """

    def __init__(self, fd: int, slot_bytes: int | None = None, *, writable: bool = False) -> None:
        """Map a duplicate of `fd`; PoolError if it is not a pool's, or not one with slots of `slot_bytes`."""
        self.slot_bytes, self._stride, size = layout_of(fd)
        if slot_bytes is not None and slot_bytes != self.slot_bytes:
            raise PoolError(f"descriptor {fd} has slots of {self.slot_bytes} bytes, not of {slot_bytes}")
        self.slots = size // self._stride
        self._writable = writable
        try:
            self._region = Region(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), size, writable=writable)
        except OSError as error:
            raise PoolError(f"descriptor {fd} cannot be mapped: {error.strerror}") from error

    def slot(self, index: int) -> npt.NDArray[np.uint8]:
        """Slot `index` as uint8[slot_bytes], read-only unless `writable`; PoolError if there is no such slot."""
        if not 0 <= index < self.slots:
            raise PoolError(f"slot {index} of {self.slots}")
        return self.part(index * self._stride, self.slot_bytes)

    def part(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes of the memory, such as those of a lease (`Lease.offset`); PoolError beyond its end."""
        if offset < 0 or nbytes < 1 or offset + nbytes > self._region.size:
            raise PoolError(f"{nbytes} bytes from {offset}: the pool has {self._region.size}")
        memory: Any = slot_type(nbytes).from_address(self._region.address + offset)
        memory.region = self._region
        view = np.frombuffer(memory, np.uint8)
        view.flags.writeable = self._writable
        return view
