"""One memory pool for many graphs, with a byte budget and a record of whose tensors lie in it now."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lf_graph._alone import Alone
from lf_graph._backend import Backend, Stream, backend_for
from lf_graph._errors import BudgetError, StaleReplayError


class GraphPool:
    """Memory shared by graphs of which one chain (forward, then backward) is in flight at a time.

    Args:
        backend: of the device, or the device; default: the current CUDA device, or the CPU recorder without one.
        max_bytes: budget for everything captured here; None for no limit.
        poison: for debugging, also switched on by ``LOONGFORGE_DEBUG_GRAPH=1``: what a chain left in graph memory
            is filled with NaN as soon as nothing may read it any more, so that a stale read shows.

    Attributes:
        max_bytes, poison: as given.
        bytes: device memory taken by captures so far (0 on the recorder).
        predicted_bytes: what the warm-up of the last capture needed at its peak, known before capturing.

    Raises:
        GraphError: there are no graphs on that device.
    """

    def __init__(
        self,
        backend: Backend | torch.device | str | None = None,
        max_bytes: int | None = None,
        *,
        poison: bool = False,
    ) -> None:
        if backend is None:
            backend = "cuda" if torch.cuda.is_available() else "cpu"
        if isinstance(backend, str | torch.device):
            backend = backend_for(torch.device(backend))
        self.backend: Backend = backend
        self.max_bytes = max_bytes
        self.poison = poison or os.environ.get("LOONGFORGE_DEBUG_GRAPH") == "1"
        self.handle: Any = backend.new_pool()
        self.bytes = 0
        self.predicted_bytes = 0
        self.alone = Alone()  # for chains that share this memory
        self._stream: Stream | None = None  # of the last replay
        self._holder: object | None = None
        self._held: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # bytes that stay in use, by owner

    def follow(self) -> None:
        """Order what comes now behind the last replay here, if the caller changed streams in between."""
        current = self.backend.current_stream()
        if self._stream is not None:
            current.wait(self._stream)
        self._stream = current

    def claim(self, holder: object) -> None:
        """A forward of ``holder`` is replayed: saved tensors of every other chain here are gone."""
        self._holder = holder

    def require(self, holder: object, name: str) -> None:
        """Refuse a backward whose saved tensors were overwritten.

        Raises:
            StaleReplayError: another forward was replayed in this pool since.
        """
        if self._holder is not holder:
            raise StaleReplayError(
                f"{name}: another forward was replayed before this backward and overwrote its saved tensors; "
                "run each backward before the next forward, or capture a second instance with its own pool"
            )

    def check_budget(self, name: str, needed: int) -> None:
        """Refuse a capture that would not fit, before it is made.

        Chains of one pool run one after the other, so a capture first takes what those before it used in passing.

        Raises:
            BudgetError: with the bytes needed, used and allowed.
        """
        self.predicted_bytes = needed
        reusable = self.bytes - sum(self._held.values())
        grows = max(0, needed - max(0, reusable))
        if self.max_bytes is not None and self.bytes + grows > self.max_bytes:
            raise BudgetError(
                f"{name} needs about {needed} bytes of graph memory; {self.bytes} of {self.max_bytes} are used, "
                f"{max(0, reusable)} of them shared: "
                "raise max_bytes, use fewer or smaller buckets, or close other graphs"
            )

    @contextmanager
    def counting(self, owner: object) -> Iterator[None]:
        """Add what is reserved inside the ``with`` block to :attr:`bytes`; ``owner`` keeps what stays in use."""
        if not self._held:
            # CUDA's allocator refuses a handle whose last graph is gone (use_count > 0 in create_or_incref_pool)
            self.handle, self.bytes = self.backend.new_pool(), 0
        reserved, allocated = self.backend.reserved_bytes(), self.backend.allocated_bytes()
        yield
        self.bytes += max(0, self.backend.reserved_bytes() - reserved)
        self._held[owner] = max(0, self.backend.allocated_bytes() - allocated)

    def release(self, owner: object) -> None:
        """``owner`` closed its graphs: others may use its memory; with the last graph the pool is empty."""
        self._held.pop(owner, None)
        if not self._held:
            self.bytes = 0

    def spoil(self, tensors: Iterable[Tensor], keep: Iterable[Tensor]) -> None:
        """Fill floating-point ``tensors`` with NaN, outside of any graph, except memory that ``keep`` shares."""
        kept = {t.untyped_storage()._cdata for t in keep}
        stale = [
            t.detach() for t in tensors if t.is_floating_point() and t.untyped_storage()._cdata not in kept
        ]
        for tensor in stale:
            tensor.data.fill_(float("nan"))  # .data: the version that autograd compares does not change
