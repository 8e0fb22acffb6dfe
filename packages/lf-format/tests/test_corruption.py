"""Cases A1 and A3: damage is refused or harmless, wherever it is; every claim of a hostile file is bounded first."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lf_format as lff
from lf_format import _layout as lay
from lf_format._index import Index, cumulative, parse_index, plane_maps
from lf_format._open import load
from lf_format.cli import main

Write = Callable[..., Path]
Contents = list[tuple[bytes, bytes | None, int]]


def contents(path: Path) -> Contents:
    with lff.Reader(path) as reader:
        return [_bytes(reader.record(i)) for i in range(len(reader))]


def _bytes(record: lff.Record) -> tuple[bytes, bytes | None, int]:
    return (
        record.tokens.tobytes(),
        None if record.loss_mask is None else record.loss_mask.tobytes(),
        record.flags,
    )


# --- A1: offsets beyond 2**31 and 2**32 ---


@pytest.mark.parametrize("boundary", [2**31, 2**32, 2**40])
@pytest.mark.parametrize(("before", "first"), [(128, 24), (64, 8), (128, 32)], ids=["-16", "+16", "0"])
def test_records_around_a_boundary_read_back(write: Write, boundary: int, before: int, first: int) -> None:
    records = [np.full(first, 1), np.full(16, 500), np.full(16, 65_000)]
    path = write(records, vocab_size=65_536, buckets=(64,), _base_offset=boundary - before)
    with lff.Reader(path) as reader:
        second = int(reader.extents([1]).offset[0])
        assert second - boundary == {(128, 24): -16, (64, 8): 16, (128, 32): 0}[before, first]
        for i in (2, 0, 1):
            assert reader.record(i).tokens.tolist() == records[i].tolist()
    assert lff.verify(path).ok


def test_sums_of_lengths_do_not_wrap() -> None:
    lengths = np.full(40_000, 65_535, np.int32)
    assert int(cumulative(lengths)[-1]) == 40_000 * 65_535 > 2**31
    fields = (lff.Field("tokens", "tokens", "uint32", "input"),)
    maps, raw = plane_maps(fields, [lengths.astype("<u4")], np.array([0, 40_000]))
    assert int(maps[0].within[-1]) == int(raw[0]) == 4 * 40_000 * 65_535 > 2**32


# --- A3: truncation and flipped bits ---


def _ends(path: Path) -> list[int]:
    with lff.Reader(path) as reader:
        opened = reader.opened
    header, trailer = opened.header, opened.trailer
    blocks = opened.index.block_offset.astype(int) + lay.BLOCK_HEADER_SIZE
    ends = [header.schema_offset + header.schema_len, header.data_offset, trailer.index_offset]
    ends += [*blocks.tolist(), *(blocks + opened.index.block_stored.astype(int)).tolist()]
    return [lay.HEADER_SIZE, *ends, trailer.index_offset + trailer.index_len, trailer.trailer_offset]


def test_a_file_cut_anywhere_does_not_open(sample: Path, tmp_path: Path) -> None:
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
def test_every_flipped_bit_is_found_and_never_read_as_data(write: Write, codec: str, tmp_path: Path) -> None:
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
        _same_or_refused(damaged, good)


def _bits_of_each_part(path: Path, dice: random.Random) -> list[int]:
    """Two bits around each boundary of the file, so that small structures are hit too."""
    return [8 * (end + d) + dice.randrange(8) for end in _ends(path) for d in (-1, 0)]


def _same_or_refused(path: Path, good: Contents) -> int:
    """Records that still read, all of them bit-identical to `good`."""
    try:
        reader = lff.Reader(path)
    except lff.FormatError:
        return 0
    readable = 0
    with reader:
        assert len(reader) == len(good)
        for i, expected in enumerate(good):
            try:
                assert _bytes(reader.record(i)) == expected
                readable += 1
            except lff.FormatError:
                continue
    return readable


def test_a_flip_in_one_record_names_it_and_spares_the_others(
    sample: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = contents(sample)
    with lff.Reader(sample) as reader:
        at = int(reader.extents([40]).offset[0])
    _patch(sample, at, bytes([sample.read_bytes()[at] ^ 0x10]))
    with lff.Reader(sample) as reader, pytest.raises(lff.FormatError, match="record hash") as caught:
        reader.record(40)
    assert (caught.value.record, caught.value.offset) == (40, at)
    assert _same_or_refused(sample, good) == 63
    assert main(["verify", "--deep", str(sample)]) == 1
    assert "record 40" in capsys.readouterr().err
    assert main(["verify", str(sample)]) == 0  # metadata is whole; only --deep reads content


def _patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_nonzero_padding_is_reported(sample: Path) -> None:
    _patch(sample, lay.HEADER_SIZE + lay.SECTION_ALIGN - 3, b"\x01")
    assert lff.verify(sample).problems[0][0] == lay.HEADER_SIZE + lay.SECTION_ALIGN - 3
    assert lff.verify(sample, deep=False).ok


def test_a_file_that_shrinks_while_it_is_open_is_an_error(write: Write) -> None:
    path = write([[1] * 60] * 9)
    with lff.Reader(path) as reader:
        with path.open("r+b") as file:
            file.truncate(lay.HEADER_SIZE + lay.SECTION_ALIGN + 100)
        with pytest.raises(lff.FormatError, match="ends too early"):
            reader.record(5)


# --- random mutations, with and without repaired checksums ---


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_random_mutations_never_give_wrong_data(write: Write, codec: str, tmp_path: Path) -> None:
    records = [[i % 3] * (1 + 9 * i % 60) for i in range(12)]
    path = write(records, block_bytes=128, codec=codec, loss_mask=True)
    whole, good = path.read_bytes(), contents(path)
    target = tmp_path / "mutated.loongbin"
    dice = random.Random(11)
    for _ in range(1000):
        target.write_bytes(_mutated(whole, dice))
        _same_or_refused(target, good)


def _mutated(whole: bytes, dice: random.Random) -> bytes:
    raw = bytearray(whole)
    for _ in range(dice.randint(1, 4)):
        at, size = dice.randrange(len(raw)), dice.choice([1, 2, 8, 64])
        other = dice.randrange(len(whole))
        raw[at : at + size] = dice.choice(
            [dice.randbytes(size), b"\0" * size, b"\xff" * size, whole[other : other + size], b""]
        )
    return bytes(raw)


U64_EXTREMES = [0, 1, 63, 64, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def _sealed(path: Path, **changes: Any) -> None:
    """Rewrites header, index and trailer of `path` with `changes`, all checksums valid: a lie with good hashes."""
    raw = bytearray(path.read_bytes())
    with lff.Reader(path) as reader:
        opened = load(reader.fileno(), str(path))
    header = opened.header._replace(**changes.get("header", {}))
    raw[: lay.HEADER_SIZE] = header.pack()
    at, size = opened.trailer.index_offset, opened.trailer.index_len
    index = bytearray(raw[at : at + size])
    for offset, data in changes.get("index", {}).items():
        index[offset : offset + len(data)] = data
    raw[at : at + size] = index
    digest = lay.xxh3(bytes(index))
    hashes = opened.index.block_hash.tobytes()
    trailer = opened.trailer._replace(
        index_hash=digest, root_hash=lay.root_hash(bytes(raw[:4096]), hashes, digest)
    )
    trailer = trailer._replace(**changes.get("trailer", {}))
    raw[-lay.TRAILER_SIZE :] = trailer.pack()
    path.write_bytes(raw)


def _refused(path: Path) -> None:
    with pytest.raises(lff.FormatError):
        lff.Reader(path)
    assert not lff.verify(path).ok


@pytest.mark.parametrize(
    "name",
    [n for n in lay.Header._fields if n not in ("uuid", "tokenizer_name", "tokenizer_hash", "creator")],
)
def test_hostile_header_numbers_are_refused(write: Write, name: str, tmp_path: Path) -> None:
    path = write([[1, 2, 200]])
    with lff.Reader(path) as reader:
        honest = getattr(reader.opened.header, name)
    limit = 2**16 if name in ("major", "minor") else 2**32 if name == "profile" else 2**64
    for value in (v for v in U64_EXTREMES if v < limit and v != honest):
        if name in ("compat", "ro_compat", "minor"):
            continue  # unknown bits of these are read by definition, see the test below
        copy = Path(shutil.copy(path, tmp_path / "hostile.loongbin"))
        _sealed(copy, header={name: value})
        _refused(copy)


@pytest.mark.parametrize(("name", "value"), [("minor", 9), ("compat", 2**63), ("ro_compat", 1)])
def test_compatible_additions_are_read(write: Write, name: str, value: int) -> None:
    path = write([[1, 2, 3]])
    _sealed(path, header={name: value})
    assert contents(path)[0][0] == b"\1\2\3"


def test_an_unknown_incompatible_feature_is_named(write: Write) -> None:
    path = write([[1, 2, 3]])
    _sealed(path, header={"incompat": 1 << 40})
    with pytest.raises(lff.FormatError, match="features") as caught:
        lff.Reader(path)
    assert caught.value.found == hex(1 << 40)


@pytest.mark.parametrize("name", [n for n in lay.Trailer._fields if n != "index_hash"])
def test_hostile_trailer_numbers_are_refused(write: Write, name: str, tmp_path: Path) -> None:
    path = write([[1, 2, 3]])
    with lff.Reader(path) as reader:
        honest = getattr(reader.opened.trailer, name)
    for value in (v for v in U64_EXTREMES if v != honest):
        copy = Path(shutil.copy(path, tmp_path / "hostile.loongbin"))
        _sealed(copy, trailer={name: value})
        if name == "prev_trailer":  # only followed by verify
            assert not lff.verify(copy).ok
        else:
            _refused(copy)


def test_hostile_index_numbers_are_refused_or_harmless(write: Write, tmp_path: Path) -> None:
    """Every 8-byte word of the index, replaced by extremes under valid hashes."""
    path = write([[1, 2, 3], [4] * 20], block_bytes=1, loss_mask=True)
    good = contents(path)
    with lff.Reader(path) as reader:
        size = reader.opened.trailer.index_len
    copy = tmp_path / "hostile.loongbin"
    for at in range(0, size, 8):
        for value in U64_EXTREMES[::3] + U64_EXTREMES[-1:]:
            shutil.copy(path, copy)
            _sealed(copy, index={at: struct.pack("<Q", value)})
            try:
                reader = lff.Reader(copy)
            except lff.FormatError:
                continue
            with reader:
                # What is not protected by a redundant statement (hash, flags, unused bytes) may differ; bytes may not.
                for i, (tokens, mask, _) in enumerate(good):
                    try:
                        record = reader.record(i)
                    except lff.FormatError:
                        continue
                    assert (record.tokens.tobytes(), record.loss_mask.tobytes()) == (tokens, mask)


# --- files that lie consistently: hashes are right, statements are not ---


def _column_at(path: Path, name: str) -> int:
    with lff.Reader(path) as reader:
        trailer = reader.opened.trailer
    raw = path.read_bytes()[trailer.index_offset :][: trailer.index_len]
    return next(c.offset for c in lay.parse_index_header(raw, "file", 0)[1] if c.name == name)


@pytest.mark.parametrize(
    ("column", "said"), [("blk.max_id", "largest id"), ("rec.hash", "record 0: record hash")]
)
def test_verify_finds_a_false_statement_in_the_index(write: Write, column: str, said: str) -> None:
    path = write([[1, 2, 3]])
    _sealed(path, index={_column_at(path, column): struct.pack("<I", 77)})
    assert said in lff.verify(path).problems[0][1]
    assert lff.verify(path, deep=False).ok


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("blk.stored_len", struct.pack("<Q", 2), "stored length of block 0"),
        ("blk.raw_len", struct.pack("<Q", 4), "stored length|decoded length"),
        ("rec.flags", b"\4", "record flags"),
        ("rec.length", struct.pack("<I", 9), "token count|decoded length|too long"),
        ("blk.bucket", struct.pack("<H", 1), "too short for its bucket"),
        ("blk.bucket", struct.pack("<H", 3), "bucket of block 0"),
        ("blk.codec", b"\4", "codec of block 0"),
        ("blk.count", struct.pack("<I", 2), "records of all blocks"),
        ("blk.offset", struct.pack("<Q", 2**40), "offset of block 0"),
        ("blk.max_id", struct.pack("<I", 256), "largest id of block 0"),
    ],
)
def test_an_index_that_contradicts_itself_does_not_open(
    write: Write, column: str, value: bytes, said: str
) -> None:
    path = write([[1, 2, 3]])
    _sealed(path, index={_column_at(path, column): value})
    with pytest.raises(lff.FormatError, match=said):
        lff.Reader(path)


def test_check_vocab_does_not_trust_a_false_largest_id(write: Write) -> None:
    path = write([[1, 2, 3]])
    _sealed(path, index={_column_at(path, "blk.max_id"): struct.pack("<I", 77)})
    with lff.Reader(path) as reader, pytest.raises(lff.FormatError, match="largest id of block 0"):
        reader.check_vocab(50)


def test_spare_bits_that_are_not_zero_are_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lf_format._writer.pack_bits", lambda mask: b"\xff")
    path = write([[1, 2, 3]], loss_mask=True)
    with lff.Reader(path) as reader, pytest.raises(lff.FormatError, match="spare bits"):
        reader.record(0)
    assert "spare bits" in lff.verify(path).problems[0][1]


def test_padding_inside_a_payload_must_be_zero(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from lf_format._blocks import PendingBlock

    honest = PendingBlock.payload
    monkeypatch.setattr(PendingBlock, "payload", lambda self: honest(self).replace(b"\3\0", b"\3\1", 1))
    path = write([[1, 2, 3]], loss_mask=True)
    assert "padding before plane loss_mask" in lff.verify(path).problems[0][1]


@pytest.mark.parametrize(
    "schema",
    [
        b"{}",
        b"[]",
        b"nonsense",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":1,"a":1}',
        b'{"buckets":[8],"fields":[],"version":1}',
        b'{"buckets":[8], "fields":[],"version":1}',
        b'{"buckets":[' + b"9" * 5000 + b'],"fields":[],"version":1}',
        b'{"buckets":[NaN],"fields":[],"version":1}',
        b'{"buckets":[true],"fields":[],"version":1}',
        b'{"buckets":{"a":1},"fields":[],"version":1}',
        b'{"buckets":[8],"fields":[],"version":2}',
    ],
    ids=lambda s: s[:24].decode("latin1"),
)
def test_hostile_schemas_are_refused(schema: bytes) -> None:
    from lf_format._schema import parse_schema

    with pytest.raises(lff.FormatError) as caught:
        parse_schema(schema, 256, "file", 4096)
    assert len(str(caught.value)) < 600


def test_a_zstd_block_that_states_a_huge_size_is_refused_before_it_allocates() -> None:
    import zstandard

    from lf_format._codecs import decode

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(lff.FormatError, match="decoded size"):
        decode(bomb, 1, 100, "file", 0)
    for junk in (b"", b"abc", bomb[:-3], bomb + b"x"):
        with pytest.raises(lff.FormatError):
            decode(junk, 1, 1 << 24, "file", 0)


# --- the append chain that the layout allows ---


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


def test_a_file_can_grow_by_a_new_index_and_trailer(write: Write) -> None:
    path = write([[1], [2, 2]])
    for extra in ([[3, 3]], [[4], [5]]):
        _append(path, extra)
    assert [tokens for tokens, _, _ in contents(path)] == [b"\1", b"\2\2", b"\3\3", b"\4", b"\5"]
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
