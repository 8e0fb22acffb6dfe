"""overlap: how much of one data set is found in another (records by hash, runs of tokens by n-gram)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._dataset import Dataset, Source, open_dataset
from lf_format._errors import FormatError
from lf_format._index import cumulative
from lf_format._layout import xxh3

_ODD = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the multiplier of splitmix64
_BATCH_TOKENS = 1 << 20
Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class OverlapReport:
    """What of the checked set is in the reference set.

    Attributes:
        records: records of the checked set.
        equal_records: those that are a whole record of the reference, token for token.
        ngram: tokens in an n-gram.
        ngrams: n-grams of the checked set; records shorter than `ngram` have none.
        common_ngrams: those that occur in the reference.
        threshold: share of a record's n-grams from which it counts as contaminated.
        contaminated: record ids of the checked set that are equal or at or above the threshold, ascending.
        passes: times the reference was read, 1 unless the memory limit needed more.
    """

    records: int
    equal_records: int
    ngram: int
    ngrams: int
    common_ngrams: int
    threshold: float
    contaminated: tuple[int, ...]
    passes: int


def overlap(
    reference: Source, checked: Source, *, ngram: int = 13, threshold: float = 0.8, memory: int = 1 << 28
) -> OverlapReport:
    """Looks for records of `checked` (say evaluation data) in `reference` (say training data).

    Tokens are compared, so both must come from one tokenizer. N-grams do not cross record boundaries. Both tests
    compare 64-bit hashes: one false hit is expected per 2^64 / (n-grams of both, multiplied) comparisons.

    Args:
        ngram: tokens, >= 1.
        threshold: 0 < threshold <= 1.
        memory: bytes for the hashes of `checked`; when they need more, the reference is read several times.

    Raises:
        FormatError: for arguments out of range, different tokenizers, damaged files.
    """
    if ngram < 1 or not 0 < threshold <= 1 or memory < 1:
        found = (ngram, threshold, memory)
        raise FormatError("ngram, threshold, memory", expected=">= 1, in (0, 1], >= 1", found=found)
    with open_dataset(reference) as known, open_dataset(checked) as asked:
        if known.tokenizer.hash != asked.tokenizer.hash:
            raise FormatError(
                "data sets of different tokenizers cannot be compared",
                path=asked.readers[0].path, expected=known.tokenizer, found=asked.tokenizer,
            )  # fmt: skip
        return _Search(known, asked, ngram, threshold, memory).run()


class _Search:
    """One comparison: hashes of a slice of the checked set in memory, the reference streaming past."""

    def __init__(self, known: Dataset, asked: Dataset, ngram: int, threshold: float, memory: int) -> None:
        self.known, self.asked, self.ngram, self.threshold = known, asked, ngram, threshold
        self.equal = self.ngrams = self.common = self.passes = 0
        self.contaminated: list[int] = []
        self.slice_tokens = max(memory // 40, 1)  # hash, sorted hash, inverse, hit: about 40 bytes a token

    def run(self) -> OverlapReport:
        start = 0
        for end in self._slices():
            self._slice(range(start, end))
            start = end
        counts = len(self.asked), self.equal, self.ngram, self.ngrams, self.common
        return OverlapReport(*counts, self.threshold, tuple(self.contaminated), self.passes)

    def _slices(self) -> Iterator[int]:
        """Ends of consecutive ranges of records with about `slice_tokens` tokens, at least one record each."""
        ends, at = cumulative(self.asked.lengths), 0
        while at < len(self.asked):
            full = int(np.searchsorted(ends, ends[at] + self.slice_tokens, "right")) - 1
            at = max(full, at + 1)
            yield at

    def _slice(self, ids: range) -> None:
        self.passes += 1
        records = [self.asked.record(i).tokens for i in ids]
        grams = [ngram_hashes(tokens, self.ngram) for tokens in records]
        wanted, inverse = np.unique(np.concatenate(grams), return_inverse=True)
        whole = np.array([sequence_hash(tokens) for tokens in records], np.uint64)
        wanted_whole = np.unique(whole)
        seen, seen_whole = np.zeros(len(wanted), bool), np.zeros(len(wanted_whole), bool)
        for tokens in self._batches():
            _mark(wanted, seen, np.concatenate([ngram_hashes(t, self.ngram) for t in tokens]))
            _mark(wanted_whole, seen_whole, np.array([sequence_hash(t) for t in tokens], np.uint64))
        self._count(ids, grams, seen[inverse], seen_whole[np.searchsorted(wanted_whole, whole)])

    def _batches(self) -> Iterator[list[Array]]:
        batch: list[Array] = []
        size = 0
        for i in range(len(self.known)):
            tokens = self.known.record(i).tokens
            batch.append(tokens)
            size += len(tokens)
            if size >= _BATCH_TOKENS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _count(self, ids: range, grams: list[Words], hits: Array, equal: Array) -> None:
        ends = cumulative(np.array([len(g) for g in grams], np.int64))
        below = cumulative(hits)
        common = below[ends[1:]] - below[ends[:-1]]
        sizes = np.diff(ends)
        self.equal += int(equal.sum())
        self.ngrams += int(sizes.sum())
        self.common += int(common.sum())
        bad = equal | ((sizes > 0) & (common >= self.threshold * sizes))
        self.contaminated += (np.flatnonzero(bad) + ids.start).tolist()


def _mark(wanted: Words, seen: npt.NDArray[np.bool_], hashes: Words) -> None:
    """Sets seen[k] where wanted[k] (sorted, distinct) is among `hashes`."""
    if len(wanted) and len(hashes):
        at = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        seen[at[wanted[at] == hashes]] = True


def ngram_hashes(tokens: Array, ngram: int) -> Words:
    """64-bit hash of every run of `ngram` tokens: uint64[max(n - ngram + 1, 0)]."""
    count = len(tokens) - ngram + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    spread = _mixed(tokens.astype(np.uint64) + np.uint64(1))
    out = np.zeros(count, np.uint64)
    for k in range(ngram):
        out *= np.uint64(_ODD)
        out += spread[k : k + count]
    return _mixed(out)


def sequence_hash(tokens: Array) -> int:
    """64-bit hash of a whole record, independent of its stored width."""
    return xxh3(tokens.astype("<u4").tobytes())


def _mixed(values: Words) -> Words:
    """splitmix64's finalizer: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
