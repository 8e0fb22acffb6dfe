"""Extent codecs: exact on every bit pattern, total on every payload, and small where research says so."""

from __future__ import annotations

import contextlib
import os
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lf_ckpt import codec, deltas
from lf_ckpt.codec import ENTROPY, MATCHES, STORED, Bytes, CodecError, Layout
from lf_ckpt.format import CHANGED, CODEC_NAMES, DIRTY, PLANES, SUB, XOR

EXAMPLES = int(os.environ.get("LF_FUZZ_EXAMPLES", "60"))
CODED = [PLANES, XOR, SUB, CHANGED, DIRTY]
WIDTHS = [1, 2, 4, 8]
few = settings(max_examples=EXAMPLES, deadline=None)


def as_bytes(data: bytes, width: int) -> Bytes:
    return np.frombuffer(data[: len(data) // width * width], np.uint8)


def round_trip(kind: int, layout: Layout, raw: Bytes, width: int, parent: Bytes) -> bytes:
    stored = deltas.encode(kind, layout, raw, width, parent)
    assert stored is not None
    out = np.empty_like(raw)
    deltas.decode(kind, memoryview(stored), out, width, parent)
    assert out.tobytes() == raw.tobytes()
    return stored


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Bytes, Bytes, int]:
    """An extent that differs from its parent in at least one byte, and the width of its numbers."""
    width = draw(st.sampled_from(WIDTHS))
    parent = np.frombuffer(draw(st.binary(min_size=width, max_size=9000)), np.uint8)
    parent = np.resize(parent, (draw(st.integers(1, 3 * 4096 + 8)) // width + 1) * width)
    raw = parent.copy()
    for at in draw(st.lists(st.integers(0, raw.size - 1), min_size=1, max_size=20)):
        raw[at] ^= draw(st.integers(1, 255))
    raw[0] ^= np.uint8((raw == parent).all())
    return raw, parent, width


@few
@given(
    pairs(), st.sampled_from(CODED), st.lists(st.sampled_from([0, 1, 2]), min_size=8, max_size=8), st.data()
)
def test_every_codec_inverts_exactly(
    pair: tuple[Bytes, Bytes, int], kind: int, ways: list[int], data: st.DataObject
) -> None:
    raw, parent, width = pair
    turn = data.draw(st.integers(0, 8 * width - 1))
    round_trip(kind, Layout(turn, tuple(ways[:width])), raw, width, parent)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", CODED)
def test_all_pairs_of_extreme_numbers_survive(kind: int, width: int) -> None:
    """Both zeros, infinities, NaNs with payload, the largest and smallest numbers, against each other."""
    top = (1 << 8 * width) - 1
    half = top >> 1
    edges = [0, 1, half - 1, half, half + 1, half + 2, top - 1, top, 0x7FC12345 & top, 0x7F800000 & top]
    dtype = codec.NUMBER[width]
    values = np.array([a for a in edges for _ in edges], dtype)
    parent = np.array([b for _ in edges for b in edges], dtype)
    raw, before = values.view(np.uint8), parent.view(np.uint8)
    round_trip(kind, Layout(1, (ENTROPY,) * width), raw, width, before)


@few
@given(st.binary(max_size=300), st.integers(1, 5000), st.sampled_from(WIDTHS), st.sampled_from(CODED))
def test_random_payloads_decode_or_raise_codec_error(data: bytes, count: int, width: int, kind: int) -> None:
    parent = np.zeros(count * width, np.uint8)
    with contextlib.suppress(CodecError):
        deltas.decode(kind, memoryview(data), np.empty(count * width, np.uint8), width, parent)


@few
@given(pairs(), st.sampled_from(CODED), st.data())
def test_damaged_payloads_decode_or_raise_codec_error(
    pair: tuple[Bytes, Bytes, int], kind: int, data: st.DataObject
) -> None:
    raw, parent, width = pair
    stored = bytearray(deltas.encode(kind, Layout(0, (ENTROPY,) * width), raw, width, parent) or b"")
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    cut = stored[: data.draw(st.integers(0, len(stored)))]
    for payload in (stored, cut):
        with contextlib.suppress(CodecError):
            deltas.decode(kind, memoryview(payload), np.empty_like(raw), width, parent)


def bomb() -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(200 << 20))


def framed(frame: bytes) -> bytes:
    """The word of a frame."""
    return struct.pack("<I", len(frame) | 1 << 31)


turn = bytes(4)


HUGE = {
    "planes": (PLANES, lambda f: turn + framed(f) + f),
    "xor": (XOR, lambda f: turn + framed(f) + f),
    "difference": (SUB, lambda f: turn + framed(f) + f),
    "places": (CHANGED, lambda f: struct.pack("<I", 3) + framed(f) + f),
    "values": (CHANGED, lambda f: struct.pack("<2I", 1, 1) + b"\0" + turn + framed(f) + f),
    "units": (DIRTY, lambda f: b"\1" + bytes(31) + turn + framed(f) + f),
}


@pytest.mark.parametrize("case", HUGE)
def test_a_frame_that_declares_a_huge_size_is_refused_before_it_is_allocated(case: str) -> None:
    kind, payload = HUGE[case]
    with pytest.raises(CodecError, match="another size"):
        deltas.decode(kind, memoryview(payload(bomb())), np.empty(100, np.uint8), 1, np.zeros(100, np.uint8))


one = struct.pack("<I", 1)
BAD = {
    "no turn": (PLANES, b"", "too short"),
    "no words": (PLANES, turn, "too short"),
    "turned too far": (PLANES, struct.pack("<2I", 8, 100) + bytes(100), "rotated by 8"),
    "plane runs out": (PLANES, turn + struct.pack("<I", 100) + b"ab", "past the extent"),
    "plane too small": (PLANES, turn + struct.pack("<I", 99) + bytes(99), "99 bytes"),
    "bytes follow": (PLANES, turn + struct.pack("<I", 100) + bytes(101), "after the last"),
    "not a frame": (PLANES, turn + framed(b"noise") + b"noise", "."),
    "no count": (CHANGED, bytes(7), "too short"),
    "none changed": (CHANGED, bytes(8), "0 of 100"),
    "more changed than there are": (CHANGED, struct.pack("<2I", 101, 0), "101 of 100"),
    "no place": (CHANGED, one + struct.pack("<I", 0), "places"),
    "place outside": (CHANGED, one + one + b"\x64" + turn + one + b"x", "places"),
    "skip without a place": (CHANGED, one + one + b"\xff" + turn + one + b"x", "places"),
    "two places for one": (CHANGED, one + struct.pack("<I", 2) + b"\0\0" + turn + one + b"x", "places"),
    "no bitmap": (DIRTY, bytes(31), "too short"),
    "no unit": (DIRTY, bytes(32) + turn + one + b"x", "do not fit"),
    "unit outside": (DIRTY, b"\3" + bytes(31) + turn + one + b"x", "do not fit"),
    "unit cut": (DIRTY, b"\1" + bytes(31) + turn + struct.pack("<I", 99) + bytes(99), "99 bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_payloads_that_contradict_themselves_are_named(case: str) -> None:
    kind, payload, why = BAD[case]
    with pytest.raises(CodecError, match=why):
        deltas.decode(kind, memoryview(payload), np.empty(100, np.uint8), 1, np.zeros(100, np.uint8))


@pytest.mark.parametrize("kind", [XOR, SUB, CHANGED, DIRTY])
@pytest.mark.parametrize("parent", [None, np.zeros(99, np.uint8)])
def test_a_delta_needs_a_parent_of_its_own_length(kind: int, parent: Bytes | None) -> None:
    with pytest.raises(CodecError, match="without its parent"):
        deltas.decode(kind, memoryview(bytes(200)), np.empty(100, np.uint8), 1, parent)


@pytest.mark.parametrize("kind", [CHANGED, DIRTY])
def test_nothing_to_encode_is_no_payload(kind: int) -> None:
    raw = np.zeros(8192, np.uint8)
    assert deltas.encode(kind, Layout(0, (STORED,) * 4), raw, 4, raw) is None


def test_an_unknown_codec_is_refused() -> None:
    assert 7 not in CODEC_NAMES
    with pytest.raises(CodecError, match="unknown"):
        deltas.decode(7, memoryview(b""), np.empty(4, np.uint8), 4, np.zeros(4, np.uint8))


def test_the_difference_of_neighbouring_floats_is_small_also_across_zero() -> None:
    old = np.array([1.0, -1.0, 0.0, 1e-45, -1e-45], np.float32)
    new = np.nextafter(old, np.float32(-np.inf))
    found = deltas.difference(new.view(np.uint32), old.view(np.uint32))

    # Both zeros count as neighbours, so below 0.0 come -0.0 and then the smallest negative number.
    assert found.tolist() == [1, 1, 3, 1, 1]


@few
@given(st.lists(st.integers(0, 3000), min_size=1, unique=True))
def test_places_survive_as_gaps(at: list[int]) -> None:
    places = np.array(sorted(at))
    gaps = deltas.gap_bytes(places)

    assert deltas.places(gaps, len(at), 3001).tolist() == sorted(at)
    assert gaps.size <= len(at) + 3001 // 255


def test_one_changed_bfloat16_in_a_hundred_costs_a_hundredth() -> None:
    chance = np.random.default_rng(0)
    parent = (chance.standard_normal(1 << 19).astype("<f4").view("<u4") >> 16).astype("<u2")
    values = parent.copy()
    at = chance.random(values.size) < 0.013
    values[at] += 1
    stored = round_trip(
        CHANGED, Layout(0, (ENTROPY, ENTROPY)), values.view(np.uint8), 2, parent.view(np.uint8)
    )

    assert len(stored) < 0.009 * values.nbytes


def test_a_dirty_unit_costs_a_unit_and_a_bit() -> None:
    parent = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    raw = parent.copy()
    raw[[5, 500_000]] ^= 1
    stored = round_trip(DIRTY, Layout(0, (STORED,) * 4), raw, 4, parent)

    assert len(stored) == 32 + 20 + 2 * 4096
    assert deltas.dirty_units(raw, parent).nonzero()[0].tolist() == [0, 122]
    assert (deltas.unit_hashes(raw) != deltas.unit_hashes(parent)).nonzero()[0].tolist() == [0, 122]


def test_a_short_last_unit_counts_like_the_others() -> None:
    parent = np.zeros(4096 + 12, np.uint8)
    raw = parent.copy()
    raw[-1] = 1
    assert len(round_trip(DIRTY, Layout(0, (STORED,) * 4), raw, 4, parent)) == 32 + 20 + 12
    assert deltas.unit_hashes(raw).size == 2


def test_noise_is_stored_as_it_is_and_repeats_are_searched_for() -> None:
    chance = np.random.default_rng(0)
    noise = codec.numbers(chance.integers(0, 256, 40_000, np.uint8), 4)
    words = [b"loss", b"step", b"rate", b"= 0.5", b"\n", b"epoch "]
    text = b"".join(words[i] for i in chance.integers(0, len(words), 9000))

    assert codec.plan_planes(noise).layout.ways == (STORED,) * 4
    assert codec.plan_planes(np.frombuffer(text, np.uint8)).layout.ways == (MATCHES,)


def test_the_exponents_of_weights_shrink_to_a_third() -> None:
    weights = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32) * np.float32(0.02)
    planned = codec.plan_planes(weights.view(np.uint32))

    assert planned.layout.turn > 0
    assert planned.layout.ways.count(STORED) >= 2
    assert planned.size < 0.835 * weights.nbytes
