"""Copying state into the slab, chunk by chunk, and ranges of flat bytes back into tensors of any stride and device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch

from .accelerators import DeviceEvent, queues, streams_of
from .dtypes import dtype_of
from .plan import Chunk, Plan, Stream, chunks
from .progress import Progress
from .slab import Piece, Slab

T = TypeVar("T")
# A stream takes about 1024 commands, here a copy and an event each, and then holds up the thread that gives it more: a
# forward pass would begin when most of the state is copied.
QUEUED_COPIES = 128


class Staged(NamedTuple):
    """A chunk whose bytes are in the slab once `ready` (a device event, if any) has fired."""

    chunk: Chunk
    piece: Piece
    ready: DeviceEvent | None


class SideStreams:
    """One stream per device of a plan that has streams, behind the work that the caller has queued so far."""

    def __init__(self, devices: set[torch.device]) -> None:
        self._streams: list[tuple[Any, Any]] = []  # module of the device, stream
        for device in devices:
            module = streams_of(device.type)
            stream = module.Stream(device)
            stream.wait_stream(module.current_stream(device))
            self._streams.append((module, stream))

    def run(self, work: Callable[[], T]) -> T:
        """Do `work` in the calling thread with these streams current."""
        with ExitStack() as stack:
            for module, stream in self._streams:
                # A thread begins on device 0. Going back to it by way of a stream would make a context there, some
                # hundred MB of the memory of another rank; leaving `device` does not.
                stack.enter_context(module.device(stream.device))
                stack.enter_context(module.stream(stream))
            return work()


def side_streams(plan: Plan) -> SideStreams:
    """Side streams for staging while the caller computes; made in the caller's thread."""
    tensors = (stream.source for stream in plan.streams if isinstance(stream.source, torch.Tensor))
    return SideStreams({tensor.device for tensor in tensors if queues(tensor.device)})


class Staging:
    """Copies every stream of a plan into the slab, in order, and hands each chunk on. For one thread at a time.

    Copies from a device are queued on its current stream.
    """

    def __init__(
        self,
        plan: Plan,
        slab: Slab,
        chunk_bytes: int,
        deliver: Callable[[Staged], None],
        progress: Progress,
    ) -> None:
        self._plan, self._slab, self._deliver, self._progress = plan, slab, deliver, progress
        self._left = chunks([stream.nbytes for stream in plan.streams], chunk_bytes)
        self._queued: deque[DeviceEvent] = deque()
        self._last: dict[torch.device, DeviceEvent] = {}  # a later event covers earlier ones
        self._failed: Exception | None = None

    def begin(self) -> None:
        """Copy or queue the first chunks, as many as never make the caller wait for the device.

        Its error, unless it is an interrupt, is raised by `finish`.
        """
        try:
            self._run(islice(self._left, QUEUED_COPIES))
        except Exception as error:
            self._failed = error

    def finish(self) -> list[DeviceEvent]:
        """Copy or queue what is left; the events returned, one per device, are behind its last copy."""
        if self._failed is not None:
            raise self._failed
        self._run(self._left)
        return list(self._last.values())

    def arrive(self) -> None:
        """Wait for what is queued."""
        for event in self._last.values():
            event.synchronize()

    def _run(self, some: Iterable[Chunk]) -> None:
        try:
            for chunk in some:
                self._one(chunk)
        except BaseException:
            # The next save empties the slab and fills it from another stream: what is queued must have arrived by then.
            self.arrive()
            raise

    def _one(self, chunk: Chunk) -> None:
        piece = self._slab.take(chunk.length)
        stream = self._plan.streams[chunk.stream]
        event = _copy_in(stream, chunk, self._slab, piece)
        device = stream.source.device if isinstance(stream.source, torch.Tensor) else torch.device("cpu")
        if event is not None:
            self._last[device] = event
            self._queued.append(event)
        self._deliver(Staged(chunk, piece, event))
        if chunk.start + chunk.length == stream.nbytes:
            self._progress.advance(chunk.stream, device, event)
        if len(self._queued) > QUEUED_COPIES:
            self._queued.popleft().synchronize()


def _copy_in(stream: Stream, chunk: Chunk, slab: Slab, piece: Piece) -> DeviceEvent | None:
    at = chunk.start
    for memory in slab.parts(piece):
        if isinstance(stream.source, bytes):
            memory.copy_(torch.frombuffer(bytearray(stream.source[at : at + len(memory)]), dtype=torch.uint8))
        else:
            element = stream.source.element_size()
            copy_range(memory.view(dtype_of(stream.dtype)), stream.source, at // element)
        at += len(memory)
    if isinstance(stream.source, bytes) or not queues(stream.source.device):
        return None
    module = streams_of(stream.source.device.type)
    event = module.Event()
    event.record(module.current_stream(stream.source.device))
    made: DeviceEvent = event
    return made


def copy_range(flat: torch.Tensor, tensor: torch.Tensor, begin: int, *, back: bool = False) -> None:
    """Copy elements `begin .. begin + len(flat)` of `tensor`, in row-major order, into `flat` (or the other way).

    flat: (n,) contiguous, same dtype, on the host. Strided tensors are taken row by row, so no second copy of a large
    view is made.
    """
    if tensor.dim() == 0 or tensor.is_contiguous():
        part = tensor.reshape(-1) if not back else tensor.view(-1)
        _copy(flat, part[begin : begin + flat.numel()], back)
        return
    row = tensor[0].numel()
    done = 0
    while done < flat.numel():
        index, inside = divmod(begin + done, row)
        if inside == 0 and flat.numel() - done >= row:
            count = (flat.numel() - done) // row
            target = flat[done : done + count * row].view(count, *tensor.shape[1:])
            _copy(target, tensor[index : index + count], back)
            done += count * row
        else:
            length = min(row - inside, flat.numel() - done)
            copy_range(flat[done : done + length], tensor[index], inside, back=back)
            done += length


def _copy(host: torch.Tensor, other: torch.Tensor, back: bool) -> None:
    if back:  # into a device from the slots of a ring, which keep their bytes until the copy has ended
        other.copy_(host, non_blocking=queues(other.device))
    else:
        host.copy_(other, non_blocking=queues(other.device))
