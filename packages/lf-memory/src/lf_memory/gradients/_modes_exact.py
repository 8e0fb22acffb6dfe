"""Modes that equal the ordinary loop with global clipping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ._modes import Closure, Mode, call
from ._modes_passes import Passes
from ._modes_slot import Slot
from ._modes_tensors import coefficient, norm_of, norms_of, scale, total_norm
from ._release_errors import ReleaseError

_SAME_BATCH = "the closure of two_pass must do the same work both times: read its batch outside of it"


class Exact(Mode):
    """Keeps gradients to the end, clips by their global norm, and updates and frees them chunk by chunk.

    Updates of at most `chunk_bytes` of gradients bound what the optimizer allocates: a foreach step over everything
    takes as much again as the parameters.
    """

    in_place = False

    def gradient(self, slot: Slot) -> None:
        dtype = self._kept_dtype(slot)
        if dtype is not None:
            slot.keep(dtype)
            assert slot.buffer is not None
            self.ledger.add(slot.name, slot.buffer, stays=True)

    def stays(self, slot: Slot) -> bool:
        return self._kept_dtype(slot) is None

    def finish(self) -> None:
        left = self.left()
        finite = factor = None
        self.norm = None
        if left and self._needs_norm:
            # Only now: a GradScaler unscales in place, and not even the version of a tensor tells that it did.
            norms = norms_of([slot.grad if slot.buffer is None else slot.buffer for slot in left])
            self.norm = total_norm([(slot.param, norm) for slot, norm in zip(left, norms, strict=True)])
            finite = torch.isfinite(self.norm) if self.updater.gate else None
            factor = None if self.options.clip is None else coefficient(self.options.clip, self.norm)
        if finite is not None:
            self.updater.count(finite)
        for chunk in chunks(left, self.options.chunk_bytes):
            for slot in chunk:
                slot.restore()
            if factor is not None:
                scale([slot.grad for slot in chunk], factor)
            self.updater.update(chunk, finite)

    def planned_bytes(self) -> int:
        kept = sum(slot.param.numel() and self._kept_bytes(slot) for slot in self.slots)
        widened = (
            sum(s.nbytes for s in c) for c in chunks(self.slots, self.options.chunk_bytes) if self._widens(c)
        )
        return kept + max(widened, default=0)

    @property
    def _needs_norm(self) -> bool:
        return self.options.clip is not None or self.updater.gate

    def _kept_dtype(self, slot: Slot) -> torch.dtype | None:
        if self.options.keep is not None and slot.param.dtype.itemsize > self.options.keep.itemsize:
            return self.options.keep
        if self.options.accumulate == "buffer" and slot.param.dtype.itemsize < torch.float32.itemsize:
            return torch.float32
        return None

    def _kept_bytes(self, slot: Slot) -> int:
        dtype = self._kept_dtype(slot)
        return slot.nbytes if dtype is None else slot.nbytes // slot.param.dtype.itemsize * dtype.itemsize

    def _widens(self, chunk: Sequence[Slot]) -> bool:
        return any(self._kept_dtype(slot) is not None for slot in chunk)


class TwoPass(Mode):
    """Runs forward and backward twice: for the norm, then for clipped updates within the backward.

    Gradients never live longer than in Fused. The second pass sees the generators and buffers that the first saw.

    Args:
        passes: saves and restores what a forward changes.
        args: as for Mode.

    Attributes:
        drift: relative difference of the norms of both passes, a scalar on the device; 0 if forward and backward
            are repeatable.
    """

    def __init__(self, passes: Passes, *args: Any) -> None:
        super().__init__(*args)
        self.drift: Tensor | None = None
        self._passes = passes
        self._factor: Tensor | None = None
        self._finite: Tensor | None = None
        self._running = 0

    def gradient(self, slot: Slot) -> None:
        if self._running == 0:
            raise ReleaseError(
                "a backward outside handle.step: mode two_pass runs it by handle.step(closure)"
            )
        if slot.seen > self._running:
            raise ReleaseError(
                f"{slot.name} got two gradients in one pass: the closure of two_pass runs one backward"
            )
        if slot.seen < self._running:
            raise ReleaseError(f"{slot.name} had no gradient in the first pass: {_SAME_BATCH}")
        slot.norm = norm_of(slot.grad)
        if self._running == 1:
            slot.free()
            return
        if self._factor is not None:
            scale([slot.grad], self._factor)
        self.updater.soon(slot, self._finite)

    def run(self, closure: Closure | None) -> Any:
        """Both passes; returns what `closure` returned the second time."""
        if closure is None:
            raise ValueError("mode two_pass needs handle.step(closure): it runs forward and backward twice")
        try:
            return self._both(closure)
        finally:
            self._running, self._factor, self._finite = 0, None, None

    def finish(self) -> None:
        """Nothing is left: both passes free as they go."""

    def reset(self) -> None:
        self.updater.forget()

    def _both(self, closure: Closure) -> Any:
        before = self._passes.save()
        self._running = 1
        call(closure)
        seen = [slot for slot in self.slots if slot.seen]
        if not seen:
            return None
        self._decide(seen)
        self._passes.restore(before)
        self._running = 2
        for slot in seen:
            slot.seen = 1
        loss = call(closure)
        self.updater.flush(self._finite)
        self._require_same(seen)
        self.drift = self._drift(total_norm([(slot.param, _known(slot)) for slot in seen]))
        return loss

    def _decide(self, seen: Sequence[Slot]) -> None:
        self.norm = total_norm([(slot.param, _known(slot)) for slot in seen])
        if self.options.clip is not None:
            self._factor = coefficient(self.options.clip, self.norm)
        if self.updater.gate:
            self._finite = torch.isfinite(self.norm)
            self.updater.count(self._finite)

    def _require_same(self, seen: Sequence[Slot]) -> None:
        missing = [slot.name for slot in seen if not slot.updated]
        if missing:
            raise ReleaseError(f"{missing[0]} had no gradient in the second pass: {_SAME_BATCH}")

    def _drift(self, again: Tensor) -> Tensor:
        assert self.norm is not None
        return (again - self.norm).abs() / self.norm.clamp_min(torch.finfo(self.norm.dtype).tiny)


def chunks(slots: Sequence[Slot], nbytes: int) -> Iterator[list[Slot]]:
    """Cut into runs of one param group and at most `nbytes` of gradients; a larger one is alone."""
    chunk: list[Slot] = []
    size = 0
    for slot in slots:
        if chunk and (slot.group != chunk[0].group or size + slot.nbytes > nbytes):
            yield chunk
            chunk, size = [], 0
        chunk.append(slot)
        size += slot.nbytes
    if chunk:
        yield chunk


def _known(slot: Slot) -> Tensor:
    assert slot.norm is not None
    return slot.norm
