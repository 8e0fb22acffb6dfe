"""salvage: every record that a hash still proves, and an exact list of what is lost."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import lf_format as lff
from lf_format import _layout as lay
from lf_format import cli

Write = Callable[..., Path]
Row = tuple[tuple[int, ...], tuple[bool, ...] | None]


def rows(path: Path) -> list[Row]:
    with lff.Reader(path) as reader:
        records = [reader.record(i) for i in range(len(reader))]
    return [
        (tuple(r.tokens.tolist()), None if r.loss_mask is None else tuple(r.loss_mask.tolist()))
        for r in records
    ]


def damaged(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(raw)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def test_a_whole_file_is_salvaged_whole(sample: Path, tmp_path: Path) -> None:
    report = lff.salvage(sample, tmp_path / "out.loongbin")
    assert rows(tmp_path / "out.loongbin") == rows(sample)
    assert report.output.fingerprint == lff.Reader(sample).fingerprint
    assert (report.records, report.lost, report.notes) == (64, (), ())


def test_one_damaged_record_of_a_raw_block_is_the_only_loss(sample: Path, tmp_path: Path) -> None:
    before = rows(sample)
    with lff.Reader(sample) as reader:
        at = int(reader.extents([40]).offset[0])
    damaged(sample, at)
    report = lff.salvage(sample, tmp_path / "out.loongbin")
    assert rows(tmp_path / "out.loongbin") == before[:40] + before[41:]
    assert [what for _, what in report.lost] == ["record 40: record hash"]
    assert lff.verify(tmp_path / "out.loongbin").ok


def test_a_damaged_zstd_block_is_lost_and_counted(write: Write, tmp_path: Path) -> None:
    path = write([[i % 5] * 40 for i in range(64)], codec="zstd", block_bytes=400)
    before = rows(path)
    with lff.Reader(path) as reader:
        index = reader.opened.index
        first, count = index.first_records().tolist(), index.block_count.tolist()
        damaged(path, int(index.block_offset[1]) + lay.BLOCK_HEADER_SIZE)
    report = lff.salvage(path, tmp_path / "out.loongbin")
    assert rows(tmp_path / "out.loongbin") == before[: first[1]] + before[first[2] :]
    assert [what for _, what in report.lost] == [f"{count[1]} records: payload is damaged"]


def test_a_damaged_block_header_is_lost_by_name(sample: Path, tmp_path: Path) -> None:
    with lff.Reader(sample) as reader:
        offset, count = int(reader.opened.index.block_offset[2]), int(reader.opened.index.block_count[2])
    damaged(sample, offset + 8)
    report = lff.salvage(sample, tmp_path / "out.loongbin")
    assert report.records == 64 - count
    assert report.lost == ((offset, f"{count} records: block header"),)


def test_without_its_trailer_a_file_keeps_everything_but_the_proof_of_its_flags(
    sample: Path, tmp_path: Path
) -> None:
    before = rows(sample)
    cut(sample, sample.stat().st_size - lay.TRAILER_SIZE)
    report = lff.salvage(sample, tmp_path / "out.loongbin")
    assert rows(tmp_path / "out.loongbin") == before
    assert (report.records, len(report.notes)) == (64, 1)


def test_a_truncated_file_keeps_records_of_known_length(write: Write, tmp_path: Path) -> None:
    records = [[i] * 64 for i in range(20)] + [[9] * n for n in (17, 30, 40)]
    path = write(records, block_bytes=256)
    with lff.Reader(path) as reader:
        index_at = reader.opened.trailer.index_offset
    cut(path, index_at)
    report = lff.salvage(path, tmp_path / "out.loongbin")
    assert [tokens for tokens, _ in rows(tmp_path / "out.loongbin")] == [(i,) * 64 for i in range(20)]
    assert [what for _, what in report.lost] == [
        "3 records: intact, but the record boundaries were in the lost index"
    ]


def test_recut_keeps_every_token_of_intact_blocks(write: Write, tmp_path: Path) -> None:
    path = write([[n % 256] * n for n in range(17, 60)], block_bytes=300)
    whole = [t for tokens, _ in rows(path) for t in tokens]
    with lff.Reader(path) as reader:
        index_at, n = reader.opened.trailer.index_offset, len(reader)
    cut(path, index_at)
    report = lff.salvage(path, tmp_path / "out.loongbin", recut=True)
    assert [t for tokens, _ in rows(tmp_path / "out.loongbin") for t in tokens] == whole
    assert report.records == n
    assert lff.Reader(tmp_path / "out.loongbin").flags.any() == 0


def test_masks_hide_the_lengths_when_the_index_is_lost(write: Write, tmp_path: Path) -> None:
    path = write([[1] * 64] * 4, loss_mask=True)
    with lff.Reader(path) as reader:
        index_at = reader.opened.trailer.index_offset
    cut(path, index_at)
    with pytest.raises(lff.FormatError, match="nothing intact"):
        lff.salvage(path, tmp_path / "out.loongbin", recut=True)


def test_a_damaged_header_needs_a_sibling(sample: Path, write: Write, tmp_path: Path) -> None:
    before = rows(sample)
    sibling = write([[1]], "sibling.loongbin", loss_mask=True)
    damaged(sample, 60)
    with pytest.raises(lff.FormatError, match="header"):
        lff.salvage(sample, tmp_path / "out.loongbin")
    lff.salvage(sample, tmp_path / "out.loongbin", like=sibling)
    assert rows(tmp_path / "out.loongbin") == before


def test_nothing_intact_leaves_no_output(write: Write, tmp_path: Path) -> None:
    path = write([[1, 2, 3]])
    cut(path, 8192 + 32)
    with pytest.raises(lff.FormatError, match="nothing intact"):
        lff.salvage(path, tmp_path / "out.loongbin", recut=True)
    assert not (tmp_path / "out.loongbin").exists()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_any_damage_gives_true_records_or_one_error(write: Write, tmp_path: Path, codec: str) -> None:
    dice = random.Random(5)
    records = [[dice.randrange(4) for _ in range(1 + i)] for i in range(64)]
    path = write(records, loss_mask=True, block_bytes=512, codec=codec)
    whole, known = path.read_bytes(), set(rows(path))
    for _ in range(150):
        raw = bytearray(whole)
        for _ in range(dice.choice([1, 1, 3, 20])):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        path.write_bytes(raw[: dice.choice([len(raw), len(raw), dice.randrange(len(raw))])])
        try:
            report = lff.salvage(path, tmp_path / "out.loongbin")
        except lff.FormatError:
            continue
        assert set(rows(tmp_path / "out.loongbin")) <= known
        assert lff.verify(tmp_path / "out.loongbin").ok
        assert report.records == len(rows(tmp_path / "out.loongbin"))


def test_salvage_command_names_what_is_lost(
    sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lff.Reader(sample) as reader:
        damaged(sample, int(reader.extents([40]).offset[0]))
    assert cli.main(["salvage", str(sample), "-o", f"{tmp_path}/out.loongbin"]) == 0
    output = capsys.readouterr()
    assert "63 records" in output.out
    assert "lost: record 40" in output.err


def test_neither_the_source_nor_the_model_is_replaced(sample: Path, tmp_path: Path) -> None:
    whole = tmp_path / "like.loongbin"
    whole.write_bytes(sample.read_bytes())
    for output in (sample, whole):
        with pytest.raises(lff.FormatError, match="output is one of the inputs"):
            lff.salvage(sample, output, like=whole)


def test_a_fifo_is_refused_unopened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(lff.FormatError, match="not a regular file"):
        lff.salvage(tmp_path / "fifo", tmp_path / "out.loongbin")
