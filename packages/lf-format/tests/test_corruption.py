"""Case A3: a cut or a flipped bit is refused or harmless, wherever it is."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lf_format as lff
from lf_format import _layout as lay
from lf_format.cli import main

Write = Callable[..., Path]
Contents = Callable[[Path], Any]
Readable = Callable[[Path, Any], int]


def _ends(path: Path) -> list[int]:
    with lff.Reader(path) as reader:
        opened = reader.opened
    header, trailer = opened.header, opened.trailer
    blocks = opened.index.block_offset.astype(int) + lay.BLOCK_HEADER_SIZE
    ends = [header.schema_offset + header.schema_len, header.data_offset, trailer.index_offset]
    ends += [*blocks.tolist(), *(blocks + opened.index.block_stored.astype(int)).tolist()]
    return [lay.HEADER_SIZE, *ends, trailer.index_offset + trailer.index_len, trailer.trailer_offset]


def test_a3_a_file_cut_anywhere_does_not_open(sample: Path, tmp_path: Path) -> None:
    whole = sample.read_bytes()
    cuts = {0, 1, 7, 8, len(whole) - 1, *(end + d for end in _ends(sample) for d in (-1, 0, 1))}
    for cut in sorted(cuts):
        damaged = tmp_path / "cut.loongbin"
        damaged.write_bytes(whole[:cut])
        with pytest.raises(lff.FormatError) as caught:
            lff.Reader(damaged)
        assert caught.value.path == str(damaged)
        assert caught.value.offset is not None
        assert (caught.value.expected, caught.value.found) != (None, None)
        assert main(["verify", str(damaged)]) == 1
        if lay.HEADER_SIZE <= cut < lay.HEADER_SIZE + lay.SECTION_ALIGN:
            assert caught.value.what == "file is truncated"


def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(lff.FormatError, match="not a regular file"):
            lff.Reader(path)


def test_an_index_that_does_not_fit_into_memory_is_a_format_error(
    sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("lf_format._reader.load", exhausted)
    gc.collect()  # what other tests left may close its descriptors at any time
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(lff.FormatError, match="memory"):
        lff.Reader(sample)
    assert len(os.listdir("/proc/self/fd")) == before


def test_bytes_behind_the_end_are_refused(sample: Path) -> None:
    with sample.open("ab") as file:
        file.write(bytes(128))
    with pytest.raises(lff.FormatError, match="no trailer"):
        lff.Reader(sample)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a3_every_flipped_bit_is_found_and_never_read_as_data(
    write: Write, codec: str, contents: Contents, readable: Readable, tmp_path: Path
) -> None:
    dice = random.Random(3)
    records = [[dice.randrange(4) for _ in range(1 + i)] for i in range(64)]
    path = write(records, loss_mask=True, block_bytes=512, codec=codec)
    whole, good = path.read_bytes(), contents(path)
    damaged = tmp_path / "flipped.loongbin"
    for bit in dice.sample(range(8 * len(whole)), 200) + _bits_of_each_part(path, dice):
        raw = bytearray(whole)
        raw[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(raw)
        report = lff.verify(damaged)
        assert not report.ok, f"bit {bit}"
        assert any(str(damaged) in what for _, what in report.problems)
        readable(damaged, good)


def _bits_of_each_part(path: Path, dice: random.Random) -> list[int]:
    """Two bits around each boundary of the file, so that small structures are hit too."""
    return [8 * (end + d) + dice.randrange(8) for end in _ends(path) for d in (-1, 0)]


def test_a3_200_flips_in_records_name_the_record_and_spare_the_others(
    sample: Path, contents: Contents, readable: Readable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, good = sample.read_bytes(), contents(sample)
    with lff.Reader(sample) as reader:
        tokens, masks = reader.extents(range(64), "tokens"), reader.extents(range(64), "loss_mask")
    damaged = tmp_path / "flipped.loongbin"
    dice = random.Random(9)
    for _ in range(200):
        i, where = dice.randrange(64), dice.choice([tokens, masks])
        at = int(where.offset[i]) + dice.randrange(int(where.nbytes[i]))
        raw = bytearray(whole)
        raw[at] ^= 1 << dice.randrange(8)
        damaged.write_bytes(raw)
        with lff.Reader(damaged) as reader, pytest.raises(lff.FormatError, match="record hash") as caught:
            reader.record(i)
        assert (caught.value.record, caught.value.path) == (i, str(damaged))
        assert readable(damaged, good) == 63
        assert main(["verify", "--deep", str(damaged)]) == 1
        assert f"record {i}" in capsys.readouterr().err
    assert main(["verify", str(damaged)]) == 0  # metadata is whole; only --deep reads content


def _patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a3_a_flip_that_zstd_ignores_is_still_found(
    write: Write, contents: Contents, readable: Readable
) -> None:
    """RFC 8878 has an unused bit in the frame header: the block decodes to the same bytes with it set."""
    path = write([[7] * 60] * 50, codec="zstd", block_bytes=500)
    good = contents(path)
    with lff.Reader(path) as reader:
        at = int(reader.opened.index.block_offset[0]) + lay.BLOCK_HEADER_SIZE + 4
        count = int(reader.opened.index.block_count[0])
    _patch(path, at, bytes([path.read_bytes()[at] ^ 0x10]))
    assert "hash of block 0" in lff.verify(path).problems[0][1]
    assert main(["verify", "--deep", str(path)]) == 1
    assert readable(path, good) == 50 - count


def test_a3_a_header_of_another_file_is_refused(write: Write) -> None:
    """Both headers are whole; only the root hash says that this one does not belong to these blocks."""
    path = write([[1, 2, 3]])
    other = write([[1, 2, 3]], "other.loongbin", tokenizer=lff.TokenizerInfo("another", "ff"))
    _patch(path, 0, other.read_bytes()[: lay.HEADER_SIZE])
    with pytest.raises(lff.FormatError, match="root hash"):
        lff.Reader(path)
    assert main(["verify", str(path)]) == 1


def test_nonzero_padding_is_reported(sample: Path) -> None:
    _patch(sample, lay.HEADER_SIZE + lay.SECTION_ALIGN - 3, b"\x01")
    assert lff.verify(sample).problems[0][0] == lay.HEADER_SIZE + lay.SECTION_ALIGN - 3
    assert lff.verify(sample, deep=False).ok


def test_a3_a_file_that_shrinks_while_it_is_open_is_an_error(write: Write) -> None:
    path = write([[1] * 60] * 9)
    with lff.Reader(path) as reader:
        with path.open("r+b") as file:
            file.truncate(lay.HEADER_SIZE + lay.SECTION_ALIGN + 100)
        with pytest.raises(lff.FormatError, match="ends too early"):
            reader.record(5)
