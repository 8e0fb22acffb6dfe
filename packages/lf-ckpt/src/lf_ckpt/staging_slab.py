"""The staging slab of a store: made at the first save, or ahead of it, and again when the state has outgrown it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future

import torch

from .free_memory import available_memory
from .sizing import choose_slab
from .slab import Slab

_log = logging.getLogger("lf_ckpt")


class StagingSlab:
    """At most one slab at a time; `fit` and `close` only between saves."""

    def __init__(self, path: str, asked: int | None, letting_go: Callable[[], None]) -> None:
        """path: of the store, for the log. asked: `slab_bytes`. letting_go: called before a slab's memory is freed."""
        self._path, self._asked, self._letting_go = path, asked, letting_go
        self._slab: Slab | None = None
        self._early: Future[None] | None = None
        self.note = ""

    def expect(self, state_bytes: int, thread: Executor) -> None:
        """Make the slab in the background, page-locked for the device of the calling thread if CUDA is in use."""
        pinned = torch.cuda.is_available() and torch.cuda.is_initialized()
        # Of this thread; others begin on device 0.
        device = torch.cuda.current_device() if pinned else None
        self._early = thread.submit(self._fit_early, state_bytes, device)

    def fit(self, state_bytes: int, pinned: bool) -> Slab:
        """The slab, empty."""
        if self._early is not None:
            self._early.exception()  # an allocation that failed is tried again, and raised, here
            self._early = None
        slab = self._fit(state_bytes, pinned)
        slab.reset()
        return slab

    def close(self) -> None:
        """Free it. Idempotent."""
        if self._slab is not None:
            self._letting_go()
            self._slab.close()
        self._slab = None

    def _fit_early(self, state_bytes: int, device: int | None) -> None:
        with torch.cuda.device(device) if device is not None else contextlib.nullcontext():
            self._fit(state_bytes, device is not None)

    def _fit(self, state_bytes: int, pinned: bool) -> Slab:
        held = self._slab.size if self._slab is not None else 0
        # One that holds the whole state is right whatever is free; reading that takes a millisecond of every stall.
        free = available_memory() if held < state_bytes else None
        size, note = choose_slab(state_bytes, self._asked, None if free is None else free + held)
        if self._slab is None or (size > held and held < state_bytes):
            self.close()  # the old one goes first, so that both are never held
            self._slab = Slab(size, pinned)
            self.note = note
            _log.info("%s: staging slab: %s", self._path, note)
        elif pinned and not self._slab.memory.pinned:
            self._slab.memory.lock()
        return self._slab
