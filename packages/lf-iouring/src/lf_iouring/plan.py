"""Which records a step reads: a pure function of (plan, step), without I/O and without history."""

import hashlib
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._block_order import BlockOrder
from ._errors import PlanError, StateError
from ._permute import MAX_N, Ids, permute
from ._runs import BucketRuns

STATE_VERSION = 1
_BATCH_STREAM = 1 << 32  # apart from the streams of the buckets, which are their numbers


@dataclass(frozen=True, eq=False)
class BatchSpec:
    """One global batch.

    Attributes:
        step: number of the batch since the start of epoch 0.
        epoch: pass over the data set the batch belongs to.
        bucket_edge: length in tokens that every row is padded to.
        ids: int64[global_batch] record ids; -1 marks an empty row.
    """

    step: int
    epoch: int
    bucket_edge: int
    ids: Ids


@dataclass(frozen=True, eq=False)
class Window:
    """Consecutive batches: `epoch` and `edge` int64[k], `ids` int64[k, rows]."""

    first_step: int
    epoch: Ids
    edge: Ids
    ids: Ids


class BatchPlan(ABC):
    """What a plan of numbered batches has whatever its order; subclasses set the attributes."""

    buckets: tuple[int, ...]
    global_batch: int
    seed: int
    shuffle: bool
    fingerprint: str
    records: int
    steps_per_epoch: int

    @abstractmethod
    def window(self, first_step: int, count: int, rows: slice = slice(None)) -> Window:
        """`count` consecutive batches at once, or only some rows of each; much cheaper than one by one."""

    def batch(self, step: int) -> BatchSpec:
        """The batch of a step (>= 0, endless: epochs follow each other)."""
        window = self.window(step, 1)
        return BatchSpec(step, int(window.epoch[0]), int(window.edge[0]), window.ids[0])

    def rank_rows(self, rank: int, world: int) -> slice:
        """The rows of a global batch that belong to a rank. PlanError if the batch does not divide."""
        return rank_rows(self.global_batch, rank, world)

    def state(self, step: int) -> dict[str, Any]:
        """Position after `step` delivered batches, for JSON; below 1 KiB and the same on every rank."""
        params = {"shuffle": self.shuffle, "records": self.records, "buckets": digest(self.buckets)}
        return {
            "version": STATE_VERSION,
            "step": int(step),
            "seed": self.seed,
            "global_batch": self.global_batch,
            "epoch": int(step) // self.steps_per_epoch,
            "fingerprint": self.fingerprint,
            "params": params | self._params(),
        }

    def check_state(self, state: Mapping[str, Any]) -> int:
        """The step a state stands for; StateError naming what differs if it is not of this plan."""
        step = counter(state, "step")
        require_same(state, self.state(step))
        return step

    @abstractmethod
    def _params(self) -> dict[str, Any]:
        """What else names the order."""


