"""Which packed rows a step reads: windows of draws, each packed on its own and computable on its own."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ._errors import PlanError, StateError
from ._permute import Ids, permute
from .mixing import Mixture
from .packing import Packing, arrange, first_fit
from .plan import STATE_VERSION, counter, rank_rows, require_same

# Apart from the streams of length buckets (their numbers) and of batches (1 << 32), see plan.py.
_DRAW_STREAM = 1 << 33
_ROW_STREAM = 1 << 34
# The last batch of a window is half empty on average: 0.5 / 64 = 0.8 % of the rows.
_WINDOW_BATCHES = 64
_MAX_WINDOW = 1 << 16  # draws; packs in well under a second
_CACHED = 3  # packed windows kept; a batch at a border and the state after it need two


@dataclass(frozen=True, eq=False)
class PackedSpec:
    """Some rows of one packed batch.

    Attributes:
        step, epoch: of the batch.
        ids: int64[s] record id of each segment.
        segments: where they lie; `item` indexes nothing here.
    """

    step: int
    epoch: int
    ids: Ids
    segments: Packing


class _Window(NamedTuple):
    packing: Packing
    ids: Ids
    batches: int


class PackPlan:
    """The order of packed rows, for any number of sources.

    Draw n of the mixture is a source and its next record, in that source's permutation of its own pass. An
    epoch is as many draws as there are records; it is cut into windows of nearly equal numbers of draws. Each
    window is packed by first-fit decreasing, its rows are permuted and cut into batches, the last one filled
    with empty rows. A batch is a pure function of (seed, window, batch in the window), which the state names;
    how many batches a window gives is known once it is packed, so a far jump by step number alone packs all
    windows on its way.

    Args:
        lengths: int[n] record lengths of each source.
        mixture: exact weights of the sources.
        capacity: tokens of a row.
        global_batch: rows of a batch over all ranks.
        seed, shuffle, fingerprint: as for Plan; without shuffling rows follow their first records.
        window: draws of a window; None chooses about 64 batches, at most 65,536 draws.

    Attributes:
        pack_s: seconds spent packing windows so far.

    Threads may share a plan. Raises PlanError for arguments that fit no order.
    """

    def __init__(
        self, lengths: Sequence[npt.NDArray[Any]], mixture: Mixture, capacity: int, global_batch: int, seed: int,
        shuffle: bool = True, fingerprint: str = "", window: int | None = None,
    ) -> None:  # fmt: skip
        self.buckets = (int(capacity),)
        self.global_batch, self.seed, self.shuffle = int(global_batch), int(seed), bool(shuffle)
        self.fingerprint = str(fingerprint)
        self._mixture = mixture
        self._lengths = list(lengths)
        self._sizes = [len(sizes) for sizes in self._lengths]
        self._first = np.concatenate(([0], np.cumsum(self._sizes)))
        self.records = int(self._first[-1])
        tokens = [int(np.sum(sizes, dtype=np.int64)) for sizes in self._lengths]
        _check(self, tokens, window)
        mean = sum(tokens) / self.records
        self.window_draws = window or _automatic(capacity * global_batch * _WINDOW_BATCHES / mean)
        self.windows_per_epoch = max(1, round(self.records / self.window_draws))
        self.pack_s = 0.0
        self._lock = threading.RLock()
        self._packed: OrderedDict[int, _Window] = OrderedDict()
        # (first step, window) of those passed last: small steps back are cheap, far ones begin at the start
        self._passed: deque[tuple[int, int]] = deque([(0, 0)], 64)

    @property
    def capacity(self) -> int:
        """Tokens of a row."""
        return self.buckets[0]

    def batch(self, step: int, rows: slice = slice(None)) -> PackedSpec:
        """Some rows of the batch of a step (>= 0, endless)."""
        window, at = self._locate(step)
        packed = self._pack(window)
        first, stop, _ = rows.indices(self.global_batch)
        low = at * self.global_batch
        part = packed.packing.part(low + first, low + stop)
        return PackedSpec(step, window // self.windows_per_epoch, packed.ids[part.item], part)

    def epoch(self, step: int) -> int:
        """The epoch a step belongs to."""
        return self._locate(step)[0] // self.windows_per_epoch

    def rank_rows(self, rank: int, world: int) -> slice:
        """As for Plan."""
        return rank_rows(self.global_batch, rank, world)

    def state(self, step: int) -> dict[str, Any]:
        """Position after `step` delivered batches, for JSON; below 1 KiB and the same on every rank."""
        window, at = self._locate(step)
        return {**self._identity(), "step": int(step), "window": window, "batch": at}

    def check_state(self, state: Mapping[str, Any]) -> int:
        """The step a state stands for; StateError naming what differs if it is not of this plan."""
        step, window, at = (counter(state, name) for name in ("step", "window", "batch"))
        require_same(state, self._identity())
        first = step - at
        if first < 0 or at >= self._pack(window).batches:
            raise StateError(f"step {step} cannot be batch {at} of window {window}")
        with self._lock:
            self._passed.clear()
            self._passed.append((first, window))
        return step

    def _identity(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "global_batch": self.global_batch,
            "fingerprint": self.fingerprint,
            "params": {
                "shuffle": self.shuffle,
                "records": self.records,
                "pack": self.capacity,
                "window": self.window_draws,
            },
        }

    def _locate(self, step: int) -> tuple[int, int]:
        """The window of a step, and which of its batches it is."""
        if step < 0:
            raise PlanError(f"step {step}: it must be >= 0")
        with self._lock:
            if step < self._passed[0][0]:
                self._passed = deque([(0, 0)], self._passed.maxlen)
            first, window = max(passed for passed in self._passed if passed[0] <= step)
            while step >= first + (batches := self._pack(window).batches):
                first, window = first + batches, window + 1
                if first > self._passed[-1][0]:
                    self._passed.append((first, window))
            return window, step - first

    def _pack(self, window: int) -> _Window:
        with self._lock:
            packed = self._packed.get(window)
            if packed is None:
                began = time.perf_counter()
                packed = self._packed[window] = self._packed_anew(window)
                self.pack_s += time.perf_counter() - began
                if len(self._packed) > _CACHED:
                    self._packed.popitem(last=False)
            return packed

    def _packed_anew(self, window: int) -> _Window:
        ids, lengths = self._draws(window)
        packing, last = first_fit(lengths, self.capacity)
        keys = None
        if self.shuffle and packing.rows:
            keys = permute(
                np.arange(packing.rows), packing.rows, seed=self.seed, epoch=window, stream=_ROW_STREAM
            )
        return _Window(arrange(packing, last, keys), ids, -(-packing.rows // self.global_batch))

    def _draws(self, window: int) -> tuple[Ids, Ids]:
        """Record ids and lengths of a window's draws."""
        epoch, number = divmod(window, self.windows_per_epoch)
        low, high = (self.records * n // self.windows_per_epoch for n in (number, number + 1))
        sources, turns = self._mixture.at(np.arange(low, high) + epoch * self.records)
        ids, lengths = np.empty(len(sources), np.int64), np.empty(len(sources), np.int64)
        for source in np.flatnonzero(np.bincount(sources)).tolist():
            chosen = np.flatnonzero(sources == source)
            local = self._records(source, turns[chosen])
            ids[chosen] = self._first[source] + local
            lengths[chosen] = self._lengths[source][local]
        return ids, lengths

    def _records(self, source: int, turns: Ids) -> Ids:
        """Records of a source for its draws `turns`, ascending: pass after pass, each in an order of its own."""
        size = self._sizes[source]
        passes, places = np.divmod(turns, size)
        if not self.shuffle:
            return places
        for number in range(int(passes[0]), int(passes[-1]) + 1):
            low, high = np.searchsorted(passes, (number, number + 1))
            places[low:high] = permute(
                places[low:high], size, seed=self.seed, epoch=number, stream=_DRAW_STREAM + source
            )
        return places


def _automatic(draws: float) -> int:
    return int(min(max(draws, 1), _MAX_WINDOW))


def _check(plan: PackPlan, tokens: list[int], window: int | None) -> None:
    if plan.capacity < 1 or plan.global_batch < 1 or (window is not None and window < 1):
        raise PlanError(
            f"pack={plan.capacity}, global_batch={plan.global_batch}, window={window}: all must be at least 1"
        )
    if len(tokens) != len(plan._mixture.weights):
        raise PlanError(f"{len(tokens)} data sets and {len(plan._mixture.weights)} weights")
    if not all(tokens):
        raise PlanError("a data set without tokens cannot be packed")
