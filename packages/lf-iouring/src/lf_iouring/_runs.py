"""Which bucket a record is in, as runs of consecutive records: memory for the blocks, not for the records."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._errors import PlanError
from ._permute import Ids


class BucketRuns:
    """Runs of consecutive record ids that share a bucket.

    Derived once, in time and memory of the number of runs; plans made from it cost O(buckets).

    Args:
        counts: int[k] records of each run, >= 0.
        buckets: int[k] bucket number of each run.

    Attributes:
        records: number of records.
        highest: largest bucket number, -1 without records.

    Raises PlanError when the two do not fit together.
    """

    def __init__(self, counts: npt.ArrayLike, buckets: npt.ArrayLike) -> None:
        sizes, numbers = np.asarray(counts), np.asarray(buckets)
        if sizes.shape != numbers.shape or sizes.ndim != 1:
            raise PlanError(f"runs: counts of shape {sizes.shape}, buckets of shape {numbers.shape}")
        if sizes.size and (int(sizes.min()) < 0 or int(numbers.min()) < 0):
            raise PlanError("runs: counts and bucket numbers must be >= 0")
        if not sizes.all():
            sizes, numbers = sizes[sizes > 0], numbers[sizes > 0]
        ends = np.cumsum(sizes, dtype=np.int64)
        self.records = int(ends[-1]) if ends.size else 0
        self.highest = int(numbers.max()) if numbers.size else -1
        self._tables = [_table(ends, sizes, numbers == bucket) for bucket in range(self.highest + 1)]

    @classmethod
    def of(cls, bucket_of: npt.ArrayLike) -> "BucketRuns":
        """The runs in an array of bucket numbers, int[n]."""
        numbers = np.asarray(bucket_of)
        if numbers.ndim != 1:
            raise PlanError(f"bucket_of has shape {numbers.shape}, it must have one dimension")
        if numbers.size and int(numbers.min()) < 0:
            raise PlanError("bucket_of must be >= 0")
        starts = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        starts = np.concatenate(([0], starts)) if numbers.size else starts
        return cls(np.diff(starts, append=numbers.size), numbers[starts])

    @classmethod
    def of_blocks(cls, readers: Sequence[Any]) -> "BucketRuns":
        """The runs of lf-format shards, from their block tables."""
        indices = [reader.opened.index for reader in readers]
        counts = np.concatenate([index.block_count for index in indices])
        return cls(counts, np.concatenate([index.block_bucket for index in indices]))

    def sizes(self, buckets: int) -> Ids:
        """Records of each of the first `buckets` buckets, int64[buckets]."""
        sizes = np.zeros(buckets, np.int64)
        for bucket, (before, _) in enumerate(self._tables[:buckets]):
            sizes[bucket] = before[-1]
        return sizes

    def ids(self, bucket: int, places: Ids) -> Ids:
        """The records at `places` of a bucket's ascending list of ids; int64 like `places`."""
        before, shift = self._tables[bucket]
        if len(shift) == 1:
            return places + int(shift[0])
        run = np.searchsorted(before, places, side="right") - 1
        return np.add(places, shift[run], dtype=np.int64)

    def over(self, lengths: npt.NDArray[Any], edges: Sequence[int]) -> int | None:
        """The first record whose length exceeds its bucket's edge; `lengths` int[records]."""
        found = []
        for (before, shift), edge in zip(self._tables, edges, strict=False):
            if not len(shift):
                continue
            # every second slice of reduceat lies between two runs of the bucket and is not looked at
            cuts = np.stack([before[:-1] + shift, before[1:] + shift], axis=1).reshape(-1)
            cuts = cuts[:-1] if cuts[-1] == len(lengths) else cuts
            bad = np.flatnonzero(np.maximum.reduceat(lengths, cuts)[::2] > edge)
            if bad.size:
                start, stop = (before[bad[0] + i] + shift[bad[0]] for i in (0, 1))
                found.append(int(start + np.flatnonzero(lengths[start:stop] > edge)[0]))
        return min(found, default=None)


def _table(ends: Ids, sizes: npt.NDArray[Any], chosen: npt.NDArray[np.bool_]) -> tuple[Ids, Ids]:
    """Of the chosen runs: members before each run (and in all), and what turns a place into a record id."""
    before = np.zeros(int(np.count_nonzero(chosen)) + 1, np.int64)
    np.cumsum(sizes[chosen], dtype=np.int64, out=before[1:])
    # neighbours with nothing in between are one run
    shift = ends[chosen] - before[1:]
    first = np.flatnonzero(np.diff(shift, prepend=-1))
    return before[np.append(first, len(shift))], shift[first]
