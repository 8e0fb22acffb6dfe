"""Stores made by someone who means harm: correct hashes, wild content. Every tool ends with an answer."""

from __future__ import annotations

import contextlib
import hashlib
import json
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

pytestmark = pytest.mark.timeout(120)
OLD = state(1, size=9_000)
NEW = {**OLD, "layer0.weight": torch.zeros(9_000)}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 1 and a delta on it."""
    path = tmp_path_factory.mktemp("good") / "store"
    with lf_ckpt.open(path) as store:
        store.save(1, OLD, {"blob": b"b" * 9000, "epoch": 1}).wait()
        store.save(2, NEW, {"epoch": 2}, metrics={"loss": 1.0}).wait()
    return path


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the body of a manifest and make its hash right again."""
    body = json.loads(path.read_bytes())["body"]
    change(body)
    path.write_bytes(canonical({"body": body, "root": hashlib.sha256(canonical(body)).hexdigest()}))


HUGE = [2**63 - 1, 2**63, 2**62, 2**31, 0]
COUNTS: dict[str, Callable[[dict[str, Any], int], object]] = {
    "created": lambda b, n: b.update(created=n),
    "step": lambda b, n: b.update(step=n),
    "file size": lambda b, n: b["files"][0].update(size=n),
    "file extents": lambda b, n: b["files"][0].update(extents=n),
    "shape": lambda b, n: b["tensors"][0].update(shape=[n]),
    "empty shape": lambda b, n: b["tensors"][0].update(shape=[n, 0, n]),
    "shard shape": lambda b, n: b["tensors"][0]["shards"][0].update(shape=[n]),
    "shard offset": lambda b, n: b["tensors"][0]["shards"][0].update(offsets=[n]),
    "first extent": lambda b, n: b["tensors"][0]["shards"][0]["extents"].__setitem__(1, n),
    "extent count": lambda b, n: b["tensors"][0]["shards"][0]["extents"].__setitem__(2, n),
    "blob": lambda b, n: b["blobs"] and b["blobs"][0].update(nbytes=n),
    "metric": lambda b, n: b.update(metrics={"loss": n}),
    "seconds": lambda b, n: b.update(seconds={"staged": n, "written": n}),
    "version": lambda b, n: b.update(version=[1, n]),
}


