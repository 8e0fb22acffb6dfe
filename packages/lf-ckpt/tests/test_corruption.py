"""Damage is found, named and stepped over; it never becomes a tensor."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_states import assert_same, state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lf_ckpt
from lf_ckpt import cli, format, manifest_text
from lf_ckpt.jsonio import canonical

FILES = ["steps/1/rank-0.lfckpt", "steps/2/rank-0.lfckpt", "steps/1/MANIFEST", "steps/2/MANIFEST"]
OLD = {**state(1, size=9_000), "counts": torch.arange(20_000)}
NEW = {**OLD, "layer0.weight": torch.zeros(9_000), "step": torch.tensor(2)}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base (step 1, compressed and raw extents) and a delta on it (step 2)."""
    path = tmp_path_factory.mktemp("good") / "store"
    with lf_ckpt.open(path) as store:
        assert store.save(1, OLD, {"blob": b"b" * 9000}).wait().codecs.keys() >= {"raw", "planes+zstd"}
        assert store.save(2, NEW, {"text": "item"}).wait().kind == "delta"
    return path


@pytest.fixture
def store_path(good: Path, tmp_path: Path) -> Path:
    """A private copy of the good store."""
    shutil.copytree(good, tmp_path / "store")
    return tmp_path / "store"


def check_never_wrong(path: Path) -> bool:
    """Load both steps and the latest one: right bits or CorruptError. Whether anything was refused."""
    refused = False
    with lf_ckpt.open(path, read_only=True) as store:
        for step, wanted in ((1, OLD), (2, NEW)):
            try:
                assert_same(store.load(step).tensors, wanted)
            except lf_ckpt.CorruptError:
                refused = True
        try:
            loaded = store.load()
            assert_same(loaded.tensors, {1: OLD, 2: NEW}[loaded.step])
            assert [step for step, _ in loaded.report.fallbacks] == ([] if loaded.step == 2 else [2])
        except lf_ckpt.NoCheckpointError as error:
            assert [step for step, _ in error.fallbacks] == [2, 1]  # noqa: PT017
    return refused


def test_two_hundred_flipped_bits_never_load_and_all_are_found(
    store_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # case A2
    chance = random.Random(0)
    refused = 0
    for trial in range(200):
        path = store_path / FILES[trial % len(FILES)]
        data = path.read_bytes()
        at, bit = chance.randrange(len(data)), chance.randrange(8)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])

        refused += check_never_wrong(store_path)
        assert cli.main(["verify", str(store_path), "--deep"]) == 1, (path, at, bit)
        assert "DAMAGED" in capsys.readouterr().out
        path.write_bytes(data)
    assert refused > 100
    assert cli.main(["verify", str(store_path), "--deep"]) == 0


@pytest.mark.parametrize(
    "name", ["steps/1/rank-0.lfckpt", "steps/2/rank-0.lfckpt", "steps/1/MANIFEST", "steps/2/MANIFEST"]
)
@pytest.mark.parametrize("cut", [0, 1, 127, 128, 4096, 0.5, -4096, -128, -1])
def test_truncated_files_are_damage(store_path: Path, name: str, cut: float) -> None:
    path = store_path / name
    size = path.stat().st_size
    length = int(size * cut) if isinstance(cut, float) else cut % size
    path.write_bytes(path.read_bytes()[:length])

    assert check_never_wrong(store_path)


def test_a_longer_file_is_damage(store_path: Path) -> None:
    with (store_path / "steps/2/rank-0.lfckpt").open("ab") as file:
        file.write(b"\0" * 4096)

    assert check_never_wrong(store_path)


@pytest.mark.parametrize("gone", ["steps/1", "steps/1/MANIFEST", "steps/1/rank-0.lfckpt"])
def test_a_delta_without_its_base_is_refused_by_name(store_path: Path, gone: str) -> None:
    path = store_path / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()

    with lf_ckpt.open(store_path, read_only=True) as store:
        with pytest.raises(lf_ckpt.CorruptError, match="1"):
            store.load(2)
        with pytest.raises(lf_ckpt.NoCheckpointError):
            store.load()