class Plan(BatchPlan):
    """The order of all records for every epoch.

    Each epoch permutes the records of every bucket, cuts full batches from it, and permutes the batches.
    What a bucket cannot fill rolls on, in order, into batches padded to the next larger edge; the last such
    batch is filled with empty rows. So every record appears exactly once an epoch, and a step costs O(batch)
    whatever the number of records.

    Args:
        lengths: int[n] record lengths in tokens, or None if they need no check against the edges.
        bucket_of: int[n] bucket number of each record, or the BucketRuns of it, which needs memory for its runs
            only; None when there is one bucket.
        buckets: ascending edges in tokens; a record of bucket b has at most buckets[b] tokens.
        global_batch: rows of a batch over all ranks.
        seed: names the order.
        shuffle: False reads bucket by bucket in the order of the ids.
        fingerprint: name of the data set's content, kept in the state.
        records: number of records when `lengths` and `bucket_of` are both None.
        shuffle_block_size: records of a bucket that stay neighbours, see BlockOrder; 0 shuffles all of them freely.

    Raises PlanError for arguments that fit no order.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike | None,
        bucket_of: npt.ArrayLike | BucketRuns | None,
        buckets: Sequence[int],
        global_batch: int,
        seed: int,
        shuffle: bool = True,
        fingerprint: str = "",
        records: int | None = None,
        shuffle_block_size: int = 0,
    ) -> None:
        sizes = None if lengths is None else np.asarray(lengths)
        runs = (
            bucket_of if bucket_of is None or isinstance(bucket_of, BucketRuns) else BucketRuns.of(bucket_of)
        )
        self.buckets = tuple(int(edge) for edge in buckets)
        self.global_batch = whole("global_batch", global_batch)
        self.seed = whole("seed", seed)
        self.shuffle = bool(shuffle)
        self.fingerprint = str(fingerprint)
        self.records = _count(sizes, runs, records)
        _check(self, sizes, runs)
        self._runs = runs or BucketRuns([self.records], [0])
        self._sizes = self._runs.sizes(len(self.buckets))
        full = self._sizes // self.global_batch
        # Batches are numbered: full ones bucket by bucket, then those made of leftovers.
        self._full_ends = np.cumsum(full)
        self._left_starts = full * self.global_batch
        self._left_ends = np.cumsum(self._sizes - self._left_starts)
        self._leftovers = int(self._left_ends[-1])
        self.steps_per_epoch = int(self._full_ends[-1]) - -self._leftovers // self.global_batch
        self.shuffle_block_size = int(shuffle_block_size) if self.shuffle else 0
        self._blocks = None
        if self.shuffle_block_size:
            self._blocks = BlockOrder(self._sizes, self.global_batch, self.shuffle_block_size, self.seed)

    def window(self, first_step: int, count: int, rows: slice = slice(None)) -> Window:
        """See BatchPlan."""
        if first_step < 0 or count < 0:
            raise PlanError(f"step {first_step}, count {count}: both must be >= 0")
        steps = np.arange(first_step, first_step + count, dtype=np.int64)
        epochs, places = np.divmod(steps, self.steps_per_epoch)
        columns = np.arange(self.global_batch, dtype=np.int64)[rows]
        edge = np.empty(count, np.int64)
        ids = np.empty((count, len(columns)), np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1) if count else ():
            at = np.flatnonzero(epochs == epoch)
            edge[at], ids[at] = self._epoch_batches(epoch, places[at], columns)
        return Window(first_step, epochs, edge, ids)

    def rank_slice(self, spec: BatchSpec, rank: int, world: int) -> Ids:
        """Rows of one rank, int64[global_batch / world]: contiguous, in rank order."""
        return spec.ids[self.rank_rows(rank, world)]

    def _params(self) -> dict[str, Any]:
        return {"shuffle_block_size": self.shuffle_block_size} if self.shuffle_block_size else {}

    def _epoch_batches(self, epoch: int, places: Ids, columns: Ids) -> tuple[Ids, Ids]:
        """Edges int64[k] and ids int64[k, columns] of the batches at `places` of an epoch."""
        if self._blocks is None:
            numbers = self._shuffled(places, self.steps_per_epoch, epoch, _BATCH_STREAM)
        else:
            numbers = self._blocks.numbers(places, epoch)
        edge_bucket, buckets, positions = self._positions(numbers, columns)
        ids = np.full(positions.shape, -1, np.int64)
        for bucket in np.flatnonzero(np.bincount(buckets[buckets >= 0])).tolist():
            chosen = buckets == bucket
            if self._blocks is None:
                order = self._shuffled(positions[chosen], int(self._sizes[bucket]), epoch, bucket)
            else:
                order = self._blocks.records(bucket, positions[chosen], epoch)
            ids[chosen] = self._runs.ids(bucket, order)
        return np.array(self.buckets, np.int64)[edge_bucket], ids

    def _positions(self, numbers: Ids, columns: Ids) -> tuple[Ids, Ids, Ids]:
        """The bucket whose edge a batch has, int64[k]; bucket and position of each row, int64[k, columns].

        Positions count through the permutation of the row's bucket; a bucket of -1 marks an empty row.
        """
        full = int(self._full_ends[-1])
        bucket = np.searchsorted(self._full_ends, numbers, side="right")
        bucket = np.minimum(bucket, len(self.buckets) - 1)
        before = self._full_ends[bucket] - self._left_starts[bucket] // self.global_batch
        positions = ((numbers - before) * self.global_batch)[:, None] + columns
        buckets = np.repeat(bucket[:, None], len(columns), axis=1)
        rest = numbers >= full
        if rest.any():
            start = (numbers[rest] - full) * self.global_batch
            buckets[rest], positions[rest] = self._leftover_positions(start[:, None] + columns)
            # the last filled row comes from the batch's largest bucket
            last = np.minimum(start + self.global_batch, self._leftovers) - 1
            bucket[rest] = np.searchsorted(self._left_ends, last, side="right")
        return bucket, buckets, positions

    def _leftover_positions(self, place: Ids) -> tuple[Ids, Ids]:
        """The same for places in the epoch's list of leftovers."""
        empty = place >= self._leftovers
        bucket = np.searchsorted(self._left_ends, np.where(empty, 0, place), side="right")
        sizes = self._sizes[bucket] - self._left_starts[bucket]
        inside = place - (self._left_ends[bucket] - sizes)
        return np.where(empty, -1, bucket), self._left_starts[bucket] + inside

    def _shuffled(self, positions: Ids, n: int, epoch: int, stream: int) -> Ids:
        if not self.shuffle:
            return positions
        return permute(positions, n, seed=self.seed, epoch=epoch, stream=stream)


