"""Which packed rows a step reads: windows of draws, each packed on its own and computable on its own."""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._ahead import Ahead
from ._errors import PlanError, StateError
from ._permute import Ids
from .mixing import Mixture
from .pack_window import PackedWindow, WindowPacker
from .packing import Packing
from .plan import STATE_VERSION, counter, rank_rows, require_same, whole

# The last batch of a window is half empty on average: 0.5 / 64 = 0.8 % of the rows.
_WINDOW_BATCHES = 64
_MAX_WINDOW = 1 << 16  # draws; packs in well under a second
_KEPT = 3  # packed windows: the one delivered from, and two that may be read ahead


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
        blocks: of each source, records that stay neighbours when it is shuffled, see BlockOrder; 0 or None: any.

    Windows are packed in a thread of the plan's own; whoever needs one waits, and a signal ends the wait.
    Threads may share a plan, and a forked child goes on with it. Raises PlanError for arguments that fit no order.
    """

    def __init__(
        self, lengths: Sequence[npt.NDArray[Any]], mixture: Mixture, capacity: int, global_batch: int, seed: int,
        shuffle: bool = True, fingerprint: str = "", window: int | None = None, blocks: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.buckets = (int(capacity),)
        self.global_batch, self.seed = whole("global_batch", global_batch), whole("seed", seed)
        self.shuffle = bool(shuffle)
        self.fingerprint = str(fingerprint)
        tokens = [int(np.sum(sizes, dtype=np.int64)) for sizes in lengths]
        _check(self, tokens, mixture, window)
        self.records = sum(len(sizes) for sizes in lengths)
        mean = sum(tokens) / self.records
        self.window_draws = window or _automatic(capacity * global_batch * _WINDOW_BATCHES / mean)
        self.blocks = list(blocks or [0] * len(lengths))
        self._packer = WindowPacker(
            lengths, mixture, self.capacity, self.global_batch,
            seed=self.seed, shuffle=self.shuffle, window_draws=self.window_draws, blocks=self.blocks,
        )  # fmt: skip
        self.windows_per_epoch = self._packer.windows_per_epoch
        self._windows = Ahead(self._packer.packed, _KEPT)
        self._lock = threading.RLock()
        # (first step, window) of those passed last: small steps back are cheap, far ones begin at the start
        self._passed: deque[tuple[int, int]] = deque([(0, 0)], 64)

    @property
    def capacity(self) -> int:
        """Tokens of a row."""
        return self.buckets[0]

    @property
    def pack_s(self) -> float:
        """Seconds spent packing windows so far."""
        return self._packer.pack_s

    def batch(self, step: int, rows: slice = slice(None)) -> PackedSpec:
        """Some rows of the batch of a step (>= 0, endless)."""
        window, at = self.locate(step)
        packed = self.packed(window)
        first, stop, _ = rows.indices(self.global_batch)
        low = at * self.global_batch
        part = packed.packing.part(low + first, low + stop)
        return PackedSpec(step, self.epoch_of(window), packed.ids[part.item], part)

    def packed(self, window: int) -> PackedWindow:
        """A window (>= 0, endless), packed."""
        return self._windows.get(window)

    def epoch_of(self, window: int) -> int:
        """The epoch a window belongs to."""
        return window // self.windows_per_epoch

    def epoch(self, step: int) -> int:
        """The epoch a step belongs to."""
        return self.epoch_of(self.locate(step)[0])

    def rank_rows(self, rank: int, world: int) -> slice:
        """As for Plan."""
        return rank_rows(self.global_batch, rank, world)

    def state(self, step: int) -> dict[str, Any]:
        """Position after `step` delivered batches, for JSON; below 1 KiB and the same on every rank."""
        window, at = self.locate(step)
        return {**self._identity(), "step": int(step), "window": window, "batch": at}

    def check_state(self, state: Mapping[str, Any]) -> int:
        """The step a state stands for; StateError naming what differs if it is not of this plan."""
        step, window, at = (counter(state, name) for name in ("step", "window", "batch"))
        require_same(state, self._identity())
        first = step - at
        if first < 0 or at >= self.packed(window).batches:
            raise StateError(f"step {step} cannot be batch {at} of window {window}")
        with self._lock:
            self._passed = deque([(first, window)], self._passed.maxlen)
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
                **({"shuffle_block_size": self.blocks} if any(self.blocks) else {}),
            },
        }

    def locate(self, step: int) -> tuple[int, int]:
        """The window of a step (>= 0), and which of its batches it is."""
        if step < 0:
            raise PlanError(f"step {step}: it must be >= 0")
        with self._lock:
            if step < self._passed[0][0]:
                self._passed = deque([(0, 0)], self._passed.maxlen)
            later = bisect_right(self._passed, step, key=_first)
            first, window = self._passed[later - 1]
            # of those before the last one passed it is known where they end
            while later >= len(self._passed) and step >= first + (batches := self.packed(window).batches):
                first, window = first + batches, window + 1
                if batches == 0:
                    self._passed[-1] = (first, window)
                else:
                    self._passed.append((first, window))
                later = len(self._passed)
            return window, step - first


def _first(passed: tuple[int, int]) -> int:
    return passed[0]


def _automatic(draws: float) -> int:
    return int(min(max(draws, 1), _MAX_WINDOW))


def _check(plan: PackPlan, tokens: list[int], mixture: Mixture, window: int | None) -> None:
    if plan.capacity < 1 or plan.global_batch < 1 or (window is not None and window < 1):
        raise PlanError(
            f"pack={plan.capacity}, global_batch={plan.global_batch}, window={window}: all must be at least 1"
        )
    if len(tokens) != len(mixture.weights):
        raise PlanError(f"{len(tokens)} data sets and {len(mixture.weights)} weights")
    if not all(tokens):
        raise PlanError("a data set without tokens cannot be packed")
