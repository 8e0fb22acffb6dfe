"""Choosing dictionaries: trained on some blocks of a bucket, judged on others, kept only where they pay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from lf_format._codecs import REMAP_ZSTD, ZSTD, Coding, bits_of, encode
from lf_format._dictionary import KIND_RANKS, KIND_ZSTD, Dictionary, rank_of, rank_table
from lf_format._reader import Reader

LEAST_SAVING = 0.02  # of the bytes stored without it, the dictionary's own bytes counted
SAMPLE_BYTES = 16 << 20  # of every bucket, half to train and half to judge
LEAST_BLOCKS = 4
SMALLEST, LARGEST = 1 << 14, 1 << 20  # dictionary bytes
SHARE = 192  # a dictionary of 1/192 of its bucket costs about 0.7 % of it, both compressed
MOST_RANKED = 1 << 22  # ids in a rank table: 16 MiB
SEGMENT = 1024  # bytes COVER copies at a time, with matches counted over 8
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Decision:
    """What was measured about one dictionary.

    Attributes:
        bucket: bucket edge in tokens; None for the rank table, which serves all buckets.
        kind: "zstd" or "ranks".
        nbytes: bytes of the dictionary in the file.
        without: bytes that all blocks concerned would take without it, from the held-out blocks.
        saved: bytes it saves there, its own size taken off; negative when it costs.
        kept: saved is at least 2 % of without.
        reason: in words.
    """

    bucket: int | None
    kind: str
    nbytes: int
    without: int
    saved: int
    kept: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """How every bucket of a file is to be encoded: codec and Coding by bucket, and the dictionary of each."""

    codec: int
    ranks: Dictionary | None
    dictionaries: dict[int, Dictionary]
    decisions: tuple[Decision, ...]

    def coding(self, bucket: int, tokens: int, vocab_size: int, dtype: np.dtype[Any]) -> Coding:
        """What `encode` needs for a block with `tokens` ids."""
        table = None if self.ranks is None else np.frombuffer(self.ranks.content, "<u4")
        chosen = self.dictionaries.get(bucket)
        zstd = None if chosen is None else chosen.zstd
        ranks = None if table is None else rank_of(table)
        return Coding(bits_of(vocab_size), dtype, tokens, zstd, table, ranks)


@dataclass(frozen=True)
class _Sample:
    """Blocks of a bucket: (payload, ids in it) to train and to judge, and all bytes of the bucket."""

    train: list[tuple[bytes, int]]
    judge: list[tuple[bytes, int]]
    nbytes: int


def plan(reader: Reader, level: int) -> Plan:
    """Dictionaries that pay for the blocks of `reader` at zstd `level`.

    Both candidates, with and without a rank table for the whole file, are measured; the table is kept when it saves
    another 2 % with its bytes counted.
    """
    samples = _samples(reader)
    bare = Coding(bits_of(reader.vocab_size), reader.token_dtype)
    plain = _choose(samples, reader, level, bare, ZSTD)
    if reader.vocab_size > MOST_RANKED:
        chosen, decisions, _ = plain
        none = Decision(None, "ranks", 0, plain[2], 0, False, "the vocabulary is too large for a table")
        return Plan(ZSTD, None, chosen, (none, *decisions))
    counts = np.zeros(reader.vocab_size, np.int64)
    for sample in samples.values():
        for payload, tokens in sample.train:
            ids = np.frombuffer(payload, reader.token_dtype, tokens)
            counts += np.bincount(ids, minlength=reader.vocab_size)[: reader.vocab_size]
    table = rank_table(counts)
    ranked = _choose(samples, reader, level, replace(bare, table=table, ranks=rank_of(table)), REMAP_ZSTD)
    entry = Dictionary(KIND_RANKS, 0, table.tobytes())
    without, size = plain[2], len(entry.stored)
    saved = without - ranked[2] - size
    kept = bool(samples) and saved >= LEAST_SAVING * without
    decision = Decision(None, "ranks", size, without, saved, kept, _reason(saved, without))
    chosen, decisions, _ = ranked if kept else plain
    return Plan(REMAP_ZSTD if kept else ZSTD, entry if kept else None, chosen, (decision, *decisions))


def _choose(
    samples: dict[int, _Sample], reader: Reader, level: int, coding: Coding, codec: int
) -> tuple[dict[int, Dictionary], list[Decision], int]:
    """Dictionaries by bucket, what was measured, and the bytes of the whole file with them."""
    chosen, decisions, total = {}, [], 0
    for bucket, sample in samples.items():
        edge = reader.buckets[bucket]
        if len(sample.judge) < LEAST_BLOCKS // 2:
            without = _projected(sample, level, coding, codec)
            decisions.append(Decision(edge, "zstd", 0, without, 0, False, "too few blocks to judge"))
            total += without
            continue
        content = _trained(sample, coding)
        without = _projected(sample, level, coding, codec)
        saved = size = 0
        if content is not None:
            entry = Dictionary(KIND_ZSTD, int(codec == REMAP_ZSTD), content)
            size = len(entry.stored)
            saved = without - _projected(sample, level, replace(coding, dictionary=entry.zstd), codec) - size
        kept = content is not None and saved >= LEAST_SAVING * without
        reason = "cannot be trained" if content is None else _reason(saved, without)
        decisions.append(Decision(edge, "zstd", size, without, saved, kept, reason))
        if kept:
            chosen[bucket] = Dictionary(KIND_ZSTD, int(codec == REMAP_ZSTD), content or b"")
        total += without - max(saved, 0) * kept
    return chosen, decisions, total


def _reason(saved: int, without: int) -> str:
    return f"saves {saved / without:.1%} of {without} bytes" if without else "nothing to save"


def _projected(sample: _Sample, level: int, coding: Coding, codec: int) -> int:
    """Stored bytes of the bucket if all its blocks were like those to judge (like all samples if there is none)."""
    blocks = sample.judge or sample.train
    raw = sum(len(payload) for payload, _ in blocks)
    stored = sum(len(encode(p, codec, level, replace(coding, tokens=n))[1]) for p, n in blocks)
    return round(stored * sample.nbytes / raw)


def _trained(sample: _Sample, coding: Coding) -> bytes | None:
    size = min(max(sample.nbytes // SHARE, SMALLEST), LARGEST)
    pieces: list[bytes | bytearray | memoryview] = [
        piece for payload, n in sample.train for piece in _pieces(payload, replace(coding, tokens=n))
    ]
    try:
        trained = zstandard.train_dictionary(size, pieces, k=SEGMENT, d=8)
    except (zstandard.ZstdError, ValueError, MemoryError):
        return None
    content: bytes = trained.as_bytes()
    return content


def _pieces(payload: bytes, coding: Coding) -> Iterator[bytes]:
    """4 KiB pieces of a payload, ids exchanged for ranks where there is a table."""
    if coding.ranks is not None:
        ids = np.frombuffer(payload, coding.dtype, coding.tokens)
        payload = coding.ranks[ids].astype(coding.dtype).tobytes() + payload[ids.nbytes :]
    for at in range(0, len(payload), 4096):
        yield payload[at : at + 4096]


def _samples(reader: Reader) -> dict[int, _Sample]:
    """Blocks of every bucket, spread over the file, alternately to train and to judge."""
    index, first = reader.opened.index, reader.opened.index.first_records()
    samples = {}
    for bucket in np.unique(index.block_bucket).tolist():
        blocks = np.flatnonzero(index.block_bucket == bucket)
        nbytes = int(index.block_raw[blocks].sum())
        count = max(1, min(len(blocks), SAMPLE_BYTES * len(blocks) // max(nbytes, 1)))
        picked = blocks[np.linspace(0, len(blocks) - 1, count).astype(np.int64)].tolist()
        payloads = [
            (reader.block_payload(b), int(reader.lengths[first[b] : first[b + 1]].sum(dtype=np.int64)))
            for b in picked
        ]
        samples[bucket] = _Sample(payloads[0::2], payloads[1::2], nbytes)
    return samples
