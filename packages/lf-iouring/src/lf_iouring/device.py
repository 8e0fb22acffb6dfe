"""Batches on their way to a device: copied on a stream of their own, one batch ahead of the caller."""

import importlib
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lf_memory import Fence, HostPool, PoolError, TorchRegistrar

from ._batch import Batch, Convert, PackedBatch
from ._errors import LoaderError
from ._samples import SampleBatch
from ._transform_feed import Feed
from .engine import Array
from .transforms import TransformedBatch

Past = Callable[[int], bool]


@runtime_checkable
class Backend(Protocol):
    """A device as the loader needs it; `CudaBackend` is one, tests bring another."""

    def pin(self, memory: Array) -> Callable[[], None]:
        """Page-lock uint8 memory for the device; returns what undoes it. PoolError with the reason if refused."""

    def upload(self, slot: Sequence[Array], other: Sequence[Array]) -> tuple[list[Any], Fence]:
        """Start copying arrays to the device, on a stream of its own, and return at once.

        Arrays in `slot` lie in pinned memory that stays as it is until the fence has passed; those in `other`
        may change as soon as this returns. Returns the device's arrays, slot first, and the fence.
        """

    def hand_over(self, arrays: Sequence[Any], fence: Fence) -> None:
        """Let the stream the caller works on wait for the copies, without blocking the host."""

    def finish(self) -> None:
        """Block until every copy is done."""


