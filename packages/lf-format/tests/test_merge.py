"""merge and convert: records, numbers and hashes stay; case A1's merge part with sparse files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lf_format as lff
from lf_format import cli
from lf_format._merge import merge as merge_with_offset

Write = Callable[..., Path]
Contents = list[tuple[list[int], list[bool] | None, int]]


def contents(path: Path) -> Contents:
    with lff.Reader(path) as reader:
        records = [reader.record(i) for i in range(len(reader))]
    return [
        (r.tokens.tolist(), None if r.loss_mask is None else r.loss_mask.tolist(), r.flags) for r in records
    ]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_merge_keeps_records_in_order_and_stored_bytes(write: Write, tmp_path: Path, codec: str) -> None:
    parts = [[[1, 2], [3] * 20], [[4] * 64, [5]], []]
    options = {"loss_mask": True, "block_bytes": 64, "codec": codec}
    files = [write(records, f"{i}.loongbin", **options) for i, records in enumerate(parts)]
    report = lff.merge(files, tmp_path / "all.loongbin")
    assert contents(tmp_path / "all.loongbin") == [row for path in files for row in contents(path)]
    assert lff.verify(tmp_path / "all.loongbin").ok
    assert (report.records, report.tokens) == (4, 87)
    hashes = [h for path in files for h in lff.Reader(path).opened.index.block_hash.tolist()]
    assert lff.Reader(tmp_path / "all.loongbin").opened.index.block_hash.tolist() == hashes


@pytest.mark.parametrize("boundary", [2**31, 2**32, 2**40])
def test_a1_merge_of_sparse_files_around_a_boundary(write: Write, tmp_path: Path, boundary: int) -> None:
    records = [np.full(16, value) for value in (1, 500, 65_000)]
    options = {"vocab_size": 65_536, "buckets": (64,)}
    files = [
        write(records, f"{i}.loongbin", **options, _base_offset=boundary - shift)
        for i, shift in enumerate((128, 0))
    ]
    merge_with_offset(files, tmp_path / "all.loongbin", _base_offset=boundary - 192)
    with lff.Reader(tmp_path / "all.loongbin") as reader:
        for i in (5, 0, 3, 1, 4, 2):
            assert reader.record(i).tokens.tolist() == records[i % 3].tolist()
        offsets = reader.extents(range(6)).offset
        assert int(offsets[0]) < boundary <= int(offsets[-1])
    assert lff.verify(tmp_path / "all.loongbin").ok


@pytest.mark.parametrize("other", [{"vocab_size": 255}, {"buckets": (8, 64)}, {"loss_mask": True}], ids=repr)
def test_files_that_disagree_are_not_merged(write: Write, tmp_path: Path, other: dict[str, object]) -> None:
    files = [write([[1]], "a.loongbin"), write([[1]], "b.loongbin", **other)]
    with pytest.raises(lff.FormatError, match="differs"):
        lff.merge(files, tmp_path / "all.loongbin")
    assert not (tmp_path / "all.loongbin").exists()


def test_a_damaged_input_leaves_no_output(write: Write, tmp_path: Path) -> None:
    path = write([[1, 2, 3]])
    raw = bytearray(path.read_bytes())
    raw[int(lff.Reader(path).extents([0]).offset[0])] ^= 1
    path.write_bytes(raw)
    for action in (
        lambda: lff.merge([path], tmp_path / "out.loongbin"),
        lambda: lff.convert(path, tmp_path / "out.loongbin", codec="zstd"),
    ):
        with pytest.raises(lff.FormatError, match="hash of block 0"):
            action()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.loongbin"]


def test_output_over_an_input_is_refused(write: Write) -> None:
    path = write([[1]])
    before = path.read_bytes()
    with pytest.raises(lff.FormatError, match="one of the inputs"):
        lff.merge([path], path)
    assert path.read_bytes() == before


def test_convert_there_and_back_gives_equal_records(write: Write, tmp_path: Path) -> None:
    path = write([[7] * n for n in range(1, 65)], loss_mask=True, block_bytes=512)
    assert cli.main(["convert", str(path), "-o", f"{tmp_path}/z.loongbin", "--codec", "zstd"]) == 0
    assert (
        cli.main(["convert", f"{tmp_path}/z.loongbin", "-o", f"{tmp_path}/r.loongbin", "--codec", "raw"]) == 0
    )
    assert not lff.Reader(tmp_path / "z.loongbin").codecs_raw
    assert contents(tmp_path / "z.loongbin") == contents(path) == contents(tmp_path / "r.loongbin")
    assert lff.Reader(tmp_path / "r.loongbin").fingerprint == lff.Reader(path).fingerprint


def test_merge_command(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(write([[i]], f"{i}.loongbin")) for i in range(2)]
    assert cli.main(["merge", *files, "-o", f"{tmp_path}/all.loongbin"]) == 0
    assert "2 records, 2 tokens" in capsys.readouterr().out
    assert cli.main(["merge", *files, "-o", files[0]]) == 1
