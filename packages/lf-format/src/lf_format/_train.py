"""Choosing codecs, dictionaries and ranks: made from some blocks of a bucket, judged on others, kept where they pay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from lf_format._codecs import PACKED, RAW, REMAP_ZSTD, ZSTD, Coding, bits_of, encode
from lf_format._decision import Decision
from lf_format._dictionary import KIND_RANKS, KIND_ZSTD, Dictionary, rank_table
from lf_format._layout import PROFILE_LOONGBIN
from lf_format._options import CodecOptions
from lf_format._reader import Reader

LEAST_SAVING = 0.02  # of the bytes stored without it, the dictionary's own bytes counted
SAMPLE_BYTES = 16 << 20  # of every bucket, half to train and half to judge
ALL_SAMPLE_BYTES = 256 << 20  # of all buckets together
LEAST_BLOCKS = 4
SMALLEST, LARGEST = 1 << 14, 1 << 20  # dictionary bytes
SHARE = 192  # a dictionary of 1/192 of its bucket costs about 0.7 % of it, both compressed
MOST_RANKED = 1 << 22  # ids in a rank table: 16 MiB
SEGMENT = 1024  # bytes COVER copies at a time, with matches counted over 8
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Way:
    """How the blocks of one bucket are stored: codec, zstd dictionary, and the bytes that all of them will take."""

    codec: int
    dictionary: Dictionary | None
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """How every bucket of a file is stored, the rank table of the file, and what was measured."""

    bare: Coding
    ways: dict[int, Way]
    ranks: Dictionary | None
    decisions: tuple[Decision, ...]

    def codec(self, bucket: int) -> int:
        """Codec of the blocks of `bucket`."""
        return self.ways[bucket].codec

    def coding(self, bucket: int, tokens: int) -> Coding:
        """What `encode` needs for a block with `tokens` ids."""
        chosen = self.ways[bucket].dictionary
        zstd = None if chosen is None else chosen.zstd
        return replace(_with_ranks(self.bare, self.ranks), tokens=tokens, dictionary=zstd)


@dataclass(frozen=True)
class _Sample:
    """Blocks of a bucket: (payload, ids in it) to train and to judge, and all bytes of the bucket."""

    train: list[tuple[bytes, int]]
    judge: list[tuple[bytes, int]]
    nbytes: int


def plan(reader: Reader, options: CodecOptions) -> Plan:
    """How the blocks of `reader` are to be stored. With the rank table and without, all is measured; the table is
    kept when it saves another 2 % of the file with its bytes counted."""
    bare = Coding(bits_of(reader.vocab_size), reader.token_dtype)
    present = np.unique(reader.opened.index.block_bucket).tolist()
    if not options.measured:
        ways = {b: Way(options.codec_id(reader.buckets[b]), None, 0) for b in present}
        return Plan(bare, ways, None, ())
    raw = [b for b in present if reader.buckets[b] <= options.raw_up_to]
    samples = _samples(reader, [b for b in present if b not in raw])
    ways, decisions = _choose(samples, reader, options, bare)
    table = None
    if options.rank_table == "auto":
        table, decision, ranked = _ranked(samples, reader, options, bare, ways)
        ways, decisions = (ways, decisions) if table is None else ranked
        decisions = [decision, *decisions]
    ways |= {b: Way(RAW, None, 0) for b in raw}
    return Plan(bare, ways, table, tuple(decisions))


Chosen = tuple[dict[int, Way], list[Decision]]


def _ranked(
    samples: dict[int, _Sample], reader: Reader, options: CodecOptions, bare: Coding, plain: dict[int, Way]
) -> tuple[Dictionary | None, Decision, Chosen]:
    """The rank table if it pays, what was measured about it, and the ways with it."""
    without = sum(way.nbytes for way in plain.values())
    if reader.vocab_size > MOST_RANKED:
        reason = "the vocabulary is too large for a table"
        return None, Decision(None, "rank table", 0, without, 0, False, reason), ({}, [])
    counts = np.zeros(reader.vocab_size, np.int64)
    for sample in samples.values():
        for payload, tokens in sample.train:
            ids = np.frombuffer(payload, reader.token_dtype, tokens)
            counts += np.bincount(ids, minlength=reader.vocab_size)[: reader.vocab_size]
    entry = Dictionary(KIND_RANKS, 0, rank_table(counts).tobytes())
    chosen = _choose(samples, reader, options, _with_ranks(bare, entry))
    size = len(entry.stored)
    saved = without - sum(way.nbytes for way in chosen[0].values()) - size
    kept = bool(samples) and saved >= LEAST_SAVING * without
    decision = Decision(None, "rank table", size, without, saved, kept, _reason(saved, without))
    return entry if kept else None, decision, chosen


def _with_ranks(coding: Coding, entry: Dictionary | None) -> Coding:
    return coding if entry is None else replace(coding, table=entry.table, ranks=entry.ranks)


def _choose(
    samples: dict[int, _Sample], reader: Reader, options: CodecOptions, coding: Coding
) -> tuple[dict[int, Way], list[Decision]]:
    """The way of every bucket, ids exchanged for ranks where `coding` has a table, and what was measured."""
    ways, decisions = {}, []
    for bucket, sample in samples.items():
        edge = reader.buckets[bucket]
        way, found = _zstd(sample, edge, options, coding)
        if options.codec == "auto":
            packable = reader.opened.header.profile == PROFILE_LOONGBIN
            way, decision = _cheapest(sample, edge, way, coding if packable else None)
            found = [decision, *found] if way.codec in (ZSTD, REMAP_ZSTD) else [decision]
        ways[bucket] = way
        decisions += found
    return ways, decisions


def _zstd(sample: _Sample, edge: int, options: CodecOptions, coding: Coding) -> tuple[Way, list[Decision]]:
    """zstd for one bucket, with a dictionary where that pays."""
    codec = ZSTD if coding.table is None else REMAP_ZSTD
    without = _projected(sample, options.level, coding, codec)
    plain = Way(codec, None, without)
    if options.dictionary == "off":
        return plain, []
    if len(sample.judge) < LEAST_BLOCKS // 2:
        return plain, [Decision(edge, "dictionary", 0, without, 0, False, "too few blocks to judge")]
    content = _trained(sample, coding)
    if content is None:
        return plain, [Decision(edge, "dictionary", 0, without, 0, False, "cannot be trained")]
    entry = Dictionary(KIND_ZSTD, int(codec == REMAP_ZSTD), content)
    size = len(entry.stored)
    saved = without - _projected(sample, options.level, replace(coding, dictionary=entry.zstd), codec) - size
    kept = saved >= LEAST_SAVING * without
    decision = Decision(edge, "dictionary", size, without, saved, kept, _reason(saved, without))
    return Way(codec, entry, without - saved) if kept else plain, [decision]


def _cheapest(sample: _Sample, edge: int, zstd: Way, packable: Coding | None) -> tuple[Way, Decision]:
    """raw, packed or zstd, in the order of what reading costs: a dearer one must save another 2 % of raw."""
    raw = sample.nbytes
    best, tried = Way(RAW, None, raw), [f"zstd saves {1 - zstd.nbytes / raw:.1%}"]
    if packable is not None:
        packed = Way(PACKED, None, _projected(sample, 0, packable, PACKED))
        tried.insert(0, f"packed saves {1 - packed.nbytes / raw:.1%}")
        best = packed if _pays(packed, best, raw) else best
    best = zstd if _pays(zstd, best, raw) else best
    name = {RAW: "raw", PACKED: "packed"}.get(best.codec, "zstd")
    reason = f"{', '.join(tried)} of {raw} bytes"
    return best, Decision(edge, f"codec {name}", 0, raw, raw - best.nbytes, True, reason)


def _pays(candidate: Way, best: Way, raw: int) -> bool:
    return best.nbytes - candidate.nbytes >= LEAST_SAVING * raw


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


def _samples(reader: Reader, buckets: list[int]) -> dict[int, _Sample]:
    """Blocks of every one of `buckets`, spread over the file, alternately to train and to judge."""
    index, first = reader.opened.index, reader.opened.index.first_records()
    room = min(SAMPLE_BYTES, ALL_SAMPLE_BYTES // max(len(buckets), 1))
    samples = {}
    for bucket in buckets:
        blocks = np.flatnonzero(index.block_bucket == bucket)
        nbytes = int(index.block_raw[blocks].sum())
        count = max(1, min(len(blocks), room * len(blocks) // max(nbytes, 1)))
        picked = blocks[np.linspace(0, len(blocks) - 1, count).astype(np.int64)].tolist()
        payloads = [
            (reader.block_payload(b), int(reader.lengths[first[b] : first[b + 1]].sum(dtype=np.int64)))
            for b in picked
        ]
        samples[bucket] = _Sample(payloads[0::2], payloads[1::2], nbytes)
    return samples
