"""Samples of several fields: what is written comes back, from record, gather and extents; the rest is refused."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lf_format as lff
from lf_format import Field
from lf_format._layout import PROFILE_LFG
from lf_format._schema import parse_schema

FIELDS = (
    Field.tokens(),
    Field.bits("loss_mask", role="loss_mask"),
    Field.image("pixels", (4, 5, 3)),
    Field.image("photo"),
    Field.tensor("cloud", "float32", (-1, 3), role="points"),
    Field.tensor("state", "float16", (7,), role="state"),
    Field.bits("action_mask", (3, 3)),
    Field.tensor("episode", "int64", ()),
    Field.bytes("task"),
)
Sample = dict[str, Any]


def _samples(n: int) -> list[Sample]:
    random = np.random.default_rng(5)
    out = []
    for i in range(n):
        length = 1 + i % 16
        out.append(
            {
                "input_ids": random.integers(0, 1000, length),
                "loss_mask": random.random(length) < 0.5,
                "pixels": random.integers(0, 256, (4, 5, 3)).astype(np.uint8),
                "photo": b"\xff\xd8\xff" + random.bytes(i % 9),
                "cloud": random.standard_normal((i % 4, 3)).astype(np.float32),
                "state": random.standard_normal(7).astype(np.float16),
                "action_mask": random.random((3, 3)) < 0.5,
                "episode": np.int64(i - 3),
                "task": f"task {i}".encode() if i % 3 else b"",
            }
        )
    return out


def _write(path: Path, samples: list[Sample], **options: Any) -> Path:
    settings: dict[str, Any] = {"fields": FIELDS, "vocab_size": 1000, "buckets": (8, 16)} | options
    with lff.Writer(path, **settings) as writer:
        for sample in samples:
            writer.append(sample)
    return path


def _by_bucket(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda s: len(s["input_ids"]) > 8)


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, bytes):
        return found.dtype == np.uint8 and found.tobytes() == expected
    return found.shape == np.shape(expected) and bool((found == expected).all())


@pytest.fixture(params=["raw", "zstd"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[Sample]]:
    samples = _samples(40)
    path = _write(tmp_path / "a.lfg", samples, codec=request.param, block_bytes=1500)
    return path, _interleaved(path, samples)


def _interleaved(path: Path, samples: list[Sample]) -> list[Sample]:
    """The samples in record order: blocks are written as their buckets fill."""
    by_episode = {int(s["episode"]): s for s in samples}
    with lff.Reader(path) as reader:
        return [by_episode[int(reader.record(i)["episode"])] for i in range(len(reader))]


def test_every_field_comes_back_as_it_was_written(stored: tuple[Path, list[Sample]]) -> None:
    path, samples = stored
    with lff.Reader(path) as reader:
        assert len(reader) == len(samples) == 40
        for i, sample in enumerate(samples):
            record = reader.record(i)
            assert list(record) == [f.name for f in FIELDS]
            assert all(_same(record[name], value) for name, value in sample.items())
            assert record.tokens is record["input_ids"]
            assert record.loss_mask is record["loss_mask"]
            assert record.tokens.dtype == np.int32
    assert lff.verify(path).problems == []


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", [f.name for f in FIELDS])
def test_gather_cuts_a_batch_in_any_order(stored: tuple[Path, list[Sample]], name: str, check: bool) -> None:
    path, samples = stored
    ids = [39, 0, 7, 7, 21]
    field = next(f for f in FIELDS if f.name == name)
    wanted = [np.frombuffer(v, np.uint8) if isinstance(v := samples[i][name], bytes) else v for i in ids]
    with lff.Reader(path) as reader:
        found = reader.gather(ids, name, check=check)
        if field.ragged:
            values, starts = found
            assert starts.tolist() == [0, *np.cumsum([len(w) for w in wanted])]
            assert (values == np.concatenate(wanted)).all()
        else:
            assert isinstance(found, np.ndarray)
            assert found.dtype == field.numpy_dtype
            assert (found == np.stack(wanted)).all()


def test_gather_fills_the_memory_it_is_given(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.lfg", _samples(10))
    out = np.zeros((3, 4, 5, 3), np.uint8)
    with lff.Reader(path) as reader:
        assert reader.gather([1, 2, 3], "pixels", out=out) is out
        assert (out[2] == reader.record(3)["pixels"]).all()
        for wrong in (out[:2], out.astype(np.int16), out.transpose(0, 2, 1, 3)):
            with pytest.raises(lff.FormatError, match="out"):
                reader.gather([1, 2, 3], "pixels", out=wrong)
        with pytest.raises(lff.FormatError, match="fixed shape"):
            reader.gather([1], "cloud", out=out)
        with pytest.raises(lff.FormatError, match="field"):
            reader.gather([1], "nothing")
        with pytest.raises(IndexError):
            reader.gather([10], "pixels")
        assert reader.gather([], "pixels").shape == (0, 4, 5, 3)
        assert reader.gather([], "action_mask").shape == (0, 3, 3)
        assert reader.gather([], "cloud")[0].shape == (0, 3)


def test_gather_checks_ids_in_the_width_of_their_own_field(tmp_path: Path) -> None:
    fields = (Field.tokens("first", "int32"), Field.tokens("second", "uint16", 3))
    with lff.Writer(tmp_path / "a.lfg", fields=fields, vocab_size=300, buckets=(8,)) as writer:
        writer.append({"first": [1], "second": [1, 2, 3]})
        writer.append({"first": [2, 3], "second": [4, 5, 299]})
    with lff.Reader(tmp_path / "a.lfg") as reader:
        assert reader.gather([1, 0], "second").tolist() == [[4, 5, 299], [1, 2, 3]]
        assert reader.gather([1, 0], "first")[0].tolist() == [2, 3, 1]


def test_extents_of_raw_fields_are_the_bytes_in_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.lfg", _samples(20), block_bytes=700)
    with lff.Reader(path) as reader:
        for name in ("pixels", "cloud", "input_ids"):
            extents = reader.extents(range(20), name)
            for i in range(20):
                raw = os.pread(reader.fileno(), int(extents.nbytes[i]), int(extents.offset[i]))
                assert raw == reader.record(i)[name].tobytes()


def test_a_file_without_token_ids_keeps_the_order_of_its_samples(tmp_path: Path) -> None:
    fields = (Field.tensor("state", "float32", (2,)), Field.image("pixels", (2, 2, 3)))
    with lff.Writer(
        tmp_path / "a.lfg", fields=fields, meta={"fps": 20, "ä": [None]}, block_bytes=64
    ) as writer:
        for i in range(30):
            pixels = np.full((2, 2, 3), i)
            writer.append({"state": [i, -i], "pixels": pixels}, None, i % 10 == 0, i % 10 == 9)
    report = writer.close()
    with lff.Reader(report.path) as reader:
        assert reader.meta == {"fps": 20, "ä": [None]}
        assert reader.buckets == (1,)
        assert reader.gather(range(30), "state")[:, 0].tolist() == list(range(30))
        assert reader.flags.tolist() == [int(i % 10 == 0) | (i % 10 == 9) << 1 for i in range(30)]
        record = reader.record(3)
        assert (len(record.tokens), record.loss_mask) == (0, None)
        assert reader.max_id() == 0


def test_data_sets_and_pickles_serve_samples(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _write(tmp_path / f"{name}.lfg", _samples(5))
    with lff.open_dataset(tmp_path) as dataset:
        assert len(dataset) == 10
        again = pickle.loads(pickle.dumps(dataset))
        assert again.record(7)["task"].tobytes() == dataset.record(2)["task"].tobytes()


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("pixels", np.zeros((4, 5, 4), np.uint8), "shape"),
        ("pixels", np.full((4, 5, 3), 256), "does not fit"),
        ("pixels", np.zeros((4, 5, 3)), "dtype"),
        ("photo", b"GIF89a", "JPEG"),
        ("cloud", np.zeros((2, 4)), "shape"),
        ("cloud", 1.0, "shape"),
        ("state", np.full(7, 1e6), "does not fit"),
        ("state", ["a"] * 7, "dtype"),
        ("action_mask", np.full((3, 3), 2), "booleans"),
        ("episode", 2**63, "does not fit"),
        ("episode", 0.5, "dtype"),
        ("input_ids", [1000], "vocabulary"),
        ("input_ids", [], "not be empty"),
        ("input_ids", range(17), "largest bucket"),
        ("task", "text", "shape"),
        ("state", [[1], [2, 3]], "array"),
    ],
)
def test_a_value_that_cannot_be_stored_is_refused_by_name(
    tmp_path: Path, name: str, value: object, what: str
) -> None:
    good = _samples(1)[0]
    with lff.Writer(tmp_path / "a.lfg", fields=FIELDS, vocab_size=1000, buckets=(8, 16)) as writer:
        with pytest.raises(lff.InputError, match=what) as caught:
            writer.append(good | {name: value})
        assert name in str(caught.value)
        writer.append(good)
    assert writer.close().records == 1


def test_missing_and_unknown_fields_are_refused(tmp_path: Path) -> None:
    good = _samples(1)[0]
    with lff.Writer(tmp_path / "a.lfg", fields=FIELDS, vocab_size=1000, buckets=(8, 16)) as writer:
        for bad in (good | {"more": 1}, {k: v for k, v in good.items() if k != "state"}, [1, 2]):
            with pytest.raises(lff.InputError, match="mapping of all fields"):
                writer.append(bad)


@pytest.mark.parametrize(
    "field",
    [
        Field("x", "tensor", "float31", "", (2,)),
        Field("x", "video", "uint8", "", (-1,)),  # without its frame table
        Field("x", "video", "uint8", "", (4,)),
        Field("x", "sound", "uint8", "", (-1,)),
        Field("x", "bits", "uint8", "", (2,)),
        Field("x", "tokens", "int64", "", (-1,)),
        Field("x", "tokens", "int32", "", (2, 2)),
        Field("x", "tensor", "uint8", "", (2, -1)),
        Field("x", "tensor", "uint8", "", (0,)),
        Field("x", "tensor", "uint8", "", (1 << 16, 1 << 15)),
        Field("x", "image", "uint8", "", (4, 4)),
        Field("x", "bytes", "uint8", "", (4,)),
        Field("", "bytes", "uint8", "", (-1,)),
        Field("a" * 21, "bytes", "uint8", "", (-1,)),
        Field("x", "tokens", "uint8", "", (-1,)),
    ],
)
def test_a_field_that_the_format_does_not_have_is_refused(tmp_path: Path, field: Field) -> None:
    with pytest.raises(lff.FormatError):
        lff.Writer(tmp_path / "a.lfg", fields=[field], vocab_size=1000, buckets=(8,))
    assert list(tmp_path.iterdir()) == []


def test_writer_arguments_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    tokens = Field.tokens()
    cases: list[dict[str, Any]] = [
        {},
        {"fields": [tokens], "vocab_size": 9},
        {"fields": [tokens], "buckets": (4,)},
        {"fields": [tokens, tokens], "vocab_size": 9, "buckets": (4,)},
        {"fields": []},
        {"fields": [Field.bytes("a")], "loss_mask": True},
        {"fields": [Field.bytes("a")], "meta": {"a": float("nan")}},
        {"fields": [Field.bytes("a")], "meta": {"a": object()}},
        {"fields": [Field.bytes("a")], "meta": {"a": "x" * (1 << 20)}},
    ]
    for options in cases:
        with pytest.raises(lff.FormatError):
            lff.Writer(tmp_path / "a.lfg", **options)
    assert list(tmp_path.iterdir()) == []


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    samples = _by_bucket(_samples(4))
    path = _write(tmp_path / "a.lfg", samples)
    whole = path.read_bytes()
    random = np.random.default_rng(3)
    # Zero padding between header, schema and blocks is one kind of byte; content gets most of the flips.
    content = np.flatnonzero(np.frombuffer(whole, np.uint8))
    places = [*random.choice(content, 250), *random.integers(0, len(whole), 100)]
    for at in map(int, places):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        assert not lff.verify(path).ok, at
        _reads_right_or_raises(path, samples)


def _reads_right_or_raises(path: Path, samples: list[Sample]) -> None:
    for i, sample in enumerate(samples):
        try:
            with lff.Reader(path) as reader:
                record, pixels = reader.record(i), reader.gather([i], "pixels")
        except lff.FormatError:
            continue
        assert all(_same(record[name], value) for name, value in sample.items())
        assert isinstance(pixels, np.ndarray)
        assert (pixels[0] == sample["pixels"]).all()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mixture_of_fields_and_shapes_round_trips(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dtypes = st.sampled_from(["uint8", "int16", "uint64", "float16", "float64"])
    shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
    ragged = st.booleans()
    fields = []
    for k in range(data.draw(st.integers(1, 4))):
        shape = (-1, *data.draw(shapes)) if data.draw(ragged) else data.draw(shapes)
        bits = data.draw(st.booleans())
        fields.append(Field.bits(f"f{k}", shape) if bits else Field.tensor(f"f{k}", data.draw(dtypes), shape))
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    samples = []
    for _ in range(data.draw(st.integers(0, 9))):
        sample: Sample = {}
        for f in fields:
            shape = (int(random.integers(4)), *f.shape[1:]) if f.ragged else f.shape
            sample[f.name] = random.integers(0, 2, shape).astype(f.numpy_dtype)
        samples.append(sample)
    path = tmp_path_factory.mktemp("any") / "a.lfg"
    with lff.Writer(path, fields=fields, block_bytes=40) as writer:
        for sample in samples:
            writer.append(sample)
    with lff.Reader(path) as reader:
        for i, sample in enumerate(samples):
            assert all(_same(reader.record(i)[name], value) for name, value in sample.items())
    assert lff.verify(path).ok


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_merge_and_convert_keep_samples(tmp_path: Path, codec: str) -> None:
    paths = [_write(tmp_path / f"{name}.lfg", _samples(9), meta={"fps": 5}) for name in "ab"]
    lff.merge(paths, tmp_path / "both.lfg")
    lff.convert(tmp_path / "both.lfg", tmp_path / "again.lfg", codec=codec)
    assert lff.verify(tmp_path / "again.lfg").problems == []
    with lff.open_dataset(paths) as old, lff.Reader(tmp_path / "again.lfg") as new:
        assert new.meta == {"fps": 5}
        for i in range(18):
            assert all(_same(new.record(i)[name], value) for name, value in old.record(i).items())
    other = _write(tmp_path / "c.lfg", _samples(9), meta={"fps": 6})
    with pytest.raises(lff.FormatError, match="meta"):
        lff.merge([paths[0], other], tmp_path / "no.lfg")


@pytest.mark.parametrize(("wrong", "what"), [(2**32 - 1, "size of cloud"), (3, "decoded length")])
def test_counts_that_do_not_fit_the_blocks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int, what: str
) -> None:
    from lf_format._blocks import PendingBlock

    columns: dict[str, Any] = {"cloud": np.full(1, wrong, "<u4")}
    monkeypatch.setattr(PendingBlock, "step_columns", lambda self, names: columns)
    with lff.Writer(tmp_path / "a.lfg", fields=[Field.tensor("cloud", "float32", (-1, 3))]) as writer:
        writer.append({"cloud": np.zeros((2, 3))})
    with pytest.raises(lff.FormatError, match=what):
        lff.Reader(tmp_path / "a.lfg")
    assert not lff.verify(tmp_path / "a.lfg").ok


_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [-1, 0, 1, 2**31, 2**70, 1.5, "", "\0", "bits", "video", "int32", [-1, -1], [2**40] * 2, {}]
    ),
    st.lists(st.one_of(st.integers(-2, 2**33), st.text(max_size=3)), max_size=9),
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_schema_gives_anything_but_a_schema_or_one_error(data: st.DataObject) -> None:
    fields = [Field.tokens(), Field.tensor("b", "float32", (-1, 3))]
    spelt = [asdict(f) | {"shape": list(f.shape), "codec": "block"} for f in fields]
    value: dict[str, Any] = {"version": 1, "buckets": [4, 8], "meta": {}, "fields": spelt}
    target = data.draw(st.sampled_from([value, *spelt]))
    target[data.draw(st.sampled_from([*target, "more"]))] = data.draw(_ODD)
    raw = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    try:
        schema = parse_schema(raw, data.draw(st.sampled_from([1, 300, 2**32])), "file", 4096, PROFILE_LFG)
    except lff.FormatError:
        return
    # Unknown keys beside the four are kept out of what is read, as in a .loongbin.
    assert schema.to_json() == raw or set(value) - {"version", "buckets", "meta", "fields"}