def whole(name: str, value: Any) -> int:
    """`value` as an int; PlanError for anything that is not an integer."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise PlanError(f"{name}={value!r}: it must be an integer")


def rank_rows(global_batch: int, rank: int, world: int) -> slice:
    """The rows of a global batch that belong to a rank. PlanError if the batch does not divide."""
    if world < 1 or not 0 <= rank < world:
        raise PlanError(f"rank {rank} of world size {world}")
    if global_batch % world:
        raise PlanError(f"global batch {global_batch} does not divide by world size {world}")
    rows = global_batch // world
    return slice(rank * rows, (rank + 1) * rows)


def counter(state: Mapping[str, Any], name: str) -> int:
    """An integer >= 0 of a saved state; StateError if there is none."""
    value = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise StateError(f"not a loader state: it has no {name} >= 0")
    return value


def require_same(state: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """StateError naming every entry of `here` that a saved state has otherwise."""
    differs = {k: (state.get(k), v) for k, v in here.items() if state.get(k) != v}
    if differs:
        parts = "; ".join(f"{k}: saved {saved!r}, here {now!r}" for k, (saved, now) in differs.items())
        raise StateError(f"the state belongs to another plan or data set: {parts}", differs)


def _count(lengths: Any, runs: BucketRuns | None, records: int | None) -> int:
    given = set() if lengths is None else {len(lengths)}
    given |= set() if runs is None else {runs.records}
    given |= {records} if records is not None else set()
    if len(given) != 1:
        raise PlanError(f"number of records unknown or contradictory: {sorted(given)}")
    return int(given.pop())


def _check(plan: Plan, lengths: Any, runs: BucketRuns | None) -> None:
    edges = plan.buckets
    if not edges or edges[0] < 1 or any(a >= b for a, b in itertools.pairwise(edges)):
        raise PlanError(f"buckets {edges}: edges must be positive and ascending")
    if plan.global_batch < 1:
        raise PlanError(f"global_batch={plan.global_batch}: it must be at least 1")
    if not 1 <= plan.records <= MAX_N:
        raise PlanError("the data set is empty" if plan.records < 1 else "too many records")
    if runs is None and len(edges) > 1:
        raise PlanError(f"{len(edges)} buckets need bucket_of")
    if runs is not None and runs.highest >= len(edges):
        raise PlanError(f"bucket_of must lie in 0..{len(edges) - 1}")
    if lengths is not None:
        _check_lengths(edges, lengths, runs or BucketRuns([plan.records], [0]))


def _check_lengths(edges: tuple[int, ...], lengths: Any, runs: BucketRuns) -> None:
    over = runs.over(lengths, edges)
    if over is not None:
        raise PlanError(f"record {over} has {int(lengths[over])} tokens, more than the edge of its bucket")


def digest(buckets: tuple[int, ...]) -> str:
    return hashlib.blake2b(repr(buckets).encode(), digest_size=8).hexdigest()
