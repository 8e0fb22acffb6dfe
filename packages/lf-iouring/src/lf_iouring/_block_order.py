"""A shuffle that reads coded blocks once: order among chunks of neighbouring records, and order inside them.

A full permutation decodes a block for every record it holds. Here the records of a bucket are cut into runs of
neighbours; RUNS of them from anywhere in the bucket make a chunk, in which records are shuffled freely; and MIX
chunks are read at a time, their batches shuffled freely. It is a pure function of the position, like `permute`,
and needs no memory.
"""

import numpy as np

from ._errors import PlanError
from ._permute import Ids, permute, round_keys

MIX = 8  # chunks read at a time
RUNS = 8  # runs of neighbours in a chunk

# Apart from the streams of buckets (their numbers), batches (1 << 32) and packing (1 << 33, 1 << 34).
_CHUNK_STREAM = 1 << 35
_GROUP_STREAM = 1 << 36
_REST_STREAM = 1 << 37
_INSIDE_STREAM = 1 << 38
_TURN_STREAM = 1 << 39
_RUN_STREAM = 1 << 40


class BlockOrder:
    """The order of batches and records of one epoch, when only MIX chunks may be in use at a time.

    Batches are numbered as in Plan: full ones bucket by bucket, then those of leftovers. What does not fill a
    chunk comes last in the epoch. The records of a bucket are turned by an amount that differs from epoch to
    epoch, so that chunks have other borders each time.

    Args:
        sizes: int64[buckets] records of each bucket.
        global_batch: rows of a batch.
        chunk: records of a chunk, at least global_batch.
        seed: names the order.

    Raises PlanError for a chunk that does not hold a batch.
    """

    def __init__(self, sizes: Ids, global_batch: int, chunk: int, seed: int) -> None:
        if chunk < global_batch:
            raise PlanError(f"shuffle_block_size={chunk}: it must hold a global batch of {global_batch}")
        self._sizes, self._seed = sizes, seed
        batches = chunk // global_batch
        self._runs = min(RUNS, batches)  # of a chunk
        self._batches = batches // self._runs * self._runs
        self._records = self._batches * global_batch
        full = sizes // global_batch
        self._full_starts = np.cumsum(full) - full
        chunks = full // self._batches
        self._chunk_ends = np.cumsum(chunks)
        self._chunk_starts = self._chunk_ends - chunks
        self._total = int(self._chunk_ends[-1])
        left = int(np.sum(sizes - full * global_batch))
        rest = np.append(full - chunks * self._batches, -(-left // global_batch))
        self._rest_ends = np.cumsum(rest)
        self._rest_numbers = (
            np.append(self._full_starts + chunks * self._batches, full.sum()) - self._rest_ends + rest
        )
        self._in_chunks = chunks * self._records

    def numbers(self, places: Ids, epoch: int) -> Ids:
        """The batch at each place of an epoch; int64[k] both."""
        covered = self._total * self._batches
        numbers = np.empty_like(places)
        inside = places < covered
        numbers[inside] = self._chunked(places[inside], epoch)
        rest = places[~inside] - covered
        if rest.size:
            rest = permute(rest, int(self._rest_ends[-1]), seed=self._seed, epoch=epoch, stream=_REST_STREAM)
            numbers[~inside] = rest + self._rest_numbers[np.searchsorted(self._rest_ends, rest, side="right")]
        return numbers

    def records(self, bucket: int, positions: Ids, epoch: int) -> Ids:
        """What stands at each position of a bucket, as a place in its ascending list of records."""
        size, covered = int(self._sizes[bucket]), int(self._in_chunks[bucket])
        out = np.empty_like(positions)
        chunk = np.minimum(positions, covered) // self._records
        for number in np.unique(chunk).tolist():
            at = chunk == number
            first = number * self._records
            whole = first < covered
            length = self._records if whole else size - covered
            stream = _INSIDE_STREAM + (number << 16) + bucket
            place = permute(positions[at] - first, length, seed=self._seed, epoch=epoch, stream=stream)
            out[at] = self._in_runs(bucket, number, place, epoch) if whole else covered + place
        turn = round_keys(self._seed, epoch, _TURN_STREAM + bucket)[0] % max(size, 1)
        return (out + turn) % max(size, 1)

    def _in_runs(self, bucket: int, chunk: int, places: Ids, epoch: int) -> Ids:
        """Places of a chunk to places of its runs, which lie anywhere in the bucket."""
        length = self._records // self._runs
        run, inside = np.divmod(places, length)
        total = int(self._in_chunks[bucket]) // length
        run = permute(
            run + chunk * self._runs, total, seed=self._seed, epoch=epoch, stream=_RUN_STREAM + bucket
        )
        return run * length + inside

    def _chunked(self, places: Ids, epoch: int) -> Ids:
        """Batches of full chunks: places go by groups of MIX chunks, shuffled inside."""
        numbers = np.empty_like(places)
        group = places // (MIX * self._batches)
        for number in np.unique(group).tolist():
            at = group == number
            first = number * MIX
            size = min(MIX, self._total - first) * self._batches
            place = permute(
                places[at] - first * self._batches,
                size,
                seed=self._seed,
                epoch=epoch,
                stream=_GROUP_STREAM + number,
            )
            chunk, batch = np.divmod(place, self._batches)
            chunk = permute(chunk + first, self._total, seed=self._seed, epoch=epoch, stream=_CHUNK_STREAM)
            bucket = np.searchsorted(self._chunk_ends, chunk, side="right")
            numbers[at] = (
                self._full_starts[bucket] + (chunk - self._chunk_starts[bucket]) * self._batches + batch
            )
        return numbers
