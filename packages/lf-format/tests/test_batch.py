"""`Writer.append_batch` writes what `append` would write, and refuses what `append` would refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lf_format as lff
from lf_format import Field

N = 11
FIELDS = [
    Field.image("pixels", (4, 5, 3)),
    Field.tokens("input_ids"),
    Field.tensor("state", "float32", (3,)),
    Field.tensor("cloud", "float32", (-1, 2)),
    Field.bits("mask", (10,)),
    Field.bits("ragged_mask"),
    Field.tensor("index", "int32", ()),
    Field.bytes("task"),
]
FLAGS = [1, 0, 2, 3, 1, 2, 3, 3, 1, 0, 2]


def columns() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "pixels": random.integers(0, 256, (N, 4, 5, 3)).astype(np.uint8),
        "input_ids": [[k % 7] * (1 + k % 4) for k in range(N)],
        "state": random.standard_normal((N, 3)),
        "cloud": [random.standard_normal((k % 3, 2)).astype(np.float32) for k in range(N)],
        "mask": random.integers(0, 2, (N, 10)).astype(bool),
        "ragged_mask": [[1] * k for k in range(N)],
        "index": np.arange(N),
        "task": [b"x" * k for k in range(N)],
    }


def writer(path: Path, **options: Any) -> lff.Writer:
    return lff.Writer(path, fields=FIELDS, vocab_size=7, buckets=(2, 4), block_bytes=300, **options)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_batch_gives_the_bytes_of_single_appends(tmp_path: Path, codec: str, lazy: bool) -> None:
    values = columns()
    with writer(tmp_path / "single.lfg", codec=codec) as single:
        for k, flag in enumerate(FLAGS):
            sample = {name: column[k] for name, column in values.items()}
            single.append(sample, document_start=bool(flag & 1), document_end=bool(flag & 2))
    with writer(tmp_path / "batch.lfg", codec=codec) as batch:
        for part in (slice(0, 0), slice(0, 7), slice(7, N)):
            chosen = {name: column[part] for name, column in values.items()}
            if lazy:
                chosen["pixels"] = iter(chosen["pixels"])
            batch.append_batch(chosen, FLAGS[part])
    assert (tmp_path / "batch.lfg").read_bytes() == (tmp_path / "single.lfg").read_bytes()
    assert lff.verify(tmp_path / "batch.lfg").ok


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"index": np.arange(N) + 2.0**40}, "'index'"),
        ({"state": np.where(np.arange(N)[:, None] == 4, 1e300, np.zeros((N, 3)))}, "document 2.*'state'"),
        ({"mask": np.full((N, 10), 2)}, "'mask'"),
        ({"input_ids": [[1]] * (N - 1) + [[7]]}, "document 5.*vocabulary"),
        ({"pixels": np.zeros((N, 5, 4, 3), np.uint8)}, "'pixels'"),
        ({"task": [b""] * (N - 1)}, "one length"),
        ({"task": iter([b""] * N)}, "fixed shape"),
        ({"more": [1] * N}, "all fields"),
    ],
)
def test_a_batch_with_a_wrong_value_is_refused_whole(
    tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    with writer(tmp_path / "a.lfg") as out:
        with pytest.raises(lff.InputError, match=what):
            out.append_batch(columns() | change, FLAGS)
        out.append_batch(columns(), FLAGS)
    with lff.Reader(tmp_path / "a.lfg") as reader:
        assert len(reader) == N


def test_an_iterator_that_ends_early_or_gives_a_wrong_value_is_an_error(tmp_path: Path) -> None:
    def pixels(n: int, last: Any) -> Iterator[Any]:
        yield from np.zeros((n, 4, 5, 3), np.uint8)
        yield last

    out = writer(tmp_path / "a.lfg")
    with pytest.raises(lff.InputError, match="ended early"):
        out.append_batch(columns() | {"pixels": pixels(3, np.zeros((4, 5, 3), np.uint8))}, FLAGS)
    with pytest.raises(lff.InputError, match="'pixels'"):
        out.append_batch(columns() | {"pixels": pixels(3, np.zeros((4, 5, 2), np.uint8))}, FLAGS)
    with pytest.raises(lff.InputError, match="flags"):
        out.append_batch(columns(), [4] * N)
    out.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_loongbin_takes_no_batch(tmp_path: Path) -> None:
    info = lff.TokenizerInfo("t", "0")
    out = lff.Writer(tmp_path / "a.loongbin", vocab_size=7, tokenizer=info, buckets=(4,))
    with pytest.raises(lff.FormatError, match=r"a batch needs a \.lfg"):
        out.append_batch({}, [])
    out.abort()


def test_values_are_copied_unless_nobody_can_change_them(tmp_path: Path) -> None:
    fields = [Field.image("pixels", (2, 2, 3))]
    changing = np.zeros((2, 2, 3), np.uint8)
    fixed = np.frombuffer(bytes(range(24)), np.uint8).reshape(2, 2, 2, 3)
    with lff.Writer(tmp_path / "a.lfg", fields=fields) as out:
        out.append({"pixels": changing})
        out.append_batch({"pixels": iter([changing, fixed[1]])}, [3, 3])
        out.append({"pixels": np.frombuffer(bytes(range(12)), np.uint8).reshape(2, 2, 3)})
        changing[:] = 9
    with lff.Reader(tmp_path / "a.lfg") as reader:
        found = reader.gather(range(4), "pixels")
    assert isinstance(found, np.ndarray)
    assert found.reshape(4, -1).tolist() == [[0] * 12, [0] * 12, list(range(12, 24)), list(range(12))]


def test_ids_of_one_length_are_the_length_of_their_records(tmp_path: Path) -> None:
    fields = [lff.Field.tokens("ids", "uint16", length=5), lff.Field.tensor("x", "float32", (2,))]
    rows = [{"ids": np.full(5, i), "x": np.full(2, i)} for i in range(6)]
    paths = [tmp_path / name for name in ("single.lfg", "batch.lfg")]
    for path in paths:
        with lff.Writer(path, fields=fields, vocab_size=100, buckets=(8,)) as writer:
            if path.name == "batch.lfg":
                columns = {name: np.stack([row[name] for row in rows]) for name in ("ids", "x")}
                writer.append_batch(columns, [3] * len(rows))
            else:
                for row in rows:
                    writer.append(row)
    with lff.open_dataset(paths) as dataset:
        assert dataset.lengths.tolist() == [5] * 12
        assert [int(dataset.record(i)["ids"][0]) for i in range(12)] == [*range(6)] * 2
    assert paths[0].read_bytes() == paths[1].read_bytes()
