"""Packed ids, zstd with dictionaries, ranks: exact round trips, and damage that is refused."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lf_format as lff
from lf_format import _layout as lay
from lf_format import cli
from lf_format._codecs import PACKED, REMAP_ZSTD, ZSTD, Coding, bits_of, decode, encode, pack_ids, unpack_ids
from lf_format._dictionary import Dictionaries, Dictionary, columns, rank_of, rank_table
from lf_format._errors import Place

Write = Callable[..., Path]
Contents = Callable[[Path], Any]
Readable = Callable[[Path, Any], int]
U16 = np.dtype("<u2")
MEASURED = lff.CodecOptions("zstd", dictionary="auto", rank_table="auto")
FRAME = Dictionary(2, 0, np.array([2, 0, 1, 3], "<u4").tobytes()).stored


@pytest.fixture(scope="module")
def phrases() -> list[np.ndarray[Any, Any]]:
    """Records made of common phrases in a skewed vocabulary of 60,000: dictionaries and ranks both pay."""
    dice = np.random.default_rng(1)
    known = [dice.integers(0, 60_000, 24) for _ in range(400)]
    return [np.concatenate([known[k] for k in dice.integers(0, 400, 4)])[:90] for _ in range(9000)]


@pytest.fixture
def coded(write: Write, phrases: list[Any], tmp_path: Path) -> Path:
    """A file with dictionaries."""
    path = write(phrases, vocab_size=60_000, buckets=(64, 128), block_bytes=8192, loss_mask=True)
    lff.convert(path, tmp_path / "coded.loongbin", codec=MEASURED)
    return tmp_path / "coded.loongbin"


@pytest.fixture
def packed(write: Write, tmp_path: Path) -> Path:
    """A file with packed ids and loss masks."""
    dice = np.random.default_rng(2)
    records = [dice.integers(0, 1000, 1 + i) for i in range(64)]
    path = write(records, vocab_size=1000, loss_mask=True, block_bytes=512)
    lff.convert(path, tmp_path / "packed.loongbin", codec="packed")
    return tmp_path / "packed.loongbin"


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(), vocab_size=st.sampled_from([1, 2, 3, 255, 256, 257, 1000, 65_536, 65_537, 2**31, 2**32])
)
def test_packed_ids_unpack(data: st.DataObject, vocab_size: int) -> None:
    ids = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=50))
    dtype = np.dtype("u1" if vocab_size <= 256 else "<u2" if vocab_size <= 65_536 else "<u4")
    bits = bits_of(vocab_size)
    packed = pack_ids(np.array(ids, dtype), bits)
    assert len(packed) == -(-len(ids) * bits // 8)
    assert sum(v << k * bits for k, v in enumerate(ids)) == int.from_bytes(packed, "little")
    assert unpack_ids(packed, len(ids), bits, dtype).tolist() == ids


def test_ids_over_several_chunks_pack() -> None:
    ids = np.random.default_rng(0).integers(0, 40_000, 200_003).astype(U16)
    assert (unpack_ids(pack_ids(ids, 16), len(ids), 16, U16) == ids).all()
    assert (unpack_ids(pack_ids(ids % 8192, 13), len(ids), 13, U16) == ids % 8192).all()


@pytest.mark.parametrize("loss_mask", [False, True])
@pytest.mark.parametrize("vocab_size", [2, 1000, 100_000])
def test_convert_to_packed_ids_and_back(
    write: Write, tmp_path: Path, vocab_size: int, loss_mask: bool, contents: Contents
) -> None:
    dice = np.random.default_rng(3)
    records = [dice.integers(0, vocab_size, 1 + i) for i in range(64)]
    path = write(records, vocab_size=vocab_size, loss_mask=loss_mask, block_bytes=512)
    report = lff.convert(path, tmp_path / "p.loongbin", codec="packed")
    assert contents(tmp_path / "p.loongbin") == contents(path)
    assert lff.verify(tmp_path / "p.loongbin").problems == []
    with lff.Reader(tmp_path / "p.loongbin") as reader:
        opened = reader.opened
    assert opened.header.incompat == lay.INCOMPAT_PACKED
    assert set(opened.index.block_codec.tolist()) == {PACKED}
    assert report.decisions == ()
    lff.convert(tmp_path / "p.loongbin", tmp_path / "raw.loongbin", codec="raw")
    assert lff.Reader(tmp_path / "raw.loongbin").fingerprint == lff.Reader(path).fingerprint


def test_ids_that_fill_their_width_stay_raw(write: Write, tmp_path: Path) -> None:
    lff.convert(write([[1, 2, 255]]), tmp_path / "p.loongbin", codec="packed")
    assert lff.Reader(tmp_path / "p.loongbin").codecs_raw
    assert lff.verify(tmp_path / "p.loongbin").ok


def test_dictionaries_that_pay_are_kept_and_the_file_is_smaller(
    coded: Path, tmp_path: Path, contents: Contents
) -> None:
    plain = tmp_path / "a.loongbin"
    report = lff.convert(plain, tmp_path / "again.loongbin", codec=MEASURED)
    without = lff.convert(plain, tmp_path / "zstd.loongbin", codec="zstd")
    assert report.bytes < without.bytes
    kept = [d for d in report.decisions if d.kept]
    assert kept
    assert all(d.saved >= 0.02 * d.without for d in kept)
    assert contents(coded) == contents(plain)
    assert lff.verify(coded).problems == []
    assert coded.read_bytes() == (tmp_path / "again.loongbin").read_bytes()


def test_dictionaries_that_do_not_pay_are_dropped_with_a_reason(write: Write, tmp_path: Path) -> None:
    dice = np.random.default_rng(4)
    path = write([dice.integers(0, 256, 64) for _ in range(300)], block_bytes=1024)
    report = lff.convert(path, tmp_path / "z.loongbin", codec=MEASURED)
    assert not any(d.kept for d in report.decisions)
    assert {d.kind for d in report.decisions} == {"rank table", "dictionary"}
    assert all("saves" in d.reason for d in report.decisions)
    with lff.Reader(tmp_path / "z.loongbin") as reader:
        assert (reader.opened.header.incompat, reader.opened.dictionaries.entries) == (0, [])


@pytest.mark.parametrize("records", [[], [[1, 2, 3]]], ids=["empty", "one"])
def test_small_files_get_no_dictionary(
    write: Write, tmp_path: Path, records: list[list[int]], contents: Contents
) -> None:
    path = write(records)
    report = lff.convert(path, tmp_path / "z.loongbin", codec=MEASURED)
    assert not any(d.kept for d in report.decisions)
    assert contents(tmp_path / "z.loongbin") == contents(path)


def test_dictionaries_cannot_unfold_into_any_amount_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lf_format._dictionary.MAX_ALL_BYTES", 40)
    entries = [Dictionary(2, 0, np.array(order, "<u4").tobytes()) for order in ([0, 1, 2, 3], [3, 2, 1, 0])]
    header = lay.Header(bytes(16), 4, 4096, 10, 0, 8192, "", "", "", incompat=lay.INCOMPAT_ZSTD_DICT)
    codec = np.array([ZSTD], "u1")
    assert len(Dictionaries(columns(entries, [0]), codec, header, Place("file")).entries) == 2
    with pytest.raises(lff.FormatError, match="size of a dictionary"):
        Dictionaries(columns([*entries, entries[0]], [0]), codec, header, Place("file"))


def test_a_vocabulary_too_large_for_ranks_is_said_so(
    write: Write, tmp_path: Path, contents: Contents
) -> None:
    path = write([[2**32 - 1, 0, 7]] * 40, vocab_size=2**32)
    report = lff.convert(path, tmp_path / "z.loongbin", codec=MEASURED)
    assert report.decisions[0].reason == "the vocabulary is too large for a table"
    assert contents(tmp_path / "z.loongbin") == contents(path)


def test_ranks_decode_with_and_without_a_dictionary() -> None:
    ids = np.array([7, 7, 7, 2, 2, 9] * 50, U16)
    table = rank_table(np.bincount(ids, minlength=10))
    assert table[:3].tolist() == [7, 2, 9]
    assert (rank_of(table)[table] == np.arange(10)).all()
    coding = Coding(4, U16, len(ids), None, table, rank_of(table))
    payload = ids.tobytes() + b"tail"
    codec, stored = encode(payload, REMAP_ZSTD, 3, coding)
    assert codec == REMAP_ZSTD
    assert decode(stored, codec, len(payload), "file", 0, coding) == payload


def test_a_rank_beyond_the_vocabulary_is_refused() -> None:
    payload = np.full(100, 10, U16).tobytes()
    stored = encode(payload, ZSTD, 3)[1]
    with pytest.raises(lff.FormatError, match="rank in the block"):
        decode(
            stored, REMAP_ZSTD, len(payload), "file", 0, Coding(4, U16, 100, None, np.arange(10, dtype="<u4"))
        )


def test_merge_keeps_the_dictionaries_of_every_input(
    coded: Path, packed: Path, write: Write, phrases: list[Any], tmp_path: Path, contents: Contents
) -> None:
    options = {"vocab_size": 60_000, "buckets": (64, 128), "loss_mask": True}
    other = write(phrases[::-1][:4000], "o.loongbin", block_bytes=8192, **options)
    lff.convert(other, tmp_path / "other.loongbin", codec=MEASURED)
    files = [coded, tmp_path / "other.loongbin", coded, write([[1, 2]], "r.loongbin", **options)]
    lff.merge(files, tmp_path / "all.loongbin")
    assert contents(tmp_path / "all.loongbin") == [row for path in files for row in contents(path)]
    assert lff.verify(tmp_path / "all.loongbin").problems == []
    used = [lff.Reader(p).opened.dictionaries.entries for p in (coded, tmp_path / "other.loongbin")]
    assert len(lff.Reader(tmp_path / "all.loongbin").opened.dictionaries.entries) == sum(map(len, used))
    lff.merge([packed, packed], tmp_path / "packed2.loongbin")
    assert contents(tmp_path / "packed2.loongbin") == 2 * contents(packed)


@pytest.mark.parametrize("name", ["coded", "packed"])
def test_flipped_bits_are_found_and_never_read_as_data(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, contents: Contents, readable: Readable
) -> None:
    path = request.getfixturevalue(name)
    dice, whole = random.Random(6), path.read_bytes()
    good = contents(path)
    damaged = tmp_path / "flipped.loongbin"
    for _ in range(60 if name == "packed" else 4):
        bit = dice.randrange(8 * len(whole))
        raw = bytearray(whole)
        raw[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(raw)
        assert not lff.verify(damaged).ok, f"bit {bit}"
        readable(damaged, good)


@settings(max_examples=300, deadline=None)
@given(stored=st.binary(max_size=80), codec=st.sampled_from([ZSTD, PACKED, REMAP_ZSTD]), n=st.integers(1, 40))
def test_any_bytes_decode_exactly_or_are_refused(stored: bytes, codec: int, n: int) -> None:
    coding = Coding(9, U16, n, None, np.arange(400, dtype="<u4"))
    try:
        payload = decode(stored, codec, 2 * n, "file", 0, coding)
    except lff.FormatError:
        return
    assert len(payload) == 2 * n
    if codec == PACKED:
        assert pack_ids(np.frombuffer(payload, U16), 9) == stored


@settings(max_examples=200, deadline=None)
@given(
    kinds=st.lists(st.integers(0, 3), max_size=3),
    bases=st.lists(st.integers(0, 4), max_size=3),
    lengths=st.lists(st.sampled_from([0, len(FRAME), len(FRAME), 2**32 - 1]), max_size=3),
    content=st.sampled_from([FRAME, FRAME * 2, FRAME * 3, b"", FRAME[:-1]]) | st.binary(max_size=40),
    of_block=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    incompat=st.integers(0, 7),
)
def test_any_dictionary_columns_parse_or_are_refused(
    kinds: list[int], bases: list[int], lengths: list[int], content: bytes, of_block: list[int], incompat: int
) -> None:
    extra = {
        "blk.dict": np.array(of_block, "<u4"),
        "dict.kind": np.array(kinds, "u1"),
        "dict.base": np.array(bases, "<u4"),
        "dict.length": np.array(lengths, "<u4"),
        "dict.bytes": np.frombuffer(content, "u1"),
    }
    header = lay.Header(bytes(16), 4, 4096, 10, 0, 8192, "", "", "", incompat=incompat)
    try:
        found = Dictionaries(extra, np.array([ZSTD, REMAP_ZSTD], "u1"), header, Place("file"))
    except lff.FormatError:
        return
    assert len(found.entries) == len(kinds)
    found.coding(1, 3, np.dtype("u1"))


@pytest.mark.parametrize("incompat", [0, lay.INCOMPAT_PACKED | lay.INCOMPAT_REMAP, lay.INCOMPAT_ZSTD_DICT])
def test_feature_bits_must_say_what_the_blocks_need(packed: Path, incompat: int) -> None:
    raw = bytearray(packed.read_bytes())
    struct.pack_into("<Q", raw, 32, incompat)
    struct.pack_into("<Q", raw, 4088, lay.xxh3(bytes(raw[:4088])))
    packed.write_bytes(raw)
    with pytest.raises(lff.FormatError, match=r"feature bits|columns of dictionaries"):
        lff.Reader(packed)


@pytest.mark.parametrize("name", ["coded", "packed"])
def test_salvage_of_a_file_without_trailer_decodes_with_its_index(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, contents: Contents
) -> None:
    path = request.getfixturevalue(name)
    before = contents(path)
    path.write_bytes(path.read_bytes()[: -lay.TRAILER_SIZE])
    lff.salvage(path, tmp_path / "out.loongbin")
    assert contents(tmp_path / "out.loongbin") == before
    assert lff.verify(tmp_path / "out.loongbin").ok


def test_convert_command_reports_each_dictionary(
    coded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"{tmp_path}/cli.loongbin"
    assert cli.main(["convert", str(coded), "-o", out, "--codec", "zstd"]) == 0
    text = capsys.readouterr().out
    assert "bucket 128: dictionary of" in text
    assert "all buckets: rank table of" in text
    off = ["--dictionary", "off", "--rank-table", "off", "--zstd-level", "1"]
    assert cli.main(["convert", str(coded), "-o", out, "--codec", "zstd", *off]) == 0
    assert "dictionary" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--codec", "raw", "--dictionary", "auto"],
        ["--codec", "packed", "--rank-table", "auto"],
        ["--codec", "raw", "--zstd-level", "5"],
        ["--zstd-level", "23"],
    ],
)
def test_convert_command_refuses_what_does_not_go_together(
    write: Write, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", str(write([[1]])), "-o", f"{tmp_path}/b.loongbin", *arguments]) == 2
    assert "expected" in capsys.readouterr().err
    assert not (tmp_path / "b.loongbin").exists()
