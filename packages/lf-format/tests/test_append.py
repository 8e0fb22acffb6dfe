"""Files that grew as SPEC.md section 7 allows: a new index over all blocks, and the chain of trailers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import lf_format as lff
from lf_format import _layout as lay
from lf_format._index import Index, parse_index

Write = Callable[..., Path]
Contents = Callable[[Path], Any]


def _append(path: Path, records: list[list[int]]) -> None:
    """Appends one block as SPEC.md section 7 says: new block, new index over all, new trailer."""
    old = path.read_bytes()
    with lff.Reader(path) as reader:
        index, trailer, n = reader.opened.index, reader.opened.trailer, len(reader)
    payload = b"".join(map(bytes, records))
    lengths = [len(r) for r in records]
    block = lay.BlockHeader(0, 0, 0, len(records), n, len(payload), len(payload), lay.xxh3(payload))
    at = lay.align(len(old), lay.SECTION_ALIGN)
    new = {
        "lengths": lengths, "hashes": [lay.xxh3(bytes(r)) & 0xFFFFFFFF for r in records], "flags": [3] * len(records),
        "block_offset": [at], "block_count": [len(records)], "block_bucket": [0], "block_codec": [0],
        "block_raw": [len(payload)], "block_stored": [len(payload)], "block_hash": [block.payload_hash],
        "block_max_id": [max(map(max, records))],
    }  # fmt: skip
    joined = Index(**{k: np.append(getattr(index, k), np.array(v, np.uint64)) for k, v in new.items()})
    packed = joined.pack()
    digest = lay.xxh3(packed)
    body = bytearray(old.ljust(at, b"\0") + block.pack() + payload)
    index_at = lay.align(len(body), lay.SECTION_ALIGN)
    body = bytearray(bytes(body).ljust(index_at, b"\0") + packed)
    end = lay.align(len(body), lay.BLOCK_ALIGN)
    parsed = parse_index(packed, "file", 0)
    root = lay.root_hash(old[:4096], parsed.block_hash.tobytes(), digest)
    counts = (n + len(records), int(parsed.lengths.sum()), len(parsed.block_count))
    tail = lay.Trailer(index_at, len(packed), digest, *counts, end, trailer.trailer_offset, root)
    path.write_bytes(bytes(body).ljust(end, b"\0") + tail.pack())


def test_a_file_can_grow_by_a_new_index_and_trailer(write: Write, contents: Contents) -> None:
    path = write([[1], [2, 2]])
    for extra in ([[3, 3]], [[4], [5]]):
        _append(path, extra)
    assert [fields["tokens"] for fields, _ in contents(path)] == [b"\1", b"\2\2", b"\3\3", b"\4", b"\5"]
    assert lff.verify(path).problems == []


def test_every_flip_in_a_grown_file_is_found(write: Write, tmp_path: Path) -> None:
    path = write([[1], [2, 2]])
    _append(path, [[3, 3]])
    whole = path.read_bytes()
    dice = random.Random(5)
    damaged = tmp_path / "flipped.loongbin"
    for bit in dice.sample(range(8 * len(whole)), 150):
        raw = bytearray(whole)
        raw[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(raw)
        assert not lff.verify(damaged).ok, f"bit {bit}"
