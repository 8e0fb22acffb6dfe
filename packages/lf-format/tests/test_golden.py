"""Files of version 1.0 stay readable, and the writer still produces them byte for byte.

Their description is in golden/README.md. A change that breaks this is a new format version: add files, keep these.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lf_format as lff

GOLDEN = Path(__file__).parent / "golden"
TOKENIZER = lff.TokenizerInfo("golden", "00ff")
UUID = bytes(range(16))
# name: (vocab_size, loss mask, [(tokens, mask, starts a document, ends it)])
FILES = {
    "bytes": (
        256,
        False,
        [([1, 2, 3], None, True, True), ([255] * 9, None, True, False), ([0], None, False, True)],
    ),
    "masked16": (300, True, [([299, 0, 7, 8, 9, 10, 11, 12, 13], [1, 0, 1, 1, 0, 0, 0, 1, 1], True, True)]),
    "wide32": (70_000, False, [([0, 65_535, 65_536, 69_999], None, True, True)]),
    "empty": (256, True, []),
}

SAMPLE_FIELDS = (
    lff.Field.tokens(),
    lff.Field.bits("loss_mask", role="loss_mask"),
    lff.Field.image("pixels", (2, 3, 3)),
    lff.Field.image("photo"),
    lff.Field.tensor("cloud", "float32", (-1, 3), role="points"),
    lff.Field.tensor("state", "float16", (2,), role="state"),
    lff.Field.bits("action_mask", (3, 3), role="action_mask"),
    lff.Field.tensor("episode", "int64", ()),
    lff.Field.bytes("task", role="text"),
)
META = {"fps": 20, "note": "für Menschen"}


def _samples() -> list[dict[str, Any]]:
    return [
        {
            "input_ids": list(range(300 - n, 300)),
            "loss_mask": [k % 2 for k in range(n)],
            "pixels": np.arange(18).reshape(2, 3, 3) * n,
            "photo": b"\xff\xd8\xff" + b"x" * n,
            "cloud": np.arange(3 * (n - 1)).reshape(-1, 3) / 8,
            "state": [0.5, -n],
            "action_mask": np.eye(3, dtype=bool),
            "episode": n - 4,
            "task": f"task {n}".encode() if n > 1 else b"",
        }
        for n in (1, 9, 3)
    ]


def _write_samples(path: Path) -> None:
    with lff.Writer(
        path, fields=SAMPLE_FIELDS, vocab_size=300, buckets=(4, 16), tokenizer=TOKENIZER, meta=META, uuid=UUID
    ) as writer:
        for k, sample in enumerate(_samples()):
            writer.append(sample, None, k == 0, k == 2)


def _write(path: Path, name: str) -> None:
    vocab_size, loss_mask, records = FILES[name]
    with lff.Writer(
        path, vocab_size=vocab_size, tokenizer=TOKENIZER, buckets=(4, 16), loss_mask=loss_mask, uuid=UUID
    ) as writer:
        for record in records:
            writer.append(*record)


@pytest.mark.parametrize("name", FILES)
def test_golden_file_reads_as_it_was_written(name: str) -> None:
    vocab_size, _, records = FILES[name]
    path = GOLDEN / f"{name}.loongbin"
    assert lff.verify(path).problems == []
    with lff.Reader(path) as reader:
        assert (reader.vocab_size, reader.tokenizer, reader.buckets) == (vocab_size, TOKENIZER, (4, 16))
        found = [reader.record(i) for i in range(len(reader))]
    by_bucket = sorted(records, key=lambda record: len(record[0]) > 4)
    assert [record.tokens.tolist() for record in found] == [tokens for tokens, *_ in by_bucket]
    assert [record.flags for record in found] == [start | end << 1 for _, _, start, end in by_bucket]
    masks = [None if record.loss_mask is None else record.loss_mask.astype(int).tolist() for record in found]
    assert masks == [mask for _, mask, *_ in by_bucket]


@pytest.mark.parametrize(
    ("name", "records", "features"),
    [
        ("packed", [[299, 0, 7], [5, 6], [1, 2, 3, 4, 5, 299]], 2),
        ("dictionaries", [[7] * 8 + [9, 3] + [7] * 6, [7] * 16, [9] * 16], 5),
    ],
)
def test_golden_coded_file_reads(name: str, records: list[list[int]], features: int) -> None:
    path = GOLDEN / f"{name}.loongbin"
    assert lff.verify(path).problems == []
    with lff.Reader(path) as reader:
        assert reader.opened.header.incompat == features
        assert [reader.record(i).tokens.tolist() for i in range(3)] == records


def test_golden_zstd_file_reads() -> None:
    # Not reproduced: the compressed bytes belong to the zstd version.
    path = GOLDEN / "zstd.loongbin"
    assert lff.verify(path).problems == []
    with lff.Reader(path) as reader:
        assert not reader.codecs_raw
        assert [reader.record(i).tokens.tolist() for i in range(4)] == [[7] * 16] * 4


@pytest.mark.parametrize("name", FILES)
def test_writer_still_produces_the_golden_bytes(
    name: str, tmp_path: Path, write_golden: Callable[[str], bytes]
) -> None:
    # The creator names the program's version, which may change: header bytes 480..607 and the checksum over them.
    _same_but_for_the_creator(write_golden(name), (GOLDEN / f"{name}.loongbin").read_bytes())


def test_golden_samples_read_as_they_were_written() -> None:
    path = GOLDEN / "samples.lfg"
    assert lff.verify(path).problems == []
    with lff.Reader(path) as reader:
        assert (reader.fields, reader.meta, reader.buckets) == (SAMPLE_FIELDS, META, (4, 16))
        records = [reader.record(i) for i in range(3)]
    for record, k in zip(records, (0, 2, 1), strict=True):  # in bucket order
        for name, value in _samples()[k].items():
            found = record[name].tobytes() if isinstance(value, bytes) else record[name].tolist()
            assert found == (value if isinstance(value, bytes) else np.asarray(value).tolist()), name


def test_writer_still_produces_the_golden_samples(tmp_path: Path) -> None:
    _write_samples(tmp_path / "a.lfg")
    _same_but_for_the_creator((tmp_path / "a.lfg").read_bytes(), (GOLDEN / "samples.lfg").read_bytes())


def _same_but_for_the_creator(found: bytes, golden: bytes) -> None:
    for part in (slice(0, 480), slice(608, 4088), slice(4096, None)):
        assert found[part] == golden[part]


@pytest.fixture
def write_golden(tmp_path: Path) -> Callable[[str], bytes]:
    def call(name: str) -> bytes:
        _write(tmp_path / name, name)
        return (tmp_path / name).read_bytes()

    return call
