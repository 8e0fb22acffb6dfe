"""One window of draws, packed: a pure function of (seed, window)."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ._block_order import BlockOrder
from ._permute import Ids, permute
from .mixing import Mixture
from .packing import Packing, arrange, first_fit

# Apart from the streams of length buckets (their numbers) and of batches (1 << 32), see plan.py.
_DRAW_STREAM = 1 << 33
_ROW_STREAM = 1 << 34


class PackedWindow(NamedTuple):
    """A window once it is packed.

    packing: all its rows, in the order of the batches.
    ids: int64[draws] record id of each of its items.
    batches: how many batches its rows make.
    """

    packing: Packing
    ids: Ids
    batches: int


class WindowPacker:
    """Packs windows; see PackPlan for the arguments.

    Attributes:
        records: in all sources.
        windows_per_epoch: their number.
        pack_s: seconds spent packing so far.
    """

    def __init__(
        self, lengths: Sequence[npt.NDArray[Any]], mixture: Mixture, capacity: int, global_batch: int, *,
        seed: int, shuffle: bool, window_draws: int, blocks: Sequence[int],
    ) -> None:  # fmt: skip
        self._lengths, self._mixture = list(lengths), mixture
        self._capacity, self._global_batch = capacity, global_batch
        self._seed, self._shuffle = seed, shuffle
        self._sizes = [len(sizes) for sizes in self._lengths]
        self._blocks = [
            BlockOrder(np.array([size]), 1, block, seed + source) if block and shuffle else None
            for source, (size, block) in enumerate(zip(self._sizes, blocks, strict=True))
        ]
        self._first = np.concatenate(([0], np.cumsum(self._sizes)))
        self.records = int(self._first[-1])
        self.windows_per_epoch = max(1, round(self.records / window_draws))
        self.pack_s = 0.0

    def packed(self, window: int) -> PackedWindow:
        """First-fit decreasing of a window's draws, its rows permuted."""
        began = time.perf_counter()
        ids, lengths = self.draws(window)
        packing, last = first_fit(lengths, self._capacity)
        keys = None
        if self._shuffle and packing.rows:
            rows = packing.rows
            keys = permute(np.arange(rows), rows, seed=self._seed, epoch=window, stream=_ROW_STREAM)
        done = PackedWindow(arrange(packing, last, keys), ids, -(-packing.rows // self._global_batch))
        self.pack_s += time.perf_counter() - began
        return done

    def draws(self, window: int) -> tuple[Ids, Ids]:
        """Record ids and lengths of a window's draws, int64 each."""
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
        if not self._shuffle:
            return places
        blocks = self._blocks[source]
        for number in range(int(passes[0]), int(passes[-1]) + 1):
            low, high = np.searchsorted(passes, (number, number + 1))
            if blocks is not None:
                places[low:high] = blocks.records(0, blocks.numbers(places[low:high], number), number)
                continue
            places[low:high] = permute(
                places[low:high], size, seed=self._seed, epoch=number, stream=_DRAW_STREAM + source
            )
        return places
