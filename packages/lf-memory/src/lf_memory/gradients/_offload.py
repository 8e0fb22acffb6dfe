"""offload: saved activations in host memory between forward and backward."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .._errors import PoolError
from .._lease import Lease
from .._pool import HostPool
from .._variable import VariablePool
from ._offload_copies import Copies, copies_for
from ._offload_entry import Entry, Packed
from ._offload_stats import OffloadStats

_PLAIN = (Tensor, nn.Parameter)
_PART = 4  # a tensor under 1/4 of its storage: copying would move more than it frees; q of a joint qkv is 1/3


@contextlib.contextmanager
def offload(
    pool: HostPool | VariablePool, *, min_bytes: int = 1 << 20, keep: nn.Module | Iterable[Tensor] = (), ahead: int = 2,
    share: bool = True,
) -> Iterator[Offload]:  # fmt: skip
    """Keep what autograd saves in this block in `pool`; the backward, inside or outside the block, reads it back.

    Whole storages are copied, once for each version: bits, strides and aliasing are as without. On a device the
    copies run on a stream of their own; page-lock the pool, or they wait for the host. Nothing waits for the pool:
    what finds no room stays on the device. Parameters and their views stay.

    Args:
        pool: a VariablePool takes any size; a HostPool what fits a slot. Leases end with the graph.
        min_bytes: smaller saved tensors stay.
        keep: a module, whose buffers stay too, or tensors that stay.
        share: whether a storage that is saved again under the same version is the copy there is. On the CPU its bytes
            are compared first. On a device nothing waits to compare them, and a change that versions do not count
            (`x.data.mul_()`) would go unseen: say False if your code does such a thing between two uses of a
            tensor. Every saving then has a copy of its own.
        ahead: storages that are fetched before the backward asks for them, in reverse order of saving.

    Yields:
        The block's Offload, for `stats()`.

    Raises ValueError for arguments out of range, RuntimeError within a graph capture. A saved tensor that was
    changed in place is an error in backward, as without, while it lives. What is changed through `.data` is
    no error, as without: on the CPU it is read back as it was when it was saved, on a device as either.
    """
    if min_bytes < 1 or ahead < 0:
        raise ValueError(f"min_bytes={min_bytes}, ahead={ahead}: at least 1 and at least 0")
    session = Offload(pool, min_bytes, keep, ahead, share)
    with torch.autograd.graph.saved_tensors_hooks(session.pack, session.unpack):
        try:
            yield session
        finally:
            session.settle()


class Offload:
    """One block of `offload`; its arguments."""

    def __init__(
        self,
        pool: HostPool | VariablePool,
        min_bytes: int,
        keep: nn.Module | Iterable[Tensor],
        ahead: int,
        share: bool,
    ) -> None:
        self._pool = pool
        self._min_bytes = min_bytes
        self._ahead = ahead
        self._share = share
        tensors = [*keep.parameters(), *keep.buffers()] if isinstance(keep, nn.Module) else list(keep)
        self._kept_storages = {t.untyped_storage().data_ptr() for t in tensors if type(t) in _PLAIN} - {0}
        self._by_storage: dict[int, weakref.ref[Entry]] = {}
        self._entries: list[weakref.ref[Entry]] = []
        self._used: set[Copies] = set()
        self._stats = OffloadStats()

    def stats(self) -> OffloadStats:
        """A snapshot; see OffloadStats."""
        return self._stats

    def pack(self, tensor: Tensor) -> Tensor | Packed:
        """What autograd keeps instead of a tensor that it saves."""
        reason = self._reason(tensor)
        entry = None if reason else self._entry(tensor)
        if entry is None:
            self._count_kept(reason or "pool", tensor)
            return tensor
        return Packed.of(entry, tensor)

    def unpack(self, packed: Tensor | Packed) -> Tensor:
        """The tensor again."""
        if isinstance(packed, Tensor):
            return packed
        packed.require_unchanged()
        entry = packed.entry
        if not entry.fetched:
            self._fetch(entry, early=False)
        for before in self._entries[max(0, entry.index - self._ahead) : entry.index][::-1]:
            other = before()
            if other is not None and other.early:
                self._fetch(other, early=True)
        return packed.view(entry.take())

    def settle(self) -> None:
        """Let go of device memory whose copies are on the way."""
        for copies in self._used:
            copies.settle()

    def _reason(self, tensor: Tensor) -> str:
        """Why a tensor stays on the device; "" if it does not."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or _is_odd(tensor):
            return "kind"
        if self._is_parameter(tensor):
            return "parameter"
        if tensor.nbytes < self._min_bytes:
            return "small"
        return "part" if tensor.nbytes * _PART < tensor.untyped_storage().nbytes() else ""

    def _is_parameter(self, tensor: Tensor) -> bool:
        leaf = tensor._base if tensor._base is not None else tensor
        return (
            leaf.is_leaf and leaf.requires_grad
        ) or tensor.untyped_storage().data_ptr() in self._kept_storages

    def _entry(self, tensor: Tensor) -> Entry | None:
        """The entry of a tensor's storage, made if there is none; None if the pool has no room."""
        storage = tensor.untyped_storage()
        reference = self._by_storage.get(StorageWeakRef(storage).cdata)
        entry = reference() if reference is not None else None
        if self._share and entry is not None and entry.holds(tensor):
            self._stats = dataclasses.replace(self._stats, shared=self._stats.shared + 1)
            return entry
        _refuse_capture(tensor.device)
        lease = self._lease(storage.nbytes())
        return None if lease is None else self._store(tensor, lease)

    def _store(self, tensor: Tensor, lease: Lease) -> Entry:
        copies = copies_for(tensor.device)
        self._used.add(copies)
        entry = Entry(tensor, lease, copies, len(self._entries))
        self._entries.append(weakref.ref(entry))
        self._by_storage[entry.source.cdata] = weakref.ref(entry)
        stats = self._stats
        self._stats = dataclasses.replace(
            stats, stored=stats.stored + 1, stored_bytes=stats.stored_bytes + entry.nbytes
        )
        return entry

    def _lease(self, nbytes: int) -> Lease | None:
        if isinstance(self._pool, HostPool):
            return self._pool.try_acquire() if nbytes <= self._pool.slot_bytes else None
        try:
            return self._pool.try_acquire(nbytes)
        except PoolError as error:
            if error.needed is None:
                raise
            return None

    def _fetch(self, entry: Entry, early: bool) -> None:
        entry.fetch()
        stats = self._stats
        self._stats = dataclasses.replace(
            stats,
            fetched=stats.fetched + 1,
            fetched_bytes=stats.fetched_bytes + entry.nbytes,
            ahead=stats.ahead + early,
        )

    def _count_kept(self, reason: str, tensor: Tensor) -> None:
        stats, nbytes = self._stats, tensor.nbytes if tensor.layout is torch.strided else 0
        self._stats = dataclasses.replace(
            stats,
            kept={**stats.kept, reason: stats.kept.get(reason, 0) + 1},
            kept_bytes={**stats.kept_bytes, reason: stats.kept_bytes.get(reason, 0) + nbytes},
        )


def _is_odd(tensor: Tensor) -> bool:
    """Bits that a storage does not show, or no storage of its own."""
    return (
        tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_inference()
        or tensor.is_quantized
        or tensor.device.type == "meta"
    )


def _refuse_capture(device: torch.device) -> None:
    if device.type in ("cpu", "meta"):
        return
    capturing = getattr(
        torch.get_device_module(device), "is_current_stream_capturing", bool
    )  # not all have it
    if capturing():
        raise RuntimeError(
            f"offload within a {device.type.upper()} graph capture: leases follow each graph of autograd; "
            "capture without"
        )
