"""The container by the byte: what SPEC.md says, decoded here with nothing but struct, zstandard and xxhash."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from ckpt_states import bits, state
from hypothesis import given, settings
from hypothesis import strategies as st

import lf_ckpt
from lf_ckpt import codec
from lf_ckpt.jsonio import canonical, decode_item, encode_item, parse_canonical

Record = tuple[tuple[Any, ...], bytes]
SIZES = {"F32": 4, "BF16": 2, "I64": 8}


def read_by_the_spec(store: Path, folder: str) -> dict[str, bytes]:
    """Independent reader, written from SPEC.md alone: raw bytes of every tensor of a step."""
    document = json.loads((store / "steps" / folder / "MANIFEST").read_bytes())
    body = document["body"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == document["root"]
    names = [file["name"] for file in body["files"]]
    own = [records(store / "steps" / folder / name) for name in names]
    base: list[list[Record] | None] = [None] * len(names)
    if body["parent"] is not None:
        base = [records(store / "steps" / body["parent"]["folder"] / name) for name in names]
    tensors = {}
    for tensor in body["tensors"]:
        whole = np.zeros((*tensor["shape"], SIZES[tensor["dtype"]]), np.uint8)
        for shard in tensor["shards"]:
            file, first, count = shard["extents"]
            data = b"".join(extent(own[file][first + i], base[file]) for i in range(count))
            at = tuple(slice(o, o + n) for o, n in zip(shard["offsets"], shard["shape"], strict=True))
            whole[at] = np.frombuffer(data, np.uint8).reshape(whole[at].shape)
        tensors[tensor["name"]] = whole.tobytes()
    return tensors | {alias: tensors[name] for alias, name in body["aliases"].items()}


def records(path: Path) -> list[Record]:
    """(record, file) of every extent."""
    file = path.read_bytes()
    magic, at, length, count, size = struct.unpack_from("<8sQQQQ", file, len(file) - 128)
    assert (magic, size) == (b"\x89LFCEND\n", len(file))
    assert xxhash.xxh3_64_intdigest(file[-128:-8]) == struct.unpack("<Q", file[-8:])[0]
    assert xxhash.xxh3_64_intdigest(file[:4088]) == struct.unpack_from("<Q", file, 4088)[0]
    assert xxhash.xxh3_128_digest(file[at : at + length]) == file[-88:-72]
    return [(struct.unpack_from("<IBBHQIIQ16s16s", file, at + 64 * i), file) for i in range(count)]


def extent(record: Record, base: list[Record] | None) -> bytes:
    (_, kind, width, _, _, raw, stored, place, raw_hash, _), file = record
    if kind == 5:
        assert base is not None
        return extent(base[place], None)
    data = file[place : place + stored]
    if kind == 1:
        lengths = struct.unpack_from(f"<{width}I", data)
        planes, at = [], 4 * width
        for word in lengths:
            piece = data[at : at + (word & 0x7FFFFFFF)]
            at += len(piece)
            planes.append(zstandard.decompress(piece) if word >> 31 else piece)
        data = b"".join(bytes(column) for column in zip(*planes, strict=True))
    assert len(data) == raw
    assert xxhash.xxh3_128_digest(data) == raw_hash
    return data


@pytest.mark.parametrize("compress", ["raw", "auto", "zstd"])
def test_the_spec_is_enough_to_read_full_and_delta_steps(tmp_path: Path, compress: str) -> None:
    tensors = {
        **state(),
        "big": torch.arange(300_000),
        "half": torch.randn(5000).bfloat16(),
        "none": torch.empty(0),
    }
    tensors["tied"] = tensors["half"]
    with lf_ckpt.open(tmp_path, compress=compress) as store:  # type: ignore[arg-type]
        store.save(1, tensors).wait()
        changed = {**tensors, "layer0.weight": torch.zeros(20_000)}
        assert store.save(2, changed).wait().kind == "delta"

    for folder, wanted in (("1", tensors), ("2", changed)):
        found = read_by_the_spec(tmp_path, folder)
        assert found == {name: bits(tensor) for name, tensor in wanted.items()}


def test_no_pickle_anywhere() -> None:
    for path in Path(lf_ckpt.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert "import pickle" not in text
        assert "torch.load" not in text
        assert "torch.save" not in text


def test_the_public_surface_is_listed_and_real() -> None:
    assert len(set(lf_ckpt.__all__)) == len(lf_ckpt.__all__)
    assert all(hasattr(lf_ckpt, name) for name in lf_ckpt.__all__)


@given(st.binary(min_size=8, max_size=4000), st.sampled_from([1, 2, 4, 8]), st.integers(0, 255))
def test_planes_invert_exactly_or_decline(data: bytes, width: int, mask: int) -> None:
    raw = np.frombuffer(data[: len(data) // width * width], np.uint8)
    packed = codec.encode_planes(raw, width, mask)
    if packed is not None:
        out = np.empty_like(raw)
        codec.decode_planes(memoryview(packed), out, width)
        assert out.tobytes() == raw.tobytes()
        assert len(packed) < raw.size


@given(st.binary(max_size=200), st.integers(1, 300), st.sampled_from([1, 2, 4, 8]))
def test_planes_of_random_bytes_decode_or_raise_codec_error(data: bytes, count: int, width: int) -> None:
    with contextlib.suppress(codec.CodecError):
        codec.decode_planes(memoryview(data), np.empty(count * width, np.uint8), width)


def test_a_frame_that_declares_a_huge_size_is_refused_before_it_is_allocated() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    payload = struct.pack("<I", len(bomb) | 1 << 31) + bomb

    with pytest.raises(codec.CodecError, match="another size"):
        codec.decode_planes(memoryview(payload), np.empty(100, np.uint8), 1)


text = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("$abytesflo", max_size=8), inner),
    max_leaves=20,
)


def in_order(value: object) -> str:
    """Text of a value that tells every type and float apart but not the order of keys."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{in_order(value[key])}" for key in sorted(value)) + "}"
    return "[" + ",".join(map(in_order, value)) + "]" if isinstance(value, list) else repr(value)


@settings(max_examples=60, deadline=None)
@given(json_values)
def test_items_survive_canonical_json(value: object) -> None:
    text = canonical(encode_item(value, "x"))

    assert in_order(decode_item(parse_canonical(text))) == in_order(value)


NOT_CANONICAL = [b'{"a": 1}', b'{"b":1,"a":2}', b"1.0e5", b'"\\u0041"', b"[1,]", b"\xc3\xa4", b" 1", b"NaN"]


@pytest.mark.parametrize("text", NOT_CANONICAL)
def test_text_that_is_not_canonical_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_canonical(text)
