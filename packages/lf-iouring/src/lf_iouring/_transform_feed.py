"""Between a pipeline and the caller: every batch goes through a transform, here or in worker processes."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from lf_memory import HostPool, Lease

from ._batch import Batch, Convert, PackedBatch
from ._errors import LoaderError, TransformError
from ._transform_worker import MAPPED, Task, describe
from ._worker_pool import WorkerPool
from .transforms import (
    Arrays,
    OutputSpec,
    Transform,
    TransformedBatch,
    apply,
    arrays_of,
    context_of,
    failed,
    guarded,
)

Past = Callable[[int], bool]
_DERIVED = ("position_ids", "segment_ids")  # a worker computes them from the others
_SPARE_SLOTS = 2  # output slots beyond those in flight: the caller's batch, and the one it has not let go of


class Feed(Protocol):
    """What delivers batches: a pipeline, or something between it and the caller."""

    @property
    def pool(self) -> HostPool:
        """Slots that the batches lie in."""

    def fetch(self, step: int, end: int | None) -> Batch:
        """See Pipeline."""

    def abandon(self) -> None:
        """See Pipeline."""

    def close(self) -> None:
        """See Pipeline."""


@dataclass(frozen=True)
class TransformOptions:
    """The arguments of LoongDataLoader about transforms, checked together.

    Raises LoaderError when they do not fit.
    """

    transform: Transform | None
    workers: int
    output: OutputSpec | None
    seed: int

    def __post_init__(self) -> None:
        if self.transform is None and (self.workers or self.output):
            raise LoaderError("transform_workers and transform_output belong to transform")
        if self.transform is not None and not callable(self.transform):
            raise LoaderError(f"transform={self.transform!r}: it must be callable")

    @property
    def in_flight(self) -> int:
        """Batches at the workers: each has one at hand while it works on another."""
        return 2 * self.workers


class InThread:
    """Runs the transform in the thread that asks for a batch.

    Attributes:
        pool: slots that delivered batches may lie in.
        transform_s: seconds spent in the transform.
    """

    def __init__(self, source: Feed, options: TransformOptions, convert: Convert) -> None:
        self.pool, self.transform_s = source.pool, 0.0
        self._source, self._options, self._convert = source, options, convert

    def fetch(self, step: int, end: int | None) -> TransformedBatch:
        """See Pipeline; TransformError with the traceback when the transform fails."""
        batch = self._source.fetch(step, end)
        began = time.perf_counter()
        made = transformed_here(batch, self._options, self._convert)
        self.transform_s += time.perf_counter() - began
        return made

    def abandon(self) -> None:
        """See Pipeline."""
        self._source.abandon()

    def close(self) -> None:
        """See Pipeline."""
        self._source.close()


@dataclass
class _Flight:
    batch: Batch
    number: int = 0
    lease: Lease | None = None  # output slot
    arrays: Arrays = field(default_factory=dict)
    here: bool = False  # no slot was free, so it is transformed in this process


class InWorkers:
    """Has the transform run by processes, some batches ahead; delivers in order whatever their number.

    Attributes:
        pool: slots that delivered batches lie in.
        transform_s: seconds the caller waited for workers.
        overflow: batches that were transformed here because the caller held every slot.
    """

    def __init__(self, source: Feed, options: TransformOptions, convert: Convert, past: Past) -> None:
        self.transform_s, self.overflow = 0.0, 0
        self._source, self._options, self._convert, self._past = source, options, convert, past
        slots = options.in_flight + _SPARE_SLOTS
        self.pool = source.pool if options.output is None else HostPool(options.output.slot_bytes, slots)
        self._flying: deque[_Flight] = deque()
        self._workers: WorkerPool | None = self._start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._workers.pids if self._workers else []

    def fetch(self, step: int, end: int | None) -> TransformedBatch:
        """See Pipeline; TransformError with the worker's traceback, WorkerDied when a worker is gone."""
        try:
            if self._flying and self._flying[0].batch.step != step:
                self._drain()
            self._top_up(step, end)
            flight = self._flying[0]
            began = time.perf_counter()
            made = self._finish(flight)
            self.transform_s += time.perf_counter() - began
            self._flying.popleft()
            if made.lease is not flight.batch.lease:
                flight.batch.release()
            return made
        except BaseException as error:
            # Ctrl-C while waiting loses nothing; in the middle of a message it ends the workers.
            if self._workers is not None and not self._workers.alive:
                self._flying.clear()
                self._workers = None
            elif isinstance(error, LoaderError):
                self._drain()
            raise

    def abandon(self) -> None:
        """See Pipeline. The workers belong to the parent."""
        self._flying.clear()
        if self._workers is not None:
            self._workers.close()
        self._source.abandon()

    def close(self) -> None:
        """See Pipeline; ends the workers."""
        if self._workers is not None:
            self._workers.close()
        self._flying.clear()
        self._source.close()
        if self._options.output is not None:
            self.pool.close(force=True)

    def _start(self) -> WorkerPool:
        transform = self._options.transform
        assert transform is not None
        fds = [self._source.pool.fd, self.pool.fd]
        assert len(fds) == MAPPED
        return WorkerPool(transform, self._options.output, fds, self._options.workers)

    def _drain(self) -> None:
        self._flying.clear()
        if self._workers is not None:
            self._workers.forget()

    def _top_up(self, step: int, end: int | None) -> None:
        self._workers = self._workers or self._start()
        while len(self._flying) <= self._options.in_flight:
            ahead = step + len(self._flying)
            if self._flying and (self._past(ahead) or (end is not None and ahead >= end)):
                return
            try:
                batch = self._source.fetch(ahead, end)
            except LoaderError:
                if not self._flying:
                    raise
                return  # raised when that batch is asked for
            self._flying.append(self._handed_over(batch, self._workers))

    def _handed_over(self, batch: Batch, workers: WorkerPool) -> _Flight:
        flight, output = _Flight(batch), self._options.output
        flight.lease = batch.lease if output is None else self.pool.try_acquire()
        flight.arrays = arrays_of(batch)
        if batch.lease is None or flight.lease is None:
            flight.here = True
            self.overflow += batch.lease is not None  # else the pipeline has counted it
            return flight
        memory = self._source.pool.buffer
        capacity = batch.tokens.shape[1] if isinstance(batch, PackedBatch) else None
        arrays = {
            name: describe(array, memory.ctypes.data, memory.size)
            for name, array in flight.arrays.items()
            if name not in _DERIVED
        }
        out_base = flight.lease.address - self.pool.buffer.ctypes.data
        flight.number = workers.next_number()
        context = context_of(batch, self._options.seed)
        workers.submit(Task(flight.number, arrays, context, capacity, out_base), flight)
        return flight

    def _finish(self, flight: _Flight) -> TransformedBatch:
        if flight.here:
            return transformed_here(flight.batch, self._options, self._convert)
        assert self._workers is not None
        done = self._workers.wait(flight.number)
        if done.error is not None:
            raise TransformError(flight.batch.step, done.error)
        arrays, output = flight.arrays, self._options.output
        if output is not None and done.shapes is not None and flight.lease is not None:
            arrays = {
                out.name: flight.lease.view(shape, out.dtype, out.offset)
                for out, shape in zip(output.fields, done.shapes, strict=True)
            }
        return TransformedBatch(arrays, flight.batch, flight.lease, self._convert)


def transformed_here(batch: Batch, options: TransformOptions, convert: Convert) -> TransformedBatch:
    """Run the transform of `options` on a batch in this process; TransformError with its traceback."""
    assert options.transform is not None
    arrays = arrays_of(batch)
    try:
        result = apply(
            options.transform, guarded(arrays), context_of(batch, options.seed), options.output, copies=False
        )
    except Exception as error:
        raise failed(batch.step) from error
    return TransformedBatch(arrays if result is None else result, batch, batch.lease, convert)


def feed_through(source: Feed, options: TransformOptions, convert: Convert, past: Past) -> Feed:
    """`source`, with a transform behind it where there is one."""
    if options.transform is None:
        return source
    if options.workers == 0:
        return InThread(source, options, convert)
    return InWorkers(source, options, convert, past)
