"""Lengths, padding and bucket edges: pure functions over an array of record lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import FormatError

MAX_CANDIDATES = 512  # distinct edges the exact search looks at; its time grows with the square
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LengthSummary:
    """Lengths of records: how many, their sum, extremes, mean and quantiles (all in tokens)."""

    records: int
    tokens: int
    shortest: int
    longest: int
    mean: float
    p50: int
    p90: int
    p99: int


@dataclass(frozen=True)
class BucketSet:
    """Bucket edges and what padding every record to the edge of its bucket costs.

    Attributes:
        edges: increasing, in tokens.
        records: per bucket.
        tokens: per bucket, without padding.
        padding: padded positions / all positions of all batches, 0 <= padding < 1.
    """

    edges: tuple[int, ...]
    records: tuple[int, ...]
    tokens: tuple[int, ...]
    padding: float


def summarize(lengths: Array) -> LengthSummary:
    """Summary of `lengths` (integers, shape [n]); zeros when there is no record."""
    if len(lengths) == 0:
        return LengthSummary(0, 0, 0, 0, 0.0, 0, 0, 0)
    p50, p90, p99 = (int(q) for q in np.quantile(lengths, (0.5, 0.9, 0.99), method="higher"))
    tokens = int(lengths.sum(dtype=np.int64))
    extremes = int(lengths.min()), int(lengths.max())
    return LengthSummary(len(lengths), tokens, *extremes, tokens / len(lengths), p50, p90, p99)


def bucket_set(lengths: Array, edges: Sequence[int]) -> BucketSet:
    """Records of `lengths` (integers, shape [n]) in buckets with these increasing `edges`.

    Raises:
        FormatError: when the edges do not increase or the last one is below the longest record.
    """
    bounds = np.asarray(edges, np.int64)
    if len(bounds) == 0 or bounds[0] < 1 or (np.diff(bounds) <= 0).any():
        raise FormatError("bucket edges", expected="strictly increasing integers >= 1", found=list(edges))
    if len(lengths) and int(lengths.max()) > int(bounds[-1]):
        raise FormatError("last bucket edge", expected=f">= {int(lengths.max())}", found=int(bounds[-1]))
    bucket = np.searchsorted(bounds, lengths, "left")
    counts = np.bincount(bucket, minlength=len(bounds))
    tokens = np.bincount(bucket, lengths, minlength=len(bounds)).astype(np.int64)
    positions = int((counts * bounds).sum())
    padding = 1 - int(tokens.sum()) / positions if positions else 0.0
    return BucketSet(tuple(bounds.tolist()), tuple(counts.tolist()), tuple(tokens.tolist()), padding)


def suggest_buckets(lengths: Array, count: int, multiple: int = 1) -> tuple[int, ...]:
    """At most `count` edges, multiples of `multiple`, that pad the records of `lengths` least.

    Exact when there are at most 512 distinct rounded lengths; otherwise the edges are chosen among 512 quantiles.
    Lengths: integers >= 1, shape [n], n >= 1.

    Raises:
        FormatError: when there is no record, or count or multiple is below 1.
    """
    if len(lengths) == 0 or count < 1 or multiple < 1:
        raise FormatError(
            "suggested buckets", expected=">= 1 record, count, multiple", found=(count, multiple)
        )
    rounded = -(-np.asarray(lengths, np.int64) // multiple) * multiple
    edges, counts = np.unique(rounded, return_counts=True)
    if len(edges) > MAX_CANDIDATES:
        chosen = np.quantile(rounded, np.linspace(0, 1, MAX_CANDIDATES), method="higher")
        edges = np.unique(chosen)
        counts = np.bincount(np.searchsorted(edges, rounded, "left"), minlength=len(edges))
    return _cheapest(edges, np.concatenate(([0], np.cumsum(counts))), min(count, len(edges)))


def _cheapest(edges: Array, below: Array, count: int) -> tuple[int, ...]:
    """Dynamic program: best[j] = fewest positions for the records up to edge j with the buckets used so far."""
    last = len(edges)
    # cost[i, j]: positions of one bucket with edge j over the records above edge i - 1
    cost = np.where(
        np.arange(last)[:, None] <= np.arange(last), (below[None, 1:] - below[:-1, None]) * edges, np.inf
    )
    best, choices = cost[0], []
    for _ in range(count - 1):
        total = np.concatenate(([0.0], best[:-1]))[:, None] + cost
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    picked, j = [], last - 1
    for choice in (*reversed(choices), np.zeros(last, np.int64)):
        picked.append(int(edges[j]))
        j = int(choice[j]) - 1
        if j < 0:
            break
    return tuple(reversed(picked))