@pytest.mark.parametrize("field", COUNTS)
def test_numbers_at_the_edge_of_every_range_give_an_answer(
    good: Path, tmp_path: Path, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, folder in zip(HUGE, "12121", strict=True):
        path = tmp_path / str(number)
        shutil.copytree(good, path)
        rewrite(path / "steps" / folder / "MANIFEST", lambda body, n=number: COUNTS[field](body, n))
        answer(path)
    capsys.readouterr()


def answer(path: Path) -> None:
    """Reading gives right bits or CorruptError; tools end with an exit code; a writer saves, retires and loads."""
    with lf_ckpt.open(path, read_only=True) as store:
        for step, wanted in ((1, OLD), (2, NEW)):
            with contextlib.suppress(lf_ckpt.CorruptError, lf_ckpt.NoCheckpointError):
                assert_same(store.load(step).tensors, wanted)
    for command in (["ls"], ["ls", "--json"], ["show"], ["verify", "--deep"]):
        assert cli.main([command[0], str(path), *command[1:]]) in (0, 1, 2)
    with lf_ckpt.open(path, keep=[lf_ckpt.Last(1), lf_ckpt.EverySeconds(60), lf_ckpt.Best("loss")]) as store:
        store.save(7, OLD).wait()
        assert_same(store.load(7).tensors, OLD)


NAMES = [
    "",
    "\0",
    "a\nb",
    "../../etc/passwd",
    "/",
    "\x1b[2J",
    "\ud800",
    "é" * 1000,
    "a" * 100_000,
    "$bytes",
    "..",
    " ",
]


@pytest.mark.parametrize("name", NAMES, ids=[ascii(name[:12]) for name in NAMES])
def test_any_name_round_trips_or_is_refused_and_never_becomes_a_path(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {name: torch.arange(5), "x": torch.arange(3)}
    with lf_ckpt.open(tmp_path / "store") as store:
        store.save(1, tensors, {name: 1, name + "blob": b"12"}).wait()
        loaded = store.load()
        assert_same(loaded.tensors, tensors)
        assert loaded.items == {name: 1, name + "blob": b"12"}
    assert cli.main(["show", str(tmp_path / "store")]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\0" not in shown
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("depth", [600, 900, 50_000])
def test_items_nested_too_deeply_are_damage_that_a_load_steps_over(
    good: Path, tmp_path: Path, depth: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deeper than Python's stack, whether the JSON parser or the reading of items meets it first."""
    shutil.copytree(good, tmp_path / "store")
    manifest = tmp_path / "store/steps/2/MANIFEST"
    body = json.loads(manifest.read_bytes())["body"]
    text = canonical(body | {"items": {"x": "@"}}).replace(b'"@"', b"[" * depth + b"]" * depth)
    manifest.write_bytes(b'{"body":%s,"root":"%s"}' % (text, hashlib.sha256(text).hexdigest().encode()))

    with lf_ckpt.open(tmp_path / "store", read_only=True) as store:
        loaded = store.load()
        assert loaded.step == 1
        assert [step for step, _ in loaded.report.fallbacks] == [2]
    assert cli.main(["verify", str(tmp_path / "store"), "--deep"]) == 1
    assert "DAMAGED" in capsys.readouterr().out
    answer(tmp_path / "store")


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([2**63 - 1, 2**63, "\0", "../x", "rank-0.lfckpt", "\ud800", "F32", "1.1", "0" * 64]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=values, path=st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_any_value_anywhere_in_a_manifest_gives_a_value_or_corrupt_error(
    good: Path, value: object, path: list[int]
) -> None:
    body = json.loads((good / "steps/2/MANIFEST").read_bytes())["body"]
    replace_at(body, path, value)
    data = canonical({"body": body, "root": hashlib.sha256(canonical(body)).hexdigest()})
    try:
        parsed = manifest_text.parse(data, "x")
    except lf_ckpt.CorruptError:
        return
    assert manifest_text.dump(parsed)[0]
    assert sum(1 for _ in parsed.streams()) >= 0


def replace_at(node: Any, path: list[int], value: object) -> None:
    """Put a value somewhere below `node`: each number chooses a child."""
    for number in path:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = keys[number % len(keys)]
        if number == path[-1] or not isinstance(node[key], dict | list) or not node[key]:
            node[key] = value
            return
        node = node[key]


def test_thousands_of_shards_cost_no_pairs_and_one_overlap_is_found(good: Path) -> None:
    """One tensor of as many elements, each a shard: parsed once, no pair compared."""
    body = json.loads((good / "steps/1/MANIFEST").read_bytes())["body"]
    count = 20_000
    shards = [{"offsets": [i], "shape": [1], "extents": [0, i, 1]} for i in range(count)]
    body.update(
        tensors=[{"name": "x", "dtype": "U8", "shape": [count], "shards": shards}], blobs=[], aliases={}
    )
    body["files"][0]["extents"] = count
    data = canonical({"body": body, "root": hashlib.sha256(canonical(body)).hexdigest()})
    assert len(manifest_text.parse(data, "x").tensors[0].shards) == count

    shards[-1]["offsets"] = [0]
    data = canonical({"body": body, "root": hashlib.sha256(canonical(body)).hexdigest()})
    with pytest.raises(lf_ckpt.CorruptError, match="overlap"):
        manifest_text.parse(data, "x")


@pytest.mark.parametrize("lengths", [[3, 29], [1] * 32, [30, 2]])
def test_an_extent_that_ends_inside_an_element_is_damage(tmp_path: Path, lengths: list[int]) -> None:
    """Raw extents of width 1, each hash right: a tensor filled element by element could not take them."""
    wanted = torch.arange(8.0)
    with lf_ckpt.open(tmp_path, compress="raw") as store:
        store.save(1, {"x": torch.zeros(8)}).wait()
        store.save(2, {"x": wanted}).wait()
    data, manifest = tmp_path / "steps/2/rank-0.lfckpt", tmp_path / "steps/2/MANIFEST"
    raw, parts, extents = wanted.numpy().tobytes(), [data.read_bytes()[:4096]], []
    for number, length in enumerate(lengths):
        start = sum(lengths[:number])
        piece = raw[start : start + length]
        digest, place = format.hash128(piece), 4096 * (number + 1)
        extents.append(format.Extent(0, format.RAW, 1, start, length, length, place, digest, digest))
        parts.append(piece.ljust(4096, b"\0"))
    index, at = format.pack_index(extents), 4096 * (len(lengths) + 1)
    size = at + len(index) + 128
    trailer = format.Trailer(at, len(index), len(extents), size, format.hash128(index), None)
    data.write_bytes(b"".join([*parts, index, format.pack_trailer(trailer)]))

    def fit(body: dict[str, Any]) -> None:
        body["files"][0].update(size=size, extents=len(extents), index_hash=trailer.index_hash.hex())
        body["tensors"][0]["shards"][0]["extents"] = [0, 0, len(extents)]

    rewrite(manifest, fit)
    into = torch.ones(16)[::2]
    with lf_ckpt.open(tmp_path, read_only=True) as store:
        with pytest.raises(lf_ckpt.CorruptError, match="inside an element"):
            store.load(2, into={"x": into})
        assert torch.equal(into, torch.ones(8))
        assert store.load(into={"x": into}).step == 1
    assert cli.main(["verify", str(tmp_path), "--deep"]) == 1
