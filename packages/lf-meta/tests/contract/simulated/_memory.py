"""Memory of the simulated device: what is alive, the peak, and a size that can run out."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _host
from ._log import CallLog


class Memory:
    """`total` bytes; an allocation beyond them is torch.OutOfMemoryError."""

    def __init__(self, log: CallLog, total: int = 1 << 30) -> None:
        self.total, self.alive, self.peak = total, 0, 0
        self._log = log
        self._lock = threading.RLock()

    def strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new device tensor, its bytes as they come."""
        last = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        nbytes = max(last * dtype.itemsize, _host.SMALLEST)
        self._take(nbytes)
        flat = _host.allocate(nbytes, self._free)
        return self._shaped(flat, size, stride, 0, dtype)

    def take(self, found: Tensor) -> Tensor:
        """A host tensor that nobody else has, as one of the device."""
        bytes_ = torch.empty(0, dtype=torch.uint8).set_(found.untyped_storage())
        self._take(max(bytes_.numel(), _host.SMALLEST))
        flat = _host.adopt(bytes_, self._free)
        return self._shaped(flat, found.shape, found.stride(), found.storage_offset(), found.dtype)

    def _shaped(
        self, flat: Tensor, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
    ) -> Tensor:
        self._log.allocated(flat.untyped_storage().data_ptr())
        typed = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return typed.as_strided(size, stride, offset)

    def _take(self, nbytes: int) -> None:
        with self._lock:
            if self.alive + nbytes > self.total:
                raise torch.OutOfMemoryError(f"{nbytes} bytes asked, {self.total - self.alive} free")
            self.alive += nbytes
            self.peak = max(self.peak, self.alive)

    def _free(self, nbytes: int) -> None:
        with self._lock:
            self.alive -= nbytes
