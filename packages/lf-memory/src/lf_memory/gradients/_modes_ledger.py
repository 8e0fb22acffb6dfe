"""Which gradients are in memory, by weak references."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ._modes_tensors import is_sharded


@dataclass(frozen=True)
class Entry:
    """A gradient: whose it was, its bytes, what tells it from others, and whether it is gone."""

    name: str
    nbytes: int
    key: int
    gone: Callable[[], bool]


class Ledger:
    """Counts the bytes of gradients that are alive; owns none of them.

    A plain gradient lives as long as its storage, in which it counts in full and once, however many views of it
    there are. A sharded one is a part of a buffer that fully_shard, and the threads of its process group, let go
    of when they like: it lives as long as the tensor.

    Attributes:
        nbytes: of what is noted; what went since it was looked for is still in it.
        peak: most bytes noted at one time.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._brief: list[Entry] = []
        self.nbytes = self.peak = 0

    def add(self, name: str, grad: Tensor, stays: bool) -> None:
        """Note a gradient; one that does not stay is looked for again when the next is added."""
        self._sweep()
        entry = _sharded_entry(name, grad) if is_sharded(grad) else _plain_entry(name, grad)
        before = self._entries.get(entry.key)
        self._entries[entry.key] = entry
        if not stays:
            self._brief.append(entry)
        self.nbytes += entry.nbytes - (before.nbytes if before else 0)
        self.peak = max(self.peak, self.nbytes)

    def live(self) -> list[Entry]:
        """Gradients whose memory is still there; the others are forgotten."""
        self._entries = {k: e for k, e in self._entries.items() if not e.gone()}
        self.nbytes = sum(entry.nbytes for entry in self._entries.values())
        return list(self._entries.values())

    def forget(self) -> None:
        """Drop every note; the peak stays."""
        self._entries.clear()
        self._brief.clear()
        self.nbytes = 0

    def _sweep(self) -> None:
        """Forget brief ones that are gone; to look at all of them each time would be quadratic."""
        brief, self._brief = self._brief, []
        for entry in brief:
            if not entry.gone():
                self._brief.append(entry)
            elif self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
                self.nbytes -= entry.nbytes


def _plain_entry(name: str, grad: Tensor) -> Entry:
    storage = grad.untyped_storage()
    weak = StorageWeakRef(storage)
    return Entry(name, storage.nbytes(), weak.cdata, weak.expired)


def _sharded_entry(name: str, grad: Tensor) -> Entry:
    weak = weakref.ref(grad)
    nbytes = grad.to_local().nbytes  # type: ignore[attr-defined]
    return Entry(name, nbytes, id(grad), lambda: weak() is None)
