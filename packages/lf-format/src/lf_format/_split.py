"""Pure decisions of preprocess: bucket edges, pieces of long documents, held-out documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import FormatError
from lf_format._layout import MAX_RECORD_TOKENS, align, xxh3

SMALLEST_EDGE = 16


def bucket_edges(max_len: int, min_len: int | None = None, bucket_size: int | None = None) -> tuple[int, ...]:
    """Increasing bucket edges that end at `max_len`.

    Without `bucket_size`: max_len, max_len/2, max_len/4, ... down to `min_len` (default 16).
    With it: the multiples of `bucket_size` from `min_len` (default one bucket) up, and max_len.
    Shorter records always fit the first bucket, so nothing is dropped.

    Raises:
        FormatError: when the three do not fit together.
    """
    least = min(bucket_size or SMALLEST_EDGE, max_len) if min_len is None else min_len
    if not 1 <= least <= max_len <= MAX_RECORD_TOKENS:
        raise FormatError(
            "min_len and max_len", expected=f"1 <= min <= max <= {MAX_RECORD_TOKENS}", found=(least, max_len)
        )
    if bucket_size is not None:
        if bucket_size < 1:
            raise FormatError("bucket_size", expected=">= 1", found=bucket_size)
        return (*range(align(least, bucket_size), max_len, bucket_size), max_len)
    edges = [max_len]
    while edges[-1] // 2 >= least:
        edges.append(edges[-1] // 2)
    return tuple(reversed(edges))


def pieces(length: int, max_len: int) -> list[tuple[int, int]]:
    """[start, end) ranges that cover a document of `length` tokens in pieces of at most `max_len`."""
    return [(at, min(at + max_len, length)) for at in range(0, length, max_len)]


def document_key(seed: int, content: bytes) -> int:
    """Pseudo-random 64-bit key of a document: held-out documents are those with the smallest keys.

    A function of the content, so that the choice survives a moved, renamed or reordered input.
    """
    return xxh3(content, seed & 0xFFFFFFFFFFFFFFFF)


def choose_eval(
    keys: Sequence[int] | npt.NDArray[Any], tokens: npt.NDArray[Any], fraction: float
) -> npt.NDArray[np.bool_]:
    """Which documents are held out: at least `fraction` of all tokens, and never every document.

    Args:
        keys: document_key of each document, [n].
        tokens: tokens of each document, [n].
        fraction: 0 <= fraction < 1.

    Returns:
        bool[n]. Documents are taken by ascending key, passing over those that would overshoot twice the target;
        if that does not reach it, the smallest of the rest follow.
    """
    held = np.zeros(len(tokens), bool)
    target = math.ceil(fraction * int(tokens.sum(dtype=np.int64)))
    taken = documents = 0
    order = np.argsort(np.asarray(keys, np.uint64), kind="stable")
    by_size = order[np.argsort(tokens[order], kind="stable")]
    for candidates, most in ((order, 2 * target), (by_size, None)):
        for i in candidates.tolist():
            if taken >= target or documents >= len(held) - 1:
                return held
            size = int(tokens[i])
            if not held[i] and (most is None or taken + size <= most):
                held[i] = True
                taken, documents = taken + size, documents + 1
    return held
