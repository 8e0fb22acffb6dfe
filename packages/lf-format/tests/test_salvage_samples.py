"""salvage of .lfg files: every sample that a hash still proves, whatever its fields."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lf_format as lff
from lf_format import Field, cli
from lf_format import _layout as lay

Contents = Callable[[Path], Any]
RAGGED = (
    Field.tokens(),
    Field.bits("mask", role="loss_mask"),
    Field.image("photo"),
    Field.tensor("cloud", "float32", (-1, 3)),
    Field.tensor("state", "float16", (7,)),
    Field.bytes("task"),
)
FIXED = (
    Field.image("pixels", (4, 5, 3)),
    Field.tensor("state", "float32", (7,)),
    Field.bits("flags", (3, 3)),
)


def _value(field: Field, i: int, dice: np.random.Generator) -> Any:
    if field.kind == "tokens":
        return dice.integers(0, 300, 1 + i % 16)
    if field.name == "mask":
        return dice.random(1 + i % 16) < 0.5
    if field.name == "photo":
        return b"\xff\xd8\xff" + dice.bytes(i % 9)
    if field.kind == "bytes":
        return f"task {i}".encode()
    shape = (i % 4, *field.shape[1:]) if field.ragged else field.shape
    return dice.integers(0, 2, shape).astype(field.numpy_dtype)


@pytest.fixture
def write_samples(tmp_path: Path) -> Callable[..., Path]:
    """40 samples of `fields`, in several blocks."""

    def call(fields: Sequence[Field], name: str = "a.lfg", **options: Any) -> Path:
        dice = np.random.default_rng(5)
        settings: dict[str, Any] = {"vocab_size": 300, "block_bytes": 600, "meta": {"fps": 5}}
        edges = {"buckets": (8, 16)} if any(f.kind == "tokens" for f in fields) else {}
        with lff.Writer(tmp_path / name, fields=fields, **settings | edges | options) as writer:
            for i in range(40):
                writer.append({f.name: _value(f, i, dice) for f in fields}, None, i % 10 == 0, i % 10 == 9)
        return tmp_path / name

    return call


def damaged(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(raw)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_whole_file_is_salvaged_whole(
    write_samples: Callable[..., Path], tmp_path: Path, codec: str
) -> None:
    path = write_samples(RAGGED, codec=codec)
    report = lff.salvage(path, tmp_path / "out.lfg")
    assert report.output.fingerprint == lff.Reader(path).fingerprint
    assert (report.records, report.lost, report.notes) == (40, (), ())
    assert lff.Reader(tmp_path / "out.lfg").meta == {"fps": 5}


@pytest.mark.parametrize("field", ["photo", "cloud", "state", "mask"])
def test_one_damaged_sample_of_a_raw_block_is_the_only_loss(
    write_samples: Callable[..., Path], contents: Contents, tmp_path: Path, field: str
) -> None:
    path = write_samples(RAGGED)
    before = contents(path)
    with lff.Reader(path) as reader:
        damaged(path, int(reader.extents([13], field).offset[0]))
    report = lff.salvage(path, tmp_path / "out.lfg")
    assert contents(tmp_path / "out.lfg") == before[:13] + before[14:]
    assert [what for _, what in report.lost] == ["record 13: record hash"]
    assert lff.verify(tmp_path / "out.lfg").ok


def test_a_damaged_zstd_block_is_lost_and_counted(
    write_samples: Callable[..., Path], contents: Contents, tmp_path: Path
) -> None:
    path = write_samples(RAGGED, codec="zstd")
    before = contents(path)
    with lff.Reader(path) as reader:
        index = reader.opened.index
        first, count = index.first_records().tolist(), index.block_count.tolist()
        damaged(path, int(index.block_offset[1]) + lay.BLOCK_HEADER_SIZE)
    report = lff.salvage(path, tmp_path / "out.lfg")
    assert contents(tmp_path / "out.lfg") == before[: first[1]] + before[first[2] :]
    assert [what for _, what in report.lost] == [f"{count[1]} records: payload is damaged"]


def test_without_its_trailer_a_file_keeps_every_sample(
    write_samples: Callable[..., Path], contents: Contents, tmp_path: Path
) -> None:
    path = write_samples(RAGGED)
    before = contents(path)
    path.write_bytes(path.read_bytes()[: -lay.TRAILER_SIZE])
    report = lff.salvage(path, tmp_path / "out.lfg")
    assert contents(tmp_path / "out.lfg") == before
    assert "no trailer that confirms" in report.notes[0]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_samples_of_fixed_shape_need_no_index(
    write_samples: Callable[..., Path], contents: Contents, tmp_path: Path, codec: str
) -> None:
    path = write_samples(FIXED, codec=codec)
    before = contents(path)
    with lff.Reader(path) as reader:
        index_at, blocks = reader.opened.trailer.index_offset, len(reader.opened.index.block_count)
    path.write_bytes(path.read_bytes()[:index_at])
    report = lff.salvage(path, tmp_path / "out.lfg")
    assert [fields for fields, _ in contents(tmp_path / "out.lfg")] == [fields for fields, _ in before]
    assert len(report.notes) == blocks  # the document flags of each are lost
    assert lff.verify(tmp_path / "out.lfg").ok


def test_ragged_samples_without_an_index_are_lost_by_name(
    write_samples: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_samples(RAGGED)
    with lff.Reader(path) as reader:
        index_at = reader.opened.trailer.index_offset
    path.write_bytes(path.read_bytes()[:index_at])
    for recut in (False, True):
        with pytest.raises(lff.FormatError, match="nothing intact"):
            lff.salvage(path, tmp_path / "out.lfg", recut=recut)
    assert not (tmp_path / "out.lfg").exists()


def test_a_damaged_schema_needs_a_sibling(
    write_samples: Callable[..., Path], contents: Contents, tmp_path: Path
) -> None:
    path, sibling = write_samples(RAGGED), write_samples(RAGGED, "b.lfg")
    before = contents(path)
    damaged(path, lay.HEADER_SIZE + 5)
    with pytest.raises(lff.FormatError, match="schema"):
        lff.salvage(path, tmp_path / "out.lfg")
    arguments = ["salvage", str(path), "-o", f"{tmp_path}/out.lfg", "--like", str(sibling)]
    assert cli.main(arguments) == 0
    assert contents(tmp_path / "out.lfg") == before


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("fields", [RAGGED, FIXED], ids=["ragged", "fixed"])
def test_any_damage_gives_true_samples_or_one_error(
    write_samples: Callable[..., Path], contents: Contents, tmp_path: Path, fields: Any, codec: str
) -> None:
    dice = random.Random(5)
    path = write_samples(fields, codec=codec)
    whole, known = path.read_bytes(), [found for found, _ in contents(path)]
    for _ in range(100):
        raw = bytearray(whole)
        for _ in range(dice.choice([1, 1, 3, 20])):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        path.write_bytes(raw[: dice.choice([len(raw), len(raw), dice.randrange(len(raw))])])
        try:
            report = lff.salvage(path, tmp_path / "out.lfg")
        except lff.FormatError:
            continue
        kept = contents(tmp_path / "out.lfg")
        assert all(found in known for found, _ in kept)
        assert lff.verify(tmp_path / "out.lfg").ok
        assert report.records == len(kept)