def test_a_delta_on_a_base_that_was_swapped_is_refused(store_path: Path, tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "other") as store:
        store.save(1, NEW).wait()
    shutil.rmtree(store_path / "steps/1")
    shutil.copytree(tmp_path / "other/steps/1", store_path / "steps/1")

    with (
        lf_ckpt.open(store_path, read_only=True) as store,
        pytest.raises(lf_ckpt.CorruptError, match="another save"),
    ):
        store.load(2)


def flip_in_extent(path: Path, tensor: str) -> int:
    """Damage the data of a tensor; returns the file offset."""
    data = bytearray(path.read_bytes())
    body = json.loads((path.parent / "MANIFEST").read_bytes())["body"]
    first = next(t["shards"][0]["extents"][1] for t in body["tensors"] if t["name"] == tensor)
    trailer = format.parse_trailer(bytes(data[-128:]), len(data), str(path))
    index = format.parse_index(bytes(data[trailer.index_offset : -128]), trailer, str(path))
    at = index[first].place + index[first].stored_bytes // 2
    data[at] ^= 1
    path.write_bytes(data)
    return at


def test_the_error_names_file_tensor_extent_offset_and_both_hashes(store_path: Path) -> None:
    flip_in_extent(store_path / "steps/1/rank-0.lfckpt", "layer1.weight")

    with lf_ckpt.open(store_path, read_only=True) as store, pytest.raises(lf_ckpt.CorruptError) as caught:
        store.load(1)

    error = caught.value
    assert error.path.endswith("steps/1/rank-0.lfckpt")
    assert (error.tensor, error.extent) == ("layer1.weight", 1)
    assert error.offset is not None
    assert len(str(error.expected)) == len(str(error.found)) == 32
    assert error.expected != error.found


