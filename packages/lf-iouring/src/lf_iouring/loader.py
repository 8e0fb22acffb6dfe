"""LoongDataLoader: checked, bucketed, deterministic batches from an lf-format data set."""

import functools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

from lf_memory import HostPool, PoolError

from ._batch import Batch, converter, token_rows
from ._cores import bound_to, cores_for, engine_threads
from ._depth import depth_of
from ._errors import LoaderError, StateError
from ._layout import SlotLayout
from ._packed import MAX_PREFETCH, PackedPipeline
from ._pipeline import Pipeline
from ._sources import AnyPlan, Joined, make_plan, plan_of, sources_of
from ._stats import LoaderInfo, LoaderStats
from ._transform_feed import Feed, InThread, InWorkers, TransformOptions, feed_through
from .device import DeviceFeed, backend_of
from .engine import MAX_FLYING, Counters, choose
from .mixing import Weight
from .pack_plan import PackPlan
from .transforms import OutputSpec, Transform

__all__ = ["LoongDataLoader", "engine_threads", "plan_of"]

# Beyond the batches read ahead: the one the caller works on, and the one it has not let go of yet.
_SPARE_SLOTS = 3


class LoongDataLoader:
    """Iterable over the batches of one rank, in an order that depends on data set and seed alone.

    Args:
        dataset: as returned by `lf_format.open_dataset`.
        datasets, weights: instead of `dataset`, several with the same vocabulary and fields, and their exact
            weights (default: equal), see Mixture. Without `pack` a batch comes from one of them and weights
            count batches; with it weights count records. `ids` count through the data sets in order.
        global_batch: rows of a batch over all ranks; must divide by world_size.
        seed: names the order.
        rank, world_size: this process among those that train together.
        shuffle: False reads bucket by bucket in the order of the ids.
        shuffle_block_size: records that stay neighbours when shuffled, so that a coded block is decoded once and
            not for every record it holds; eight such blocks are shuffled together. 0 shuffles all records freely.
            None is 0 for raw blocks and for coded ones of at most 128 MiB decoded, else as many as 8 MiB hold.
        engine: "auto" (io_uring, else pread, else Python, with the reason in `info()`), or one of
            "io_uring", "pread", "python" and nothing else.
        io: "mapped" copies what is in the page cache from mappings of the files, "buffered" reads through the page
            cache, "direct" past it (O_DIRECT); "auto" is mapped up to a quarter of the memory, and direct where the
            data set is larger than the page cache can be, with the reason in `info()`.
        queue_depth: reads in flight a thread at most, 1 to 4096; 32 to 64 saturate an NVMe.
        polling: "sqpoll" has a thread of the kernel look for reads to start, "iopoll" asks the device instead of
            waiting for interrupts. Both burn processor time and seldom pay. A wish: each ring proves it with a read
            of the data set, and goes without where that fails, with the reason in `info()`.
        num_workers: threads that read; 0 means the cores of this process over the ranks of this host
            (LOCAL_WORLD_SIZE), less one for the trainer. No worker processes are started.
        pin_threads: bind these threads to cores: True takes the last ones of this rank's share (LOCAL_RANK of
            LOCAL_WORLD_SIZE), or the cores themselves.
        prefetch_factor: batches read ahead. "auto" or 0 follows the waits: deeper while steps wait and depth
            helps, one batch less after long calm; from 2 to 32 batches or 256 MiB of slots, which are there from
            the start.
        epochs: passes over the data set; None is endless.
        return_type: "torch", "numpy", or "auto" for torch where it is installed.
        hugepages: see lf_memory.HostPool.
        verify: check the hash of every record (and of every coded block).
        fields: names of the fields to deliver; None for all. The others are read for the record's hash alone.
        deltas: steps in time by field name, of samples that follow each other in their episode: {"camera": [-1, 0]}
            gives every sample the frame before it and its own, [rows, 2, h, w, c]. Beyond an episode's end its last
            record stands in.
        cache_bytes: decoded blocks kept for rows to come; only for data sets with coded blocks.
        pack: tokens of a row into which whole documents are packed (see PackPlan); the loader then yields
            PackedBatch. None pads every record to a row of its own.
        pack_window: records packed together; None chooses.
        device: "cuda" or "cuda:N" copies every batch there, one batch ahead, from page-locked slots on a stream
            of its own; all of a batch but `ids` is then on the device. None and "cpu" leave batches as they
            are. A Backend of your own is taken as it is.
        transform: f(arrays, context) on the numpy arrays of every batch, by name; it changes tokens and loss_mask
            in place and returns None, or returns a dict of arrays. The loader then yields TransformedBatch. See
            TransformContext for its random numbers.
        transform_workers: processes that run it, made by spawn; 0 runs it in the thread that asks for batches.
        transform_output: name to (shape, dtype) or to an example array, of what it returns; needed with workers.

    A loader is its own iterator and goes on where it stopped; after the last epoch the next `iter` starts
    again at step 0. Threads may share it: each batch is delivered once. After fork the child goes on from
    the same position with an engine of its own; it does not pickle (make it in the spawned process).

    Raises PlanError, EngineError or LoaderError for arguments that do not fit, lf_memory.PoolError if there
    is no memory for the slots.
    """

    def __init__(
        self,
        dataset: Any = None,
        *,
        global_batch: int,
        datasets: Sequence[Any] | None = None,
        weights: Sequence[Weight] | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        shuffle_block_size: int | None = None,
        engine: str = "auto",
        io: str = "auto",
        queue_depth: int = 64,
        polling: str = "off",
        num_workers: int = 0,
        pin_threads: bool | Sequence[int] = False,
        prefetch_factor: int | str = 4,
        epochs: int | None = None,
        return_type: str = "auto",
        hugepages: str = "auto",
        verify: bool = True,
        fields: Sequence[str] | None = None,
        deltas: Mapping[str, Sequence[int]] | None = None,
        cache_bytes: int = 256 << 20,
        pack: int | None = None,
        pack_window: int | None = None,
        device: Any = None,
        transform: Transform | None = None,
        transform_workers: int = 0,
        transform_output: Mapping[str, Any] | None = None,
    ) -> None:
        sources = sources_of(dataset, datasets, weights)
        if shuffle_block_size is not None:
            _in_range("shuffle_block_size", shuffle_block_size, 0)
        if pack is not None:
            _in_range("pack", pack, 0)
            if fields is not None or deltas:
                raise LoaderError(
                    "fields= and deltas= do not go with pack=, which lays tokens and their loss mask"
                )
        self.plan = make_plan(
            sources, weights, global_batch=global_batch, seed=seed, shuffle=shuffle, block=shuffle_block_size,
            pack=pack, pack_window=pack_window,
        )  # fmt: skip
        self._rows = self.plan.rank_rows(rank, world_size)
        self._dataset = sources[0] if len(sources) == 1 else Joined(sources)
        self._layout = SlotLayout(self._dataset, fields, deltas)
        self._engine_name = engine
        self._io = io
        self._depth = _in_range("queue_depth", queue_depth, 1, 4096)
        self._polling = polling
        most = MAX_FLYING - 1
        if isinstance(self.plan, PackPlan):
            self._packed_rows = token_rows(self._dataset, self._rows.stop - self._rows.start)
            most = MAX_PREFETCH
        self._ahead = depth_of(prefetch_factor, self._slot_bytes(), most)
        self._threads, self._threads_reason = engine_threads(
            _in_range("num_workers", num_workers, 0), self._ahead.bounds[1]
        )
        self._cores = cores_for(pin_threads, self._threads)
        self._epochs = None if epochs is None else _in_range("epochs", epochs, 1)
        self._convert = converter(return_type)
        self._backend = backend_of(device, return_type)
        self._transform = TransformOptions(
            transform,
            _in_range("transform_workers", transform_workers, 0),
            None if transform_output is None else OutputSpec(transform_output),
            seed,
        )
        self._hugepages = hugepages
        self._verify = bool(verify)
        self._cache_bytes = _in_range("cache_bytes", cache_bytes, 0)
        self._lock = threading.Lock()
        self._step = 0
        self._started = self._exhausted = self._closed = False
        self._pid = os.getpid()
        self._pipeline = self._open()
        self._feed = self._feed_of()

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one pass; the last one to be filled may hold empty rows.

        LoaderError for packed rows, whose number differs from pass to pass.
        """
        if isinstance(self.plan, PackPlan):
            raise LoaderError("packed epochs differ in length; epochs=... ends where they do")
        return self.plan.steps_per_epoch

    @property
    def step(self) -> int:
        """Batches delivered since the start of epoch 0, which is the number of the next one."""
        return self._step

    def __len__(self) -> int:
        """Batches of all epochs; TypeError when endless or packed."""
        end = self._end
        if end is None:
            raise TypeError("an endless or packing loader has no length; see steps_per_epoch")
        return end

    def __iter__(self) -> Iterator[Batch]:
        self._require_open()
        if self._exhausted:
            self._exhausted = False
            self._step = 0
        self._started = True
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises DataError naming file, record and offset when a record is not as written (calling again tries
        it again), LoaderError when closed.
        """
        with self._lock:
            self._require_open()
            self._follow_fork()
            self._started = True
            if _past(self.plan, self._epochs, self._step):
                self._exhausted = True
                raise StopIteration
            batch = self._feed.fetch(self._step, self._end)
            self._step += 1
            return batch

    def state_dict(self) -> dict[str, Any]:
        """Position after the delivered batches: JSON, below 1 KiB, the same on every rank.

        Batches read ahead do not count. Any rank of any world size and thread count can resume from it.
        """
        return self.plan.state(self._step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that a state counts.

        Raises StateError naming what differs when the state is of another data set or plan, and when
        iteration has begun (batches of the old position may be in use by then).
        """
        if self._started:
            raise StateError("load_state_dict comes before the first iter() or next(); make a new loader")
        self._step = self.plan.check_state(state)

    def set_step(self, step: int) -> None:
        """Make `step` (>= 0) the next batch; allowed at any time, costs the batches read ahead."""
        with self._lock:
            self._step = _in_range("step", step, 0)
            self._exhausted = False

    def stats(self) -> LoaderStats:
        """Counters and times; see LoaderStats."""
        pipeline, info = self._pipeline, self._pipeline.engine.info()
        counters: Counters = pipeline.engine.counters()
        stats = LoaderStats(
            batches=pipeline.batches,
            tokens=pipeline.tokens,
            wait_s=pipeline.wait_s,
            plan_s=pipeline.plan_s,
            overflow=pipeline.overflow
            + (self._through.overflow if isinstance(self._through, InWorkers) else 0),
            engine=info.name,
            reason=info.reason,
            pages=pipeline.pool.pages,
            slots=pipeline.pool.slots,
            copy_s=self._feed.copy_s if isinstance(self._feed, DeviceFeed) else 0.0,
            copied_bytes=self._feed.copied_bytes if isinstance(self._feed, DeviceFeed) else 0,
            prefetch=self._ahead.value,
            prefetch_changes=self._ahead.changes,
            transform_s=self._through.transform_s if isinstance(self._through, InThread | InWorkers) else 0.0,
            **asdict(counters),
        )
        return pipeline.stats(stats) if isinstance(pipeline, PackedPipeline) else stats

    def info(self) -> LoaderInfo:
        """How the loader is set up, with reasons; see LoaderInfo."""
        pool = self._pipeline.pool
        return LoaderInfo(
            engine=self._pipeline.engine.info(),
            threads_reason=self._threads_reason,
            cores=self._cores,
            pages=pool.pages,
            pages_reason=pool.stats().reason,
            slots=pool.slots,
            slot_bytes=pool.slot_bytes,
            prefetch_bounds=self._ahead.bounds,
            prefetch_reason=self._ahead.origin,
            records=self.plan.records,
            steps_per_epoch=0 if isinstance(self.plan, PackPlan) else self.plan.steps_per_epoch,
            fingerprint=self.plan.fingerprint,
            notes=_notes(self._feed),
        )

    def close(self) -> None:
        """Stop the threads and give the memory up. Batches in use stay valid. Harmless when repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if os.getpid() == self._pid:
                self._feed.close()
            else:
                self._feed.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a LoongDataLoader has threads and does not pickle: make it in the new process")

    @property
    def _end(self) -> int | None:
        """The step to stop before, where it is known without packing."""
        if self._epochs is None or isinstance(self.plan, PackPlan):
            return None
        return self._epochs * self.plan.steps_per_epoch

    def _open(self) -> Pipeline | PackedPipeline:
        plain = self._backend is None and self._transform.transform is None
        convert = self._convert if plain else converter("numpy")
        slots = self._ahead.bounds[1] + _SPARE_SLOTS + self._transform.in_flight
        try:
            pool = HostPool(self._slot_bytes(), slots, self._hugepages)
        except PoolError as error:
            if error.needed is not None:
                error.args = (f"{error}{self._layout.outlier()}",)
            raise
        with bound_to(self._cores):
            engine = choose(
                self._engine_name, self._threads, pool.buffer, self._dataset,
                io=self._io, depth=self._depth, cache_bytes=self._cache_bytes, polling=self._polling,
            )  # fmt: skip
        if isinstance(self.plan, PackPlan):
            return PackedPipeline(
                self._dataset, self.plan, self._rows, self._packed_rows, pool, engine, convert,
                verify=self._verify, depth=self._ahead, epochs=self._epochs,
            )  # fmt: skip
        return Pipeline(
            self._dataset, self.plan, self._rows, self._layout, pool, engine, convert,
            verify=self._verify, depth=self._ahead,
        )  # fmt: skip

    def _slot_bytes(self) -> int:
        edge = max(self.plan.buckets)
        if isinstance(self.plan, PackPlan):
            return self._packed_rows.slot_bytes(edge)
        return max(1, self._layout.slot_bytes(self._rows.stop - self._rows.start, edge))

    def _feed_of(self) -> Feed | DeviceFeed:
        past = functools.partial(_past, self.plan, self._epochs)
        convert = self._convert if self._backend is None else converter("numpy")
        self._through = feed_through(self._pipeline, self._transform, convert, past)
        if self._backend is None:
            return self._through
        return DeviceFeed(self._through, self._backend, self._convert, past)

    def _follow_fork(self) -> None:
        """A forked child has none of the threads, and the parent goes on writing the shared slots."""
        if os.getpid() != self._pid:
            if self._backend is not None:
                raise LoaderError("a device cannot be used after fork; make the loader in the child")
            self._feed.abandon()
            self._pid = os.getpid()
            self._pipeline = self._open()
            self._feed = self._feed_of()

    def _require_open(self) -> None:
        if self._closed:
            raise LoaderError("the loader is closed")


def _past(plan: AnyPlan, epochs: int | None, step: int) -> bool:
    """Whether a step lies behind the last epoch."""
    if epochs is None:
        return False
    if isinstance(plan, PackPlan):
        return plan.epoch(step) >= epochs
    return step >= epochs * plan.steps_per_epoch


def _in_range(name: str, value: Any, low: int, high: int | None = None) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        limits = f">= {low}" if high is None else f"in {low}..{high}"
        raise LoaderError(f"{name}={value!r}: it must be an integer {limits}")
    return value


def _notes(feed: object) -> tuple[str, ...]:
    notes = []
    if isinstance(feed, DeviceFeed) and feed.pinned:
        notes.append(f"slots are not page-locked: {feed.pinned}")
    mode = os.environ.get("LOONGFORGE_NCCL_BARRIER_MODE")
    if mode is not None:
        notes.append(f"LOONGFORGE_NCCL_BARRIER_MODE={mode}: no effect; the C code uses C11 acquire/release")
    return tuple(notes)
