"""A second reader, written from SPEC.md alone (struct, json, xxhash, zstd), agrees with the first byte for byte."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lf_format as lff

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.loongbin"))
SAMPLES = Path(__file__).parent / "golden" / "samples.lfg"
WIDTHS = {"uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "float16": 2, "float32": 4, "int64": 8}
FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}


def h(data: bytes, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(data, seed)


def u(raw: bytes, offset: int, size: int) -> int:
    return struct.unpack_from("<" + FORMATS[size], raw, offset)[0]


def up(x: int, a: int) -> int:
    return -(-x // a) * a


def text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode()


class SecondReader:
    """Sections 2-6 of SPEC.md in order, and section 8 for a .lfg."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._header()
        self._trailer()
        self._index()
        hashes = struct.pack(f"<{self.n_blocks}Q", *self.columns["blk.hash"])
        assert h(raw[56:480] + hashes + struct.pack("<Q", self.index_hash)) == self.root

    def _header(self) -> None:
        raw = self.raw
        assert raw[:8] == bytes.fromhex("89 4C 46 42 0D 0A 1A 0A")
        assert (u(raw, 8, 2), u(raw, 12, 4), u(raw, 32, 8) & ~7) == (1, 4096, 0)
        self.profile = u(raw, 96, 4)
        assert self.profile in (1, 2)
        assert u(raw, 4088, 8) == h(raw[:4088])
        self.vocab_size = u(raw, 56, 8)
        self.tokenizer = text(raw[104:360]), text(raw[360:480])
        schema = raw[u(raw, 64, 8) : u(raw, 64, 8) + u(raw, 72, 8)]
        assert h(schema) == u(raw, 80, 8)
        assert u(raw, 88, 8) == up(4096 + len(schema), 4096)
        self.schema = json.loads(schema)

    def _trailer(self) -> None:
        at = len(self.raw) - 128
        tail = self.raw[at:]
        assert tail[:8] == bytes.fromhex("89 4C 46 54 0D 0A 1A 0A")
        assert h(tail[:120]) == u(tail, 120, 8)
        self.index_at, size, self.index_hash = u(tail, 8, 8), u(tail, 16, 8), u(tail, 24, 8)
        self.n_records, self.n_tokens, self.n_blocks = u(tail, 32, 8), u(tail, 40, 8), u(tail, 48, 8)
        assert (u(tail, 56, 8), u(tail, 64, 8)) == (at, 0)
        self.root = u(tail, 72, 8)
        self.index = self.raw[self.index_at : self.index_at + size]
        assert h(self.index) == self.index_hash
        assert up(self.index_at + size, 64) == at

    def _index(self) -> None:
        index, self.columns = self.index, {}
        assert index[:4] == b"LFIX"
        assert (u(index, 8, 8), u(index, 16, 8)) == (self.n_records, self.n_blocks)
        for k in range(u(index, 4, 4)):
            entry = index[64 + 64 * k : 128 + 64 * k]
            width = {1: 1, 2: 2, 3: 4, 4: 8}[u(entry, 24, 4)]
            rows, offset, size = u(entry, 32, 8), u(entry, 40, 8), u(entry, 48, 8)
            assert (u(entry, 28, 4), size) == (0, rows * width)
            values = struct.unpack_from(f"<{rows}{FORMATS[width]}", index, offset)
            self.columns[text(entry[:24])] = values
        assert sum(self.columns["rec.length"]) == u(index, 24, 8) == self.n_tokens
        assert sum(self.columns["blk.count"]) == self.n_records
        self._dictionaries()

    def _dictionaries(self) -> None:
        """Section 5.5: (kind, base, content) of dictionary 1, 2, ..."""
        self.dictionaries: list[tuple[int, int, bytes]] = [(0, 0, b"")]
        features, codecs = u(self.raw, 32, 8), set(self.columns["blk.codec"])
        assert features >> 1 == (2 in codecs) + 2 * (3 in codecs)
        if features & 1:
            raw, at = bytes(self.columns["dict.bytes"]), 0
            names = ("dict.kind", "dict.base", "dict.length")
            for kind, base, length in zip(*(self.columns[name] for name in names), strict=True):
                content = zstandard.ZstdDecompressor().decompress(raw[at : at + length])
                self.dictionaries.append((kind, base, content))
                at += length
            assert at == len(raw)

    def _decoded(self, stored: bytes, head: bytes, ids: range) -> bytes:
        """Section 4: the payload of a block."""
        codec, number = u(head, 6, 1), u(head, 8, 4)
        if codec == 0:
            return stored
        count = sum(self.columns["rec.length"][i] for i in ids)
        width = WIDTHS[self.schema["fields"][0]["dtype"]]
        if codec == 2:
            bits = max((self.vocab_size - 1).bit_length(), 1)
            size = (count * bits + 7) // 8
            value = int.from_bytes(stored[:size], "little")
            plane = self._plane([value >> k * bits & (1 << bits) - 1 for k in range(count)])
            rest = stored[size:]
            return plane + bytes(up(len(plane), 64) - len(plane)) * bool(rest) + rest
        kind, base, content = self.dictionaries[number]
        zstd = zstandard.ZstdCompressionDict(content) if kind == 1 else None
        payload = zstandard.ZstdDecompressor(dict_data=zstd).decompress(stored)
        if codec == 3:
            table = struct.unpack(
                f"<{self.vocab_size}I", content if kind == 2 else self.dictionaries[base][2]
            )
            ranks = struct.unpack(f"<{count}{FORMATS[width]}", payload[: count * width])
            payload = self._plane([table[rank] for rank in ranks]) + payload[count * width :]
        return payload

    def _plane(self, ids: list[int]) -> bytes:
        return struct.pack(f"<{len(ids)}{FORMATS[WIDTHS[self.schema['fields'][0]['dtype']]]}", *ids)

    def items(self, field: dict[str, Any], i: int) -> int:
        """Values of a field of record i."""
        first, *rest = field["shape"] or [1]
        if first == -1:
            own = f"len.{field['name']}" if field is not self._length_field() else "rec.length"
            first = self.columns["rec.length" if self.profile == 1 else own][i]
        return first * math.prod(rest)

    def _length_field(self) -> dict[str, Any] | None:
        return next((f for f in self.schema["fields"] if f["kind"] == "tokens"), None)

    def field_size(self, field: dict[str, Any], i: int) -> int:
        items = self.items(field, i)
        return (items + 7) // 8 if field["kind"] == "bits" else items * WIDTHS[field["dtype"]]

    def samples(self) -> Iterator[dict[str, bytes]]:
        """Field bytes of every record of a .lfg, bits as one byte each."""
        first = 0
        for block, count in enumerate(self.columns["blk.count"]):
            ids = range(first, first + count)
            for i, parts in zip(ids, self._parts(block, ids), strict=True):
                sample = dict(zip((f["name"] for f in self.schema["fields"]), parts, strict=True))
                for field in self.schema["fields"]:
                    if field["kind"] == "bits":
                        raw = sample[field["name"]]
                        bits = [raw[j // 8] >> j % 8 & 1 for j in range(self.items(field, i))]
                        sample[field["name"]] = bytes(bits)
                yield sample
            first += count

    def records(self) -> Iterator[tuple[list[int], list[bool] | None, int]]:
        """(tokens, loss mask, flags) of every record."""
        first = 0
        for block in range(self.n_blocks):
            count = self.columns["blk.count"][block]
            yield from self._block(block, range(first, first + count))
            first += count

    def _block(self, block: int, ids: range) -> Iterator[tuple[list[int], list[bool] | None, int]]:
        for i, parts in zip(ids, self._parts(block, ids), strict=True):
            length = self.columns["rec.length"][i]
            width = FORMATS[WIDTHS[self.schema["fields"][0]["dtype"]]]
            tokens = list(struct.unpack(f"<{length}{width}", parts[0]))
            mask = [bool(parts[1][j // 8] >> j % 8 & 1) for j in range(length)] if len(parts) == 2 else None
            yield tokens, mask, self.columns["rec.flags"][i]

    def _parts(self, block: int, ids: range) -> Iterator[list[bytes]]:
        """Checked field bytes of the records of a block."""
        at = self.columns["blk.offset"][block]
        head = self.raw[at : at + 64]
        assert head[:4] == b"LFBK"
        assert h(head[:56]) == u(head, 56, 8)
        assert (u(head, 12, 4), u(head, 16, 8)) == (len(ids), ids.start)
        assert u(head, 6, 1) == self.columns["blk.codec"][block]
        payload = self.raw[at + 64 : at + 64 + u(head, 32, 8)]
        assert h(payload) == u(head, 40, 8) == self.columns["blk.hash"][block]
        payload = self._decoded(payload, head, ids)
        assert len(payload) == u(head, 24, 8)
        planes = self._planes(payload, ids)
        edges = [0, *self.schema["buckets"]]
        for k, i in enumerate(ids):
            parts = [plane[k] for plane in planes]
            state = 0
            for part in parts:
                state = h(part, state)
            assert state % 2**32 == self.columns["rec.hash"][i]
            assert edges[u(head, 4, 2)] < self.columns["rec.length"][i] <= edges[u(head, 4, 2) + 1]
            yield parts

    def _planes(self, payload: bytes, ids: range) -> list[list[bytes]]:
        planes, at = [], 0
        for field in self.schema["fields"]:
            at, plane = up(at, 64), []
            for i in ids:
                size = self.field_size(field, i)
                plane.append(payload[at : at + size])
                at += size
            planes.append(plane)
        assert at == len(payload)
        return planes


def _first(path: Path) -> list[tuple[list[int], list[bool] | None, int]]:
    with lff.Reader(path) as reader:
        records = [reader.record(i) for i in range(len(reader))]
    return [
        (r.tokens.tolist(), None if r.loss_mask is None else r.loss_mask.tolist(), r.flags) for r in records
    ]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_both_readers_agree_on_the_golden_files(path: Path) -> None:
    second = SecondReader(path.read_bytes())
    with lff.Reader(path) as reader:
        assert second.tokenizer == (reader.tokenizer.name, reader.tokenizer.hash)
        assert f"{second.root:016x}" == reader.fingerprint
    assert list(second.records()) == _first(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), vocab_size=st.sampled_from([200, 5000, 100_000]), loss_mask=st.booleans())
def test_both_readers_agree_on_any_raw_file(
    write: Callable[..., Path], data: st.DataObject, vocab_size: int, loss_mask: bool
) -> None:
    ids = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=64)
    records = data.draw(st.lists(ids, max_size=20))
    path = write(records, vocab_size=vocab_size, loss_mask=loss_mask, block_bytes=100)
    assert list(SecondReader(path.read_bytes()).records()) == _first(path)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    vocab_size=st.sampled_from([2, 200, 5000, 100_000]),
    loss_mask=st.booleans(),
    codec=st.sampled_from(["packed", "zstd"]),
)
def test_both_readers_agree_on_any_coded_file(
    write: Callable[..., Path], data: st.DataObject, vocab_size: int, loss_mask: bool, codec: str
) -> None:
    ids = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=64)
    records = data.draw(st.lists(ids, max_size=20))
    path = write(records, vocab_size=vocab_size, loss_mask=loss_mask, block_bytes=100)
    coded = path.with_name("coded.loongbin")
    lff.convert(path, coded, codec=codec)
    assert list(SecondReader(coded.read_bytes()).records()) == _first(coded) == _first(path)


def test_both_readers_agree_on_dictionaries(write: Callable[..., Path]) -> None:
    path = write([[k % 251, *range(20, 60)] for k in range(6000)], block_bytes=1024, vocab_size=60_000)
    coded = path.with_name("coded.loongbin")
    report = lff.convert(path, coded, codec=lff.CodecOptions("zstd", dictionary="auto", rank_table="auto"))
    assert any(d.kept for d in report.decisions)
    assert list(SecondReader(coded.read_bytes()).records()) == _first(coded) == _first(path)


def test_the_worked_example_of_the_record_hash() -> None:
    spec = (Path(__file__).parents[1] / "SPEC.md").read_text()
    assert f"0x{h(bytes([1, 2, 3])):016x}" in spec
    assert f"0x{h(bytes([1, 2, 3])) % 2**32:08x}" in spec


def test_both_readers_agree_on_the_golden_samples() -> None:
    second = SecondReader(SAMPLES.read_bytes())
    with lff.Reader(SAMPLES) as reader:
        assert second.schema["meta"] == reader.meta
        assert f"{second.root:016x}" == reader.fingerprint
        first = [{name: v.tobytes() for name, v in reader.record(i).items()} for i in range(len(reader))]
    assert list(second.samples()) == first
    assert len(first) == 3
