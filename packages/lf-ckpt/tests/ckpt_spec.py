"""An independent reader, written from SPEC.md alone in plain Python numbers; slow, and sharing nothing with lf_ckpt."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
import zstandard

CODECS_SEEN: set[int] = set()
SIZES = {"F32": 4, "BF16": 2, "I64": 8, "U8": 1}


class DataFile:
    """A checked `.lfckpt` and the base's file of the same name, if any."""

    def __init__(self, path: Path, base: DataFile | None) -> None:
        data = path.read_bytes()
        magic, at, length, count, size = struct.unpack_from("<8sQQQQ", data, len(data) - 128)
        assert (magic, size) == (b"\x89LFCEND\n", len(data))
        assert xxhash.xxh3_64_intdigest(data[-128:-8]) == struct.unpack("<Q", data[-8:])[0]
        assert xxhash.xxh3_64_intdigest(data[:4088]) == struct.unpack_from("<Q", data, 4088)[0]
        assert xxhash.xxh3_128_digest(data[at : at + length]) == data[-88:-72]
        self.data, self.base = data, base
        self.records = [struct.unpack_from("<IBBHQIIQ16s16s", data, at + 64 * i) for i in range(count)]
        self.runs: dict[Any, range] = {}

    def extent(self, number: int, key: object) -> bytes:
        """Raw bytes of an extent of the shard or item `key`."""
        _, kind, width, _, start, raw, stored, place, raw_hash, stored_hash = self.records[number]
        CODECS_SEEN.add(kind)
        if kind == 5:
            assert self.base is not None
            return self.base.extent(place, None)
        payload = self.data[place : place + stored]
        assert xxhash.xxh3_128_digest(payload) == stored_hash
        parent = self.parent(key, start, raw, width) if kind in (2, 3, 4, 6) else []
        data = decode(kind, payload, width, raw, parent)
        assert len(data) == raw
        assert xxhash.xxh3_128_digest(data) == raw_hash
        return data

    def parent(self, key: object, start: int, raw: int, width: int) -> list[int]:
        """Numbers of the parent."""
        assert self.base is not None
        (number,) = [n for n in self.base.runs[key] if self.base.records[n][4] == start]
        assert self.base.records[number][1] in (0, 1)
        assert self.base.records[number][5] == raw
        return integers(self.base.extent(number, key), width)


def read_by_the_spec(store: Path, folder: str) -> dict[str, bytes]:
    """Raw bytes of every tensor of a step."""
    body, files = opened(store, folder)
    tensors = {}
    for tensor in body["tensors"]:
        size = SIZES[tensor["dtype"]]
        whole = bytearray(math.prod(tensor["shape"]) * size)
        for shard in tensor["shards"]:
            number, first, count = shard["extents"]
            key = key_of(tensor, shard)
            data = b"".join(files[number].extent(first + i, key) for i in range(count))
            for source, target, length in rows(tensor["shape"], shard, size):
                whole[target : target + length] = data[source : source + length]
        tensors[tensor["name"]] = bytes(whole)
    return tensors | {alias: tensors[name] for alias, name in body["aliases"].items()}


