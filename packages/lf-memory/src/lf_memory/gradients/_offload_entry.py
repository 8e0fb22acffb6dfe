"""A storage in host memory, and the saved tensors that are made of it again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._lease import Lease
from ._offload_copies import Copies, EventFence


class Entry:
    """One storage, copied to a lease; the lease ends with the last saved tensor that refers to it.

    Args:
        tensor: any tensor of the storage.
        lease: at least as large.
        copies: of the tensor's device.
        index: number of the entry in its block.

    Attributes:
        source: the storage on the device, weakly.
        version: of the tensor when it was copied.
        packs: saved tensors that refer to the entry.
        fetched: whether the storage is, or is coming, back on the device.
        used: whether all of them have been read.
    """

    def __init__(self, tensor: Tensor, lease: Lease, copies: Copies, index: int) -> None:
        storage = tensor.untyped_storage()
        self.source = StorageWeakRef(storage)
        self.version = tensor._version
        self.index = index
        self.nbytes = storage.nbytes()
        self.packs = self._unpacks = 0
        self.used = False
        self._device, self._lease, self._copies = tensor.device, lease, copies
        self._slot = torch.from_numpy(lease.view((self.nbytes,), "uint8"))
        self._event = copies.out(_bytes(tensor), self._slot)
        self._back: Tensor | None = None

    @property
    def fetched(self) -> bool:
        """See the class."""
        return self._back is not None

    @property
    def early(self) -> bool:
        """Whether to fetch before it is needed: it will be, it was not, and the copy runs beside the caller's work."""
        return self._copies.beside and not self.fetched and not self.used

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is of this storage, unchanged since it was copied.

        A version does not tell of changes through `.data`, whose counter is its own; the bytes do.
        """
        if self.source.expired() or tensor._version != self.version:
            return False
        return self._copies.equal(_bytes(tensor), self._slot)

    def fetch(self) -> None:
        """Begin the copy back."""
        self._back, self._event = self._copies.back(self._slot, self._device)

    def take(self) -> Tensor:
        """The storage on the device as bytes; with the last saved tensor the entry lets go of it."""
        assert self._back is not None
        back = self._back
        self._copies.wait(self._event)
        self._unpacks += 1
        if self._unpacks >= self.packs:  # a retained graph asks again, and is copied again
            self._back, self._unpacks, self.used = None, 0, True
        return back

    def __del__(self) -> None:
        lease = getattr(self, "_lease", None)
        if lease is None or lease.released:
            return
        if getattr(self, "_event", None) is not None:
            lease.fence(EventFence(self._event))
        if getattr(self, "_back", None) is not None:  # fetched, and not read by all who might have
            self._copies.abandon(self._back)  # type: ignore[arg-type]
        self._slot = None  # type: ignore[assignment]
        lease.release()


def _bytes(tensor: Tensor) -> Tensor:
    """The whole storage, uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclass(frozen=True)
class Packed:
    """One saved tensor: where it lies in its storage.

    Attributes:
        entry: its storage.
        tensor: the saved tensor, weakly, to tell whether it was changed in place.
        version: its version when it was saved.
    """

    entry: Entry
    tensor: weakref.ref[Tensor]
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, entry: Entry, tensor: Tensor) -> Packed:
        """The place of `tensor` in `entry`, which must hold it."""
        entry.packs += 1
        place: Any = (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        return cls(entry, weakref.ref(tensor), tensor._version, *place)

    def view(self, back: Tensor) -> Tensor:
        """The tensor again, in the storage of `back`."""
        empty = torch.empty(0, dtype=self.dtype, device=back.device)
        return empty.set_(back.untyped_storage(), self.offset, self.size, self.stride)

    def require_unchanged(self) -> None:
        """RuntimeError, as autograd's own, if the tensor was changed in place since it was saved."""
        tensor = self.tensor()
        if tensor is not None and tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(self.size)} is at version {tensor._version}, expected {self.version}"
            )
