"""One memory pool for many graphs, with a byte budget and a record of whose tensors lie in it now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lf_graph._backend import Backend
from lf_graph._errors import BudgetError, StaleReplayError


class GraphPool:
    """Memory shared by graphs of which one chain (forward, then backward) is in flight at a time.

    Attributes:
        max_bytes: budget for everything captured here; None for no limit.
        bytes: device memory taken by captures so far (0 on the recorder).
        predicted_bytes: what the warm-up of the last capture needed at its peak, known before capturing.
    """

    def __init__(self, backend: Backend, max_bytes: int | None = None) -> None:
        self.backend, self.max_bytes = backend, max_bytes
        self.handle: Any = backend.new_pool()
        self.bytes = 0
        self.predicted_bytes = 0
        self._holder: object | None = None

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

        Raises:
            BudgetError: with the bytes needed, used and allowed.
        """
        self.predicted_bytes = needed
        if self.max_bytes is not None and self.bytes + needed > self.max_bytes:
            raise BudgetError(
                f"{name} needs about {needed} bytes of graph memory; {self.bytes} of {self.max_bytes} are used: "
                "raise max_bytes, use fewer or smaller buckets, or close other graphs"
            )

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add what is reserved inside the ``with`` block to :attr:`bytes`."""
        before = self.backend.reserved_bytes()
        yield
        self.bytes += max(0, self.backend.reserved_bytes() - before)
