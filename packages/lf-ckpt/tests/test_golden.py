"""Stores written once and committed: every later version reads them bit for bit and writes the same bytes itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from ckpt_spec import CODECS_SEEN, read_by_the_spec
from make_golden import digests, states

import lf_ckpt
from lf_ckpt import format, manifest_text
from lf_ckpt.cli import main

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
DATA = "rank-0.lfckpt"


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("store", ["raw", "auto"])
def test_golden_steps_read_bit_for_bit(store: str, step: int) -> None:
    with lf_ckpt.open(GOLDEN / store, read_only=True) as opened:
        loaded = opened.load(step)

    assert digests(loaded.tensors) == EXPECTED[str(step)]
    assert loaded.tensors["tied"] is loaded.tensors["moved"]
    assert loaded.items == {"epoch": 3, "rate": 0.1, "blob": b"bytes " * 100}


@pytest.mark.parametrize("store", ["raw", "auto"])
def test_golden_steps_read_by_the_spec_alone(store: str) -> None:
    for step, wanted in EXPECTED.items():
        found = read_by_the_spec(GOLDEN / store, step)
        assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == wanted


def test_the_golden_stores_hold_every_codec_and_verify(capsys: pytest.CaptureFixture[str]) -> None:
    CODECS_SEEN.clear()
    for store in ("raw", "auto"):
        read_by_the_spec(GOLDEN / store, "1")
        read_by_the_spec(GOLDEN / store, "2")
        assert main(["verify", str(GOLDEN / store), "--deep"]) == 0
    capsys.readouterr()
    assert set(format.CODEC_NAMES) == CODECS_SEEN


@pytest.mark.parametrize("step", ["1", "2"])
@pytest.mark.parametrize("store", ["raw", "auto"])
def test_header_index_trailer_and_manifest_are_packed_to_the_same_bytes(store: str, step: str) -> None:
    path = GOLDEN / store / "steps" / step / DATA
    data = path.read_bytes()
    trailer = format.parse_trailer(data[-128:], len(data), str(path))
    index = data[trailer.index_offset : -128]

    assert format.pack_header(format.parse_header(data[:4096], str(path))) == data[:4096]
    assert format.pack_index(format.parse_index(index, trailer, str(path))) == index
    assert format.pack_trailer(trailer) == data[-128:]
    text = path.with_name("MANIFEST").read_bytes()
    assert manifest_text.dump(manifest_text.parse(text, str(path)))[0] == text


def test_the_same_state_saved_raw_today_has_the_same_extents_and_index(tmp_path: Path) -> None:
    with lf_ckpt.open(GOLDEN / "raw", read_only=True) as golden:
        loaded = {step: golden.load(step) for step in (1, 2)}
    with lf_ckpt.open(tmp_path, compress="raw") as store:
        for step, old in loaded.items():
            store.save(step, old.tensors, old.items).wait()
    for step in ("1", "2"):
        ours, theirs = ((p / "steps" / step / DATA).read_bytes() for p in (tmp_path, GOLDEN / "raw"))
        assert ours[4096:-128] == theirs[4096:-128]  # all but ids of store and save
        assert ours[:48] == theirs[:48]


def test_the_recipe_still_makes_the_golden_state() -> None:
    first, second = states()
    assert (digests(first), digests(second)) == (EXPECTED["1"], EXPECTED["2"])
