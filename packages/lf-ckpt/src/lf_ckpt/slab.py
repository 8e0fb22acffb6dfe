"""The staging slab: one block of host memory, allocated once, used as a ring of variable-size pieces."""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .errors import CkptError
from .format import align


class Piece(NamedTuple):
    """A leased piece: where it begins, its length, and what `release` must give back (with skipped bytes)."""

    offset: int
    length: int
    cost: int


class StagingAbortedError(CkptError):
    """The writer failed while the slab was being filled; the handle holds the reason."""


class Slab:
    """A first-in first-out ring over `size` bytes (a multiple of 4096).

    One thread takes pieces, another gives them back in the same order. `tensor` and `array` view the same memory.
    """

    def __init__(self, size: int, pinned: bool) -> None:
        self.size, self.pinned = size, pinned
        self.tensor = _allocate(size, pinned)
        self.array: npt.NDArray[np.uint8] = self.tensor.numpy()
        self._bounce: npt.NDArray[np.uint8] | None = None
        self._changed = threading.Condition()
        self._head = self._used = 0
        self._aborted = False

    def bounce(self, size: int) -> npt.NDArray[np.uint8]:
        """Page-aligned memory of `size` bytes for the writer to pack encoded extents in; kept for the next save."""
        if self._bounce is None or self._bounce.size < size:
            self._bounce = _allocate(size, pinned=False).numpy()
        return self._bounce[:size]

    def take(self, length: int) -> Piece:
        """Lease `length` bytes at a 4 KiB edge; waits for space. StagingAbortedError after `abort`."""
        need = align(length)
        if need > self.size // 2:
            raise CkptError(f"a piece of {length} bytes may never fit a slab of {self.size}")
        with self._changed:
            while True:
                if self._aborted:
                    raise StagingAbortedError("the checkpoint writer stopped")
                if self._used == 0:
                    self._head = 0
                wraps = self._head + need > self.size
                skip = self.size - self._head if wraps else 0
                if self._used + need + skip <= self.size:
                    break
                self._changed.wait()
            offset = 0 if wraps else self._head
            self._head = offset + need
            self._used += need + skip
            return Piece(offset, length, need + skip)

    def release(self, piece: Piece) -> None:
        """Give the oldest leased piece back."""
        with self._changed:
            self._used -= piece.cost
            self._changed.notify_all()

    def abort(self) -> None:
        """Wake and refuse whoever waits in `take`, until `reset`."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def reset(self) -> None:
        """Empty again; only between saves."""
        with self._changed:
            self._head = self._used = 0
            self._aborted = False


def _allocate(size: int, pinned: bool) -> torch.Tensor:
    """Page-aligned uint8 tensor of `size` bytes; page-locked for the accelerator when `pinned`."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, size)
    # Huge pages make the first touch of the slab several times cheaper; a kernel without them just says no.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
