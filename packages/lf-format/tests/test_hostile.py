"""Files that lie under valid checksums: every claim is bounded before it is believed."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lf_format as lff
from lf_format import _layout as lay
from lf_format._open import load

Write = Callable[..., Path]
Contents = Callable[[Path], Any]
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
    # unknown bits of the last three are read by definition, see the test below
    sorted(
        set(lay.Header._fields)
        - {"uuid", "tokenizer_name", "tokenizer_hash", "creator", "compat", "ro_compat", "minor"}
    ),
)
def test_hostile_header_numbers_are_refused(write: Write, name: str, tmp_path: Path) -> None:
    path = write([[1, 2, 200]])
    with lff.Reader(path) as reader:
        honest = getattr(reader.opened.header, name)
    limit = 2**16 if name == "major" else 2**32 if name == "profile" else 2**64
    for value in (v for v in U64_EXTREMES if v < limit and v != honest):
        copy = Path(shutil.copy(path, tmp_path / "hostile.loongbin"))
        _sealed(copy, header={name: value})
        _refused(copy)


@pytest.mark.parametrize(("name", "value"), [("minor", 9), ("compat", 2**63), ("ro_compat", 1)])
def test_compatible_additions_are_read(write: Write, contents: Contents, name: str, value: int) -> None:
    path = write([[1, 2, 3]])
    _sealed(path, header={name: value})
    assert contents(path) == [({"tokens": b"\1\2\3"}, 3)]


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


def test_hostile_index_numbers_are_refused_or_harmless(
    write: Write, contents: Contents, tmp_path: Path
) -> None:
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
                for i, (fields, _) in enumerate(good):
                    try:
                        record = reader.record(i)
                    except lff.FormatError:
                        continue
                    assert {name: value.tobytes() for name, value in record.items()} == fields


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

    honest = PendingBlock.pieces
    dirty = lambda self: [b"".join(honest(self)).replace(b"\3\0", b"\3\1", 1)]  # noqa: E731
    monkeypatch.setattr(PendingBlock, "pieces", dirty)
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
