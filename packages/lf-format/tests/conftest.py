"""Shared arrangement: small files and the ways to damage them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lf_format as lff

BYTES = lff.ByteTokenizer().info
Records = Sequence[Sequence[int] | np.ndarray[Any, Any]]
Write = Callable[..., Path]


def _write_file(path: Path, records: Records, **options: Any) -> Path:
    """Writes `records` and returns the path; options as for Writer."""
    settings: dict[str, Any] = {"vocab_size": 256, "tokenizer": BYTES, "buckets": (8, 16, 64)} | options
    masks = settings.get("loss_mask", False)
    with lff.Writer(path, **settings) as writer:
        for tokens in records:
            writer.append(tokens, np.asarray(tokens) % 2 == 0 if masks else None)
    return path


@pytest.fixture(scope="session")
def write_file() -> Write:
    """Writes records to a path; options as for Writer."""
    return _write_file


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes records to a file in tmp_path."""

    def call(records: Records, name: str = "a.loongbin", **options: Any) -> Path:
        return _write_file(tmp_path / name, records, **options)

    return call


@pytest.fixture
def sample(write: Write) -> Path:
    """64 records of 1..64 byte ids in several blocks, with loss masks."""
    random = np.random.default_rng(7)
    records = [random.integers(0, 256, 1 + i) for i in range(64)]
    return write(records, loss_mask=True, block_bytes=512)


Content = tuple[dict[str, bytes], int]


def _content(record: lff.Record) -> Content:
    return {name: value.tobytes() for name, value in record.items()}, record.flags


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], list[Content]]:
    """Field bytes and flags of every record of a file."""

    def call(path: Path) -> list[Content]:
        with lff.Reader(path) as reader:
            return [_content(reader.record(i)) for i in range(len(reader))]

    return call


@pytest.fixture(scope="session")
def readable() -> Callable[[Path, list[Content]], int]:
    """How many records of a damaged file still read; every one that does must be what `good` says."""

    def call(path: Path, good: list[Content]) -> int:
        try:
            reader = lff.Reader(path)
        except lff.FormatError:
            return 0
        count = 0
        with reader:
            assert len(reader) == len(good)
            for i, expected in enumerate(good):
                try:
                    assert _content(reader.record(i)) == expected
                    count += 1
                except lff.FormatError:
                    continue
        return count

    return call