def opened(store: Path, folder: str) -> tuple[dict[str, Any], list[DataFile]]:
    """Manifest and data files of a step, each with the base's file of its name."""
    document = json.loads((store / "steps" / folder / "MANIFEST").read_bytes())
    body = document["body"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == document["root"]
    bases: dict[str, DataFile] = {}
    if body["parent"] is not None:
        above, files = opened(store, body["parent"]["folder"])
        assert above["parent"] is None
        bases = dict(zip((file["name"] for file in above["files"]), files, strict=True))
    files = [
        DataFile(store / "steps" / folder / file["name"], bases.get(file["name"])) for file in body["files"]
    ]
    for tensor in body["tensors"]:
        for shard in tensor["shards"]:
            number, first, count = shard["extents"]
            files[number].runs[key_of(tensor, shard)] = range(first, first + count)
    for blob in body["blobs"]:
        number, first, count = blob["extents"]
        files[number].runs[blob["name"]] = range(first, first + count)
    return body, files


def key_of(tensor: dict[str, Any], shard: dict[str, Any]) -> object:
    parts = (tensor["name"], tensor["dtype"], tensor["shape"], shard["offsets"], shard["shape"])
    return json.dumps(parts)


def rows(shape: list[int], shard: dict[str, Any], size: int) -> Iterator[tuple[int, int, int]]:
    """(offset in the shard, offset in the tensor, length) in bytes of every row of a shard."""
    if not shape:
        yield 0, 0, size
        return
    length = shard["shape"][-1]
    for row in range(math.prod(shard["shape"][:-1])):
        place, at, stride = row, shard["offsets"][-1], shape[-1]
        for dim in range(len(shape) - 2, -1, -1):
            place, index = divmod(place, shard["shape"][dim])
            at += (shard["offsets"][dim] + index) * stride
            stride *= shape[dim]
        yield row * length * size, at * size, length * size


def integers(data: bytes, width: int) -> list[int]:
    return [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]


def decode(kind: int, payload: bytes, width: int, raw: int, parent: list[int]) -> bytes:
    """The codecs of section 2."""
    count = raw // width
    if kind == 0:
        return payload
    if kind == 1:
        numbers = planes(payload, width, count)
    elif kind == 2:
        numbers = [z ^ p for z, p in zip(planes(payload, width, count), parent, strict=True)]
    elif kind == 3:
        numbers = [add(z, p, width) for z, p in zip(planes(payload, width, count), parent, strict=True)]
    elif kind == 4:
        changed, word = struct.unpack_from("<2I", payload)
        gaps, rest = section(payload[8:], word)
        numbers = list(parent)
        for at, z in zip(marked(gaps), planes(rest, width, changed), strict=True):
            numbers[at] = add(z, parent[at], width)
    else:
        dirty = [i for i in range(-(-raw // 4096)) if payload[i // 8] >> i % 8 & 1]
        unit = 4096 // width
        at = [n for i in dirty for n in range(i * unit, min((i + 1) * unit, count))]
        numbers = list(parent)
        for n, z in zip(at, planes(payload[32:], width, len(at)), strict=True):
            numbers[n] = z
    return b"".join(n.to_bytes(width, "little") for n in numbers)


def section(data: bytes, word: int) -> tuple[bytes, bytes]:
    """(decoded section at the front of `data`, what follows it)."""
    length = word & 0x7FFFFFFF
    piece = data[:length]
    return (zstandard.decompress(piece) if word >> 31 else piece), data[length:]


def planes(data: bytes, width: int, count: int) -> list[int]:
    turn, *words = struct.unpack_from(f"<{1 + width}I", data)
    rest = data[4 + 4 * width :]
    columns = []
    for word in words:
        plane, rest = section(rest, word)
        assert len(plane) == count
        columns.append(plane)
    assert not rest
    turned = [int.from_bytes(bytes(column), "little") for column in zip(*columns, strict=True)]
    return [rotr(z, turn, 8 * width) for z in turned]


def marked(gaps: bytes) -> list[int]:
    at, places = 0, []
    for gap in gaps:
        at += gap
        if gap < 255:
            places.append(at)
            at += 1
    return places


def rotr(z: int, turn: int, bits: int) -> int:
    assert 0 <= turn < bits
    return z >> turn | (z & (1 << turn) - 1) << bits - turn


def order(x: int, width: int) -> int:
    sign = 1 << 8 * width - 1
    return x ^ (sign - 1) if x & sign else x


def add(z: int, parent: int, width: int) -> int:
    distance = z >> 1 if z % 2 == 0 else -(z >> 1) - 1
    return order((order(parent, width) + distance) % (1 << 8 * width), width)
