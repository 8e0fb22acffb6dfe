"""Random mutations of whole files: never a crash, a hang or wrong data, and `verify --deep` exits 1 on every one.

The session runs 2,000, seeded. LF_MUTATIONS=10000 LF_SEED=1 pytest tests/test_mutations.py runs more, or others.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lf_format as lff
from lf_format import _layout as lay
from lf_format._codecs import PACKED, RAW, REMAP_ZSTD, ZSTD
from lf_format.cli import main

COUNT = int(os.environ.get("LF_MUTATIONS", "2000"))
SEED = int(os.environ.get("LF_SEED", "0"))
GOLDEN = Path(__file__).parent / "golden"
Write = Callable[..., Path]
Readable = Callable[[Path, Any], int]


def _masked(write: Write, codec: str) -> Path:
    """Blocks of about six records with loss masks."""
    records = [[(i * k) % 5 for k in range(1 + 9 * i % 60)] for i in range(24)]
    return write(records, vocab_size=300, block_bytes=256, codec=codec, loss_mask=True)


def _dictionaries(write: Write) -> Path:
    """A zstd dictionary for the blocks of one bucket, ids as they are."""
    dice = np.random.default_rng(1)
    known = [dice.integers(0, 60_000, 24) for _ in range(40)]
    records = [np.concatenate([known[k] for k in dice.integers(0, 40, 2)]) for _ in range(200)]
    options = lff.CodecOptions("zstd", dictionary="auto")
    return write(records, vocab_size=60_000, buckets=(48,), block_bytes=960, codec=options)


def _samples(write: Write, codec: str) -> Path:
    """One field of every kind, fixed and ragged."""
    golden = lff.Reader(GOLDEN / "samples.lfg")
    target = write([[1]]).with_name("samples.lfg")
    with lff.Writer(
        target, fields=golden.fields, vocab_size=300, buckets=(4, 16), meta=golden.meta, codec=codec
    ) as writer:
        for i in [0, 1, 2] * 4:
            record = golden.record(i)
            writer.append({f.name: _value(f, record[f.name]) for f in golden.fields})
    return target


def _value(field: lff.Field, value: Any) -> Any:
    return value.tobytes() if field.kind in ("bytes", "image") and field.ragged else value


# file: (how it is made, codecs that occur in it)
FILES: dict[str, tuple[Callable[[Write], Path], set[int]]] = {
    "raw": (lambda write: _masked(write, "raw"), {RAW}),
    "zstd": (lambda write: _masked(write, "zstd"), {ZSTD}),
    "packed": (lambda write: _masked(write, "packed"), {PACKED}),
    "dictionary": (_dictionaries, {ZSTD}),
    "ranks": (lambda _: GOLDEN / "dictionaries.loongbin", {ZSTD, REMAP_ZSTD}),
    "lfg-raw": (lambda write: _samples(write, "raw"), {RAW}),
    "lfg-zstd": (lambda write: _samples(write, "zstd"), {ZSTD}),
}


def _mutated(whole: bytes, dice: random.Random) -> bytes:
    """Another file: half of the time one flipped bit, else something coarser."""
    raw = bytearray(whole)
    at, size = dice.randrange(len(raw)), dice.choice([1, 2, 8, 64, 4096])
    kind = dice.choice(["flip"] * 6 + ["noise", "zero", "ones", "copy", "cut", "grow", "insert", "drop"])
    if kind == "flip":
        at = dice.choice([at, dice.choice(_content(whole))])  # most bytes of a small file are padding
        raw[at] ^= 1 << dice.randrange(8)
    elif kind == "cut":
        del raw[at:]
    elif kind == "grow":
        raw += dice.choice([bytes(size), dice.randbytes(size), whole])
    elif kind == "insert":
        raw[at:at] = dice.randbytes(size)
    elif kind == "drop":
        del raw[at : at + size]
    else:
        other = dice.randrange(len(raw))
        fill = {"noise": dice.randbytes(size), "zero": bytes(size), "ones": b"\xff" * size}
        raw[at : at + size] = fill.get(kind, whole[other : other + size])
    return bytes(raw)


def _content(whole: bytes) -> list[int]:
    return np.flatnonzero(np.frombuffer(whole, np.uint8)).tolist()


@pytest.mark.parametrize("name", FILES)
def test_a_mutated_file_gives_true_bytes_or_errors_and_verify_exits_1(
    name: str, write: Write, contents: Callable[[Path], Any], readable: Readable, tmp_path: Path
) -> None:
    make, codecs = FILES[name]
    path = make(write)
    with lff.Reader(path) as reader:
        assert set(reader.opened.index.block_codec.tolist()) == codecs
    whole, good = path.read_bytes(), contents(path)
    target = tmp_path / f"mutated{path.suffix}"
    dice = random.Random(f"{SEED} {name}")
    done = 0
    while done < -(-COUNT // len(FILES)):
        raw = _mutated(whole, dice)
        if raw == whole:
            continue
        done += 1
        target.write_bytes(raw)
        readable(target, good)
        assert _verify_exit(target) == 1, (name, done)


def _verify_exit(path: Path) -> int:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        return main(["verify", "--deep", str(path)])


@pytest.mark.parametrize("name", FILES)
def test_every_byte_of_every_structure_counts(name: str, write: Write, tmp_path: Path) -> None:
    """One flip in each header, directory entry, trailer and at both ends of each payload: nothing is left out."""
    path = FILES[name][0](write)
    whole = path.read_bytes()
    with lff.Reader(path) as reader:
        index, trailer = reader.opened.index, reader.opened.trailer
    places = [*range(0, 104, 3), 700, lay.HEADER_SIZE - 1, lay.HEADER_SIZE]
    for start, size in zip(index.block_offset[:3].tolist(), index.block_stored[:3].tolist(), strict=True):
        places += [start, start + 7, start + 48, start + 64, start + 63 + size]
    places += range(trailer.index_offset, trailer.index_offset + 640, 7)
    places += range(trailer.trailer_offset, trailer.trailer_offset + lay.TRAILER_SIZE, 5)
    target = tmp_path / "flipped.bin"
    for at in places:
        raw = bytearray(whole)
        raw[at] ^= 0x20
        target.write_bytes(raw)
        assert _verify_exit(target) == 1, at