def test_falling_back_is_reported_and_logged(store_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip_in_extent(store_path / "steps/2/rank-0.lfckpt", "layer0.weight")
    with lf_ckpt.open(store_path, read_only=True) as store:
        loaded = store.load()

    assert loaded.step == 1
    ((step, reason),) = loaded.report.fallbacks
    assert step == 2
    assert "layer0.weight" in reason
    assert "layer0.weight" in caplog.text


def test_into_is_untouched_when_the_last_extent_is_bad(store_path: Path) -> None:
    flip_in_extent(store_path / "steps/1/rank-0.lfckpt", "counts")
    into = {name: torch.full_like(tensor, 5) for name, tensor in OLD.items()}
    with lf_ckpt.open(store_path, read_only=True) as store, pytest.raises(lf_ckpt.CorruptError):
        store.load(1, into=into)

    assert all(bool((tensor == 5).all()) for tensor in into.values())


def test_retention_does_not_count_damaged_steps(store_path: Path) -> None:
    flip_in_extent(store_path / "steps/2/rank-0.lfckpt", "layer0.weight")
    with lf_ckpt.open(store_path, keep=[lf_ckpt.Last(2)]) as store:
        assert store.load().step == 1
        store.save(3, NEW).wait()
        assert store.steps() == (1, 2, 3)
        assert_same(store.load(1).tensors, OLD)


def test_verify_false_still_checks_structure(store_path: Path) -> None:
    flip_in_extent(store_path / "steps/1/rank-0.lfckpt", "layer1.weight")
    with lf_ckpt.open(store_path, read_only=True) as store:
        assert set(store.load(1, verify=False).tensors) == set(OLD)
        (store_path / "steps/1/rank-0.lfckpt").write_bytes(b"")
        with pytest.raises(lf_ckpt.CorruptError):
            store.load(1, verify=False)


# -- hostile manifests: correctly hashed, wrongly meant --------------------------------------------------------------


def first_tensor(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["tensors"][0].update(changes)


def first_shards(*shards: tuple[list[int], list[int], list[int]]) -> Callable[[dict[str, Any]], None]:
    """Shards (offsets, shape, extents) of the first tensor, which has 9,000 elements."""
    keys = ("offsets", "shape", "extents")
    return first_tensor(shards=[dict(zip(keys, shard, strict=True)) for shard in shards])


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "file name climbs": lambda b: b["files"][0].update(name="../../../etc/passwd"),
    "file name absolute": lambda b: b["files"][0].update(name="/etc/passwd"),
    "parent climbs": lambda b: b.update(parent={"folder": "../1", "root": "0" * 64}),
    "own parent": lambda b: b.update(parent={"folder": "1", "root": "0" * 64}),
    "huge shape": first_tensor(shape=[2**62, 2**62]),
    "large shape": first_tensor(shape=[2**40]),
    "negative shape": first_tensor(shape=[-9000]),
    "boolean shape": first_tensor(shape=[True, 9000]),
    "shape is text": first_tensor(shape="9000"),
    "many dimensions": first_tensor(shape=[1] * 5000),
    "unknown dtype": first_tensor(dtype="F7"),
    "other dtype": first_tensor(dtype="F64"),
    "extents outside": first_shards(([0], [9000], [0, 10**9, 1])),
    "extents of another": first_shards(([0], [9000], [0, 1, 1])),
    "no such file": first_shards(([0], [9000], [7, 0, 1])),
    "no shards": first_shards(),
    "shard outside": first_shards(([9000], [9000], [0, 0, 1])),
    "shard too long": first_shards(([0], [9001], [0, 0, 1])),
    "shard of other dimensions": first_shards(([0, 0], [9000, 1], [0, 0, 1])),
    "shards leave a hole": first_shards(([0], [10], [0, 0, 1]), ([11], [8989], [0, 1, 0])),
    "shards overlap": first_shards(([0], [10], [0, 0, 1]), ([9], [8991], [0, 1, 0])),
    "shard twice": first_shards(([0], [9000], [0, 0, 1]), ([0], [9000], [0, 1, 0])),
    "empty shard beside the whole": first_shards(([0], [9000], [0, 0, 1]), ([5], [0], [0, 1, 0])),
    "shards share an extent": first_shards(([0], [4500], [0, 0, 1]), ([4500], [4500], [0, 0, 1])),
    "negative offset": first_shards(([-1], [9001], [0, 0, 1])),
    "offsets are text": first_tensor(shards=[{"offsets": "0", "shape": [9000], "extents": [0, 0, 1]}]),
    "shards is a number": first_tensor(shards=3),
    "extents left over": lambda b: b["files"][0].update(extents=b["files"][0]["extents"] + 1),
    "a file of another rank": lambda b: b["files"][0].update(name="rank-1.lfckpt"),
    "a file that is not there": lambda b: b["files"].append({**b["files"][0], "name": "rank-1.lfckpt"}),
    "two of a name": lambda b: b["tensors"].append(b["tensors"][0]),
    "alias to nothing": lambda b: b.update(aliases={"x": "nothing"}),
    "alias of itself": lambda b: b.update(aliases={"x": "x"}),
    "huge blob": lambda b: b["blobs"][0].update(nbytes=2**50),
    "bad item tag": lambda b: b.update(items={"x": {"$pickle": "gASV"}}),
    "newer version": lambda b: b.update(version=[2, 0]),
    "unknown feature": lambda b: b.update(requires=["future"]),
    "other step": lambda b: b.update(step=7),
    "other store": lambda b: b.update(store="0" * 32),
    "missing key": lambda b: b.pop("aliases"),
    "files is a number": lambda b: b.update(files=3),
    "no files": lambda b: b.update(files=[]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(store_path: Path, name: str) -> None:
    path = store_path / "steps/1/MANIFEST"
    body = json.loads(path.read_bytes())["body"]
    HOSTILE[name](body)
    path.write_bytes(canonical({"body": body, "root": hashlib.sha256(canonical(body)).hexdigest()}))

    with lf_ckpt.open(store_path, read_only=True) as store, pytest.raises(lf_ckpt.CorruptError):
        store.load(1)


NO_MANIFEST = ["", "null", "[]", "{}", "[" * 100_000, '{"body":1e999}', "9" * 10_000, "\xff", '{"a":1,"a":2}']


@pytest.mark.parametrize("text", NO_MANIFEST)
def test_a_manifest_that_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(lf_ckpt.CorruptError):
        manifest_text.parse(text.encode("latin-1"), "MANIFEST")


# -- fuzzing the parsers ---------------------------------------------------------------------------------------------

edits = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6)


def mutate(data: bytes, changes: list[tuple[float, int]]) -> bytes:
    result = bytearray(data)
    for where, value in changes:
        result[int(where * len(result))] = value
    return bytes(result)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=edits, part=st.sampled_from(["header", "index", "trailer"]), rehash=st.booleans())
def test_mutated_structure_gives_a_value_or_corrupt_error(
    good: Path,
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[float, int]],
    part: str,
    rehash: bool,
) -> None:
    """With `rehash` the checksums are made right again, so the field checks behind them are reached."""
    file = (good / "steps/2/rank-0.lfckpt").read_bytes()
    path = "x.lfckpt"
    trailer = format.parse_trailer(file[-128:], len(file), path)
    try:
        if part == "header":
            data = mutate(file[:64], changes) + file[64:4088]
            format.parse_header(format._summed(data) if rehash else data + file[4088:4096], path)
        elif part == "trailer":
            data = mutate(file[-128:-8], changes)
            format.parse_trailer(format._summed(data) if rehash else data + file[-8:], len(file), path)
        else:
            data = mutate(file[trailer.index_offset : -128], changes)
            known = trailer._replace(index_hash=format.hash128(data)) if rehash else trailer
            records = format.parse_index(data, known, path)
            assert all(0 < record.raw_bytes <= format.EXTENT_BYTES for record in records)
    except lf_ckpt.CorruptError:
        pass


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=5000))
def test_random_bytes_are_never_a_file(data: bytes) -> None:
    for parse in (
        lambda: format.parse_header(data, "x"),
        lambda: format.parse_trailer(data, len(data), "x"),
        lambda: manifest_text.parse(data, "x"),
    ):
        with pytest.raises(lf_ckpt.CorruptError):
            parse()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(value=json_values, key=st.integers(0, 10**6), deeper=st.booleans())
def test_any_json_in_any_field_of_a_manifest_gives_a_value_or_corrupt_error(
    good: Path, value: object, key: int, deeper: bool
) -> None:
    body = json.loads((good / "steps/2/MANIFEST").read_bytes())["body"]
    name = sorted(body)[key % len(body)]
    inner = body[name]
    if deeper and isinstance(inner, list) and inner and isinstance(inner[0], dict):
        inner[0][sorted(inner[0])[key % len(inner[0])]] = value
    else:
        body[name] = value
    data = canonical({"body": body, "root": hashlib.sha256(canonical(body)).hexdigest()})
    with contextlib.suppress(lf_ckpt.CorruptError):
        assert manifest_text.parse(data, "x").step >= 0


def test_the_step_that_a_load_fell_back_to_is_the_base_from_then_on(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, full_every=0) as store:
        store.save(1, state(1)).wait()
        store.save(2, state(2)).wait()
    with lf_ckpt.open(tmp_path) as store:
        assert store.load().step == 2
        data = tmp_path / "steps/2/rank-0.lfckpt"
        content = bytearray(data.read_bytes())
        content[5000] ^= 1
        data.write_bytes(content)

        assert store.load().step == 1
        assert store.save(3, state(1)).wait().base == "1"
