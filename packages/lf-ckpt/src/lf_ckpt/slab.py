"""The staging slab: one block of host memory, allocated once, used as a ring of variable-size pieces."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .errors import CkptError
from .format import align
from .host_memory import HostMemory


class Piece(NamedTuple):
    """A leased piece: where it begins, its length, what it takes from the ring (with skipped bytes), its number."""

    offset: int
    length: int
    cost: int
    number: int


class StagingAbortedError(CkptError):
    """The writer failed while the slab was being filled; the handle holds the reason."""


class Slab:
    """A ring over `size` bytes (a multiple of 4096). One thread takes pieces, others give them back in any order."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.size = size
        self.memory = HostMemory(size, pinned)
        self.array: npt.NDArray[np.uint8] = self.memory.array
        self._changed = threading.Condition()
        self._head = self._used = self._taken = 0
        self._leased: deque[Piece] = deque()
        self._back: set[int] = set()
        self._aborted = False

    def take(self, length: int) -> Piece:
        """Lease `length` bytes at a 4 KiB edge; waits for space. StagingAbortedError after `abort`."""
        piece = self._lease(length)
        self.memory.wait_ready(piece.offset + align(length))
        return piece

    def room(self, piece: Piece) -> npt.NDArray[np.uint8]:
        """Bytes of a piece up to the next 4 KiB edge: (align(length),) uint8."""
        return self.array[piece.offset : piece.offset + align(piece.length)]

    def parts(self, piece: Piece) -> Iterator[torch.Tensor]:
        """A piece as (n,) uint8 tensors that one device copy may fill each."""
        for offset, length in self.memory.edges(piece.offset, piece.length):
            yield self.memory.tensor[offset : offset + length]

    def release(self, piece: Piece) -> None:
        """Give a piece back; its space is used again once all older ones are back too."""
        with self._changed:
            self._back.add(piece.number)
            while self._leased and self._leased[0].number in self._back:
                oldest = self._leased.popleft()
                self._back.remove(oldest.number)
                self._used -= oldest.cost
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
            self._leased.clear()
            self._back.clear()
            self._aborted = False

    def close(self) -> None:
        """Unlock the memory; nothing may use it any more."""
        self.memory.close()

    def _lease(self, length: int) -> Piece:
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
            self._taken += 1
            piece = Piece(offset, length, need + skip, self._taken)
            self._leased.append(piece)
            return piece