class CudaBackend:
    """A CUDA device through torch. LoaderError when there is none."""

    def __init__(self, device: Any) -> None:
        torch: Any = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise LoaderError(f"device={str(device)!r}, but torch sees no CUDA device; leave device out")
        self._torch = torch
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)

    def pin(self, memory: Array) -> Callable[[], None]:
        """See Backend; cudaHostRegister."""
        registrar, address = TorchRegistrar(), memory.ctypes.data
        with self._torch.cuda.device(self._device):
            registrar.register(address, memory.nbytes)
        return lambda: registrar.unregister(address)

    def upload(self, slot: Sequence[Array], other: Sequence[Array]) -> tuple[list[Any], Fence]:
        """See Backend."""
        torch = self._torch
        host = [torch.from_numpy(array) for array in slot]
        # from pageable memory a copy would hold the host up; torch's own pinned memory remembers its readers
        host += [torch.from_numpy(array).pin_memory() for array in other]
        with torch.cuda.stream(self._stream):
            arrays = [torch.empty_like(tensor, device=self._device) for tensor in host]
            self._copy(host, arrays)
            event = torch.cuda.Event()
            event.record(self._stream)
        return arrays, _EventFence(event)

    def _copy(self, host: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Start the copies; the stream is the current one."""
        for source, target in zip(host, arrays, strict=True):
            target.copy_(source, non_blocking=True)

    def hand_over(self, arrays: Sequence[Any], fence: Fence) -> None:
        """See Backend."""
        assert isinstance(fence, _EventFence)
        stream = self._torch.cuda.current_stream(self._device)
        stream.wait_event(fence.event)
        for array in arrays:  # else the allocator could reuse the memory while this stream still reads it
            array.record_stream(stream)

    def finish(self) -> None:
        """See Backend."""
        self._stream.synchronize()


class _EventFence:
    def __init__(self, event: Any) -> None:
        self.event = event

    def query(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class DeviceFeed:
    """Between a pipeline and the caller: `fetch` gives a batch on the device and has the next one copied.

    A slot goes back to the pool when the fence of its copy has passed, never before.

    Attributes:
        copy_s: seconds the caller spent starting copies.
        copied_bytes: bytes of all copies started.
        pinned: "" or why the slots are not page-locked (copies then hold the host up, and stay correct).
    """

    def __init__(self, pipeline: Feed, backend: Backend, convert: Convert, past: Past) -> None:
        self.copy_s, self.copied_bytes, self.pinned = 0.0, 0, ""
        self._pipeline, self._backend, self._convert, self._past = pipeline, backend, convert, past
        self._ahead: tuple[Batch, list[Any], Fence] | None = None
        self._fault: tuple[int, LoaderError] | None = None
        self._unpin = self._pin(pipeline.pool)

    def fetch(self, step: int, end: int | None) -> Batch:
        """See Pipeline."""
        fault, self._fault = self._fault, None
        if fault is not None and fault[0] == step:
            raise fault[1]
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0].step != step:
            ahead = self._upload(self._pipeline.fetch(step, end))
        if not self._past(step + 1):
            self._look_ahead(step + 1, end)
        batch, arrays, fence = ahead
        self._backend.hand_over(arrays, fence)
        return batch

    def abandon(self) -> None:
        """See Pipeline. The device belongs to the parent, so nothing of it is touched."""
        self._unpin.detach()
        self._ahead = None
        self._pipeline.abandon()

    def close(self) -> None:
        """See Pipeline; waits for the copies that are under way."""
        self._ahead = None
        self._unpin()
        self._pipeline.close()

    def _pin(self, pool: HostPool) -> Any:
        try:
            unpin = self._backend.pin(pool.buffer)
        except PoolError as error:
            self.pinned = str(error)
            unpin = _nothing
        # holds the mapping until the device has let go of it, also when nobody calls close()
        return weakref.finalize(self, _let_go, self._backend, unpin, pool.buffer)

    def _look_ahead(self, step: int, end: int | None) -> None:
        try:
            self._ahead = self._upload(self._pipeline.fetch(step, end))
        except LoaderError as error:
            self._fault = (step, error)  # raised when that batch is asked for

    def _upload(self, batch: Batch) -> tuple[Batch, list[Any], Fence]:
        began = time.perf_counter()
        slot, other = batch.parts() if isinstance(batch, SampleBatch | TransformedBatch) else _parts(batch)
        if batch.lease is None:
            slot, other = [], slot + other
        arrays, fence = self._backend.upload(slot, other)
        if batch.lease is not None:
            batch.lease.fence(fence)
            batch.lease.release()
        self.copied_bytes += sum(array.nbytes for array in slot + other)
        if isinstance(batch, SampleBatch | TransformedBatch):
            moved: Batch = batch.moved(arrays, self._convert)
        else:
            moved = _moved(batch, arrays, self._convert)
        self.copy_s += time.perf_counter() - began
        return moved, arrays, fence


def backend_of(device: Any, return_type: str) -> Backend | None:
    """The backend for a `device` argument: None for None and "cpu", where batches stay as they are."""
    if device is None or str(device) == "cpu":
        return None
    if isinstance(device, Backend):
        return device
    if return_type == "numpy":
        raise LoaderError(f"return_type='numpy' and device={str(device)!r} exclude each other")
    kind = str(device).split(":")[0]
    if kind != "cuda":
        raise LoaderError(f"device={str(device)!r}: choose 'cpu', 'cuda' or 'cuda:N', or pass a Backend")
    try:
        return CudaBackend(device)
    except ImportError as error:
        raise LoaderError(f"device={str(device)!r} needs torch: pip install 'torch>=2.6'") from error


def _parts(batch: Batch) -> tuple[list[Array], list[Array]]:
    """Arrays of a numpy batch: those in its slot, the others."""
    slot = [array for array in (batch.tokens, batch.loss_mask) if array is not None]
    other: list[Array] = [np.asarray(batch._lengths)]
    if isinstance(batch, PackedBatch):
        other += [batch._borders.cu_seqlens, batch._borders.position_ids, batch._borders.segment_ids]
    return slot, other


def _moved(batch: Batch, arrays: list[Any], convert: Convert) -> Batch:
    """The same batch with what `_parts` named on the device; `ids` stay on the host."""

    def place(array: Any) -> Any:
        return convert(array) if isinstance(array, np.ndarray) else array

    rest = list(arrays)
    tokens = rest.pop(0)
    mask = None if batch.loss_mask is None else rest.pop(0)
    lengths = rest.pop(0)
    if isinstance(batch, PackedBatch):
        cu, position, segment = rest
        found = replace(
            batch._borders, lengths=lengths, cu_seqlens=cu, position_ids=position, segment_ids=segment
        )
        return PackedBatch(tokens, mask, found, batch._ids, batch.step, batch.epoch, None, place)
    return Batch(tokens, mask, lengths, batch._ids, batch.step, batch.epoch, None, place)


def _let_go(backend: Backend, unpin: Callable[[], None], memory: Array) -> None:
    backend.finish()
    unpin()
    del memory


def _nothing() -> None:
    pass
