"""Other formats in and out: checked against the libraries that own them; hostile files are typed errors."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_dtypes import KNOWN
from ckpt_faults import FailAtCall
from ckpt_states import assert_same, bits, files_under
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import lf_ckpt
from lf_ckpt.dtypes import dtype_of
from lf_ckpt.interop import safetensors_format as safe

safetensors = pytest.importorskip("safetensors.torch")
SafetensorError: Any = pytest.importorskip("safetensors").SafetensorError


def model_state() -> dict[str, torch.Tensor]:
    weight = torch.randn(400, 700)
    return {
        "model.embed": weight,
        "model.head": weight,
        "model.half": torch.randn(3, 5).bfloat16(),
        "model.count": torch.tensor(7),
        "model.mask": torch.tensor([True, False, True]),
        "model.none": torch.empty(0, 4),
        "optim.embed.exp_avg": weight * 2,
    }


@pytest.fixture
def store(tmp_path: Path) -> lf_ckpt.Store:
    with lf_ckpt.open(tmp_path / "store") as writer:
        writer.save(1, {**model_state(), "model.count": torch.tensor(6)}).wait()
        writer.save(2, model_state(), {"epoch": 3}).wait()
    return lf_ckpt.open(tmp_path / "store", read_only=True)


def test_the_safetensors_library_reads_what_is_exported(store: lf_ckpt.Store, tmp_path: Path) -> None:
    wanted = store.load(2, only="model.*").tensors
    report = lf_ckpt.export_safetensors(store, 2, tmp_path / "out", prefix="model.")

    found = safetensors.load_file(tmp_path / "out/model.safetensors")

    assert report.aliases == (("head", "embed"),)
    assert (report.step, report.tensors, report.left_out) == (2, 5, 1)
    assert report.files == (("model.safetensors", (tmp_path / "out/model.safetensors").stat().st_size),)
    assert_same(found, {n[6:]: t for n, t in wanted.items() if n != "model.head"})
    assert files_under(tmp_path / "out") == {"model.safetensors"}


def test_ties_left_out_are_known_to_load_model_and_to_the_import(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 3)
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.embed.weight

    model, fresh = Tied(), Tied()
    with lf_ckpt.open(tmp_path / "store") as store:
        store.save(1, *lf_ckpt.collect(model)).wait()
        lf_ckpt.export_safetensors(store, 1, tmp_path / "out", prefix="model.")

    safetensors.load_model(fresh, tmp_path / "out/model.safetensors")
    imported = lf_ckpt.import_safetensors(tmp_path / "out", prefix="model.")

    assert bits(fresh.head.weight) == bits(model.head.weight)
    assert imported.tensors["model.head.weight"] is imported.tensors["model.embed.weight"]
    assert imported.items == {"safetensors.metadata": {"format": "pt", "lf_ckpt.step": "1"}}
    again = Tied()
    lf_ckpt.restore(again, None, imported)
    assert bits(again.embed.weight) == bits(model.embed.weight)


def test_tied_tensors_are_copied_when_asked(store: lf_ckpt.Store, tmp_path: Path) -> None:
    lf_ckpt.export_safetensors(store, "latest", tmp_path / "out", only="model.*", ties="copy")

    assert_same(safetensors.load_file(tmp_path / "out/model.safetensors"), store.load(only="model.*").tensors)


def test_shards_and_their_index_hold_every_tensor_once(store: lf_ckpt.Store, tmp_path: Path) -> None:
    wanted = store.load(2).tensors
    report = lf_ckpt.export_safetensors(store, 2, tmp_path / "out", max_shard_bytes=1 << 20)

    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        part = safetensors.load_file(tmp_path / "out" / name)
        assert all(index["weight_map"][tensor] == name for tensor in part)
        found |= part

    assert len(report.files) == 5  # the index, and two big tensors that take a shard each
    assert index["metadata"]["total_size"] == report.bytes_raw
    assert_same({**found, "model.head": found["model.embed"]}, wanted)
    assert_same(lf_ckpt.import_safetensors(tmp_path / "out").tensors, wanted)


@pytest.mark.parametrize("name", [n for n in KNOWN if n not in ("C32", "C128")])
def test_every_dtype_goes_both_ways_through_the_library(tmp_path: Path, name: str) -> None:
    dtype = dtype_of(name)
    bytes_ = torch.arange(48, dtype=torch.uint8) % (2 if name == "BOOL" else 255)
    tensor = bytes_.view(dtype).view(3, -1)
    with lf_ckpt.open(tmp_path / "store") as store:
        store.save(1, {"t": tensor}).wait()
        lf_ckpt.export_safetensors(store, 1, tmp_path / "out")
    try:
        found = safetensors.load_file(tmp_path / "out/model.safetensors")
        safetensors.save_file({"t": tensor}, tmp_path / "theirs.safetensors")
    except (KeyError, SafetensorError) as error:
        pytest.skip(f"this safetensors has no {name}: {error!r}")

    assert bits(found["t"]) == bits(tensor)
    assert_same(lf_ckpt.import_safetensors(tmp_path / "theirs.safetensors").tensors, {"t": tensor})


def test_types_that_safetensors_lacks_are_named(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "store") as store:
        store.save(1, {"z": torch.zeros(2, dtype=torch.complex128), "a": torch.ones(2)}).wait()
        with pytest.raises(lf_ckpt.UnsupportedError, match="z: safetensors has no C128"):
            lf_ckpt.export_safetensors(store, 1, tmp_path / "out")
        lf_ckpt.export_safetensors(store, 1, tmp_path / "out", only="a")
    assert not (tmp_path / "out.tmp").exists()


@pytest.mark.parametrize("at", range(8))
def test_an_export_that_fails_leaves_nothing(store: lf_ckpt.Store, tmp_path: Path, at: int) -> None:
    files = FailAtCall(at, errno.ENOSPC)
    files.armed = True

    with pytest.raises(lf_ckpt.CkptError, match="No space left"):
        lf_ckpt.export_safetensors(store, 2, tmp_path / "out", files=files, max_shard_bytes=1 << 20)

    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.tmp").exists()


def test_an_export_does_not_overwrite(store: lf_ckpt.Store, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(lf_ckpt.CkptError, match="there already"):
        lf_ckpt.export_safetensors(store, 2, tmp_path / "out")
    with pytest.raises(lf_ckpt.CkptError, match="there already"):
        lf_ckpt.export_file(store, 2, tmp_path / "out")


def test_a_damaged_step_is_not_exported(store: lf_ckpt.Store, tmp_path: Path) -> None:
    path = tmp_path / "store/steps/2/rank-0.lfckpt"
    data = bytearray(path.read_bytes())
    data[5000] ^= 4
    path.write_bytes(data)

    with pytest.raises(lf_ckpt.CorruptError, match="hash"):
        lf_ckpt.export_safetensors(store, 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def blob(document: Any, data: bytes = b"") -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text + data


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
TWICE = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
HOSTILE = {
    "empty": b"",
    "short": b"\0\0\0",
    "header too long": struct.pack("<Q", 1 << 62) + b"{}",
    "not json": blob(b"{x"),
    "not an object": blob(b"[1]"),
    "space first": blob(b" {}"),
    "not utf-8": blob(b'{"\xff":1}'),
    "nested": blob(b"{" + b'"a":{' * 20_000),
    "nan": blob(b'{"a": NaN}'),
    "hole": blob({**GOOD, "b": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}}, bytes(16)),
    "overlap": blob({**GOOD, "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
    "trailing": blob(GOOD, bytes(9)),
    "cut": blob(GOOD, bytes(7)),
    "begins late": blob({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
    "wrong size": blob({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)),
    "negative": blob({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}}, b""),
    "huge": blob({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 8]}}, bytes(8)),
    "bool size": blob({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, bytes(1)),
    "twice": blob(TWICE, bytes(1)),
    "extra key": blob({"a": {**GOOD["a"], "x": 1}}, bytes(8)),
    "metadata no text": blob({"__metadata__": {"a": 1}}),
    "dtype list": blob({"a": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "empty and huge": blob({"a": {"dtype": "F32", "shape": [0, 1 << 62, 4], "data_offsets": [0, 0]}}),
    "one offset": blob({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, bytes(8)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_safetensors_are_damage_for_us_and_for_the_library(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE[name])

    with pytest.raises(lf_ckpt.CorruptError, match=r"x\.safetensors"):
        lf_ckpt.import_safetensors(path)
    if name not in ("twice", "extra key", "space first", "empty and huge"):  # the library is less strict
        with pytest.raises(SafetensorError):
            safetensors.load(HOSTILE[name])


def test_what_the_metadata_says_of_the_file_is_no_tie(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.save_file({"pt": torch.ones(2)}, path, metadata={"format": "pt", "tied": "pt"})

    tensors, items = lf_ckpt.import_safetensors(path)

    assert set(tensors) == {"pt", "tied"}
    assert items == {"safetensors.metadata": {"format": "pt"}}


def test_a_name_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "store") as store:
        store.save(1, {"\ud800": torch.ones(1)}).wait()
        with pytest.raises(lf_ckpt.UnsupportedError, match="ud800"):
            lf_ckpt.export_safetensors(store, 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_element_type_that_we_lack_is_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(blob({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, bytes(1)))
    with pytest.raises(lf_ckpt.UnsupportedError, match="F4"):
        lf_ckpt.import_safetensors(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_header_parser_is_total(data: st.DataObject) -> None:
    good = bytearray(
        safe.pack_header(safe.lay_out([("a", "F32", (2,)), ("b", "U8", (3,))]), {"format": "pt"})[8:]
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at] = data.draw(st.integers(0, 255))
    try:
        header = safe.parse_header(bytes(good), 11, "x")
    except (lf_ckpt.CorruptError, lf_ckpt.UnsupportedError):
        return
    assert sum(t.end - t.begin for t in header.tensors) == 11


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        b'{"weight_map": {"a": "../x.safetensors"}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": []}',
    ],
)
def test_a_hostile_index_is_damage(tmp_path: Path, index: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(lf_ckpt.CorruptError, match="index"):
        lf_ckpt.import_safetensors(tmp_path)


def test_an_index_is_held_to_its_files(tmp_path: Path) -> None:
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "two.safetensors")
    with pytest.raises(lf_ckpt.CorruptError, match="another file of the folder"):
        lf_ckpt.import_safetensors(tmp_path)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(lf_ckpt.CorruptError, match="tensor b"):
        lf_ckpt.import_safetensors(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(lf_ckpt.CkptError, match="two"):
        lf_ckpt.import_safetensors(tmp_path)


def test_changing_an_imported_tensor_changes_no_file(tmp_path: Path) -> None:
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    lf_ckpt.import_safetensors(tmp_path / "x.safetensors").tensors["a"].zero_()

    assert safetensors.load_file(tmp_path / "x.safetensors")["a"].tolist() == [1, 1]


class Payload:
    """Runs when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/lf-ckpt-was-here",)


@pytest.fixture
def dcp_folder(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    tensors = {
        "w": torch.randn(30, 4),
        "half": torch.randn(3).bfloat16(),
        "scalar": torch.tensor(2),
        "none": torch.empty(0, 3),
    }
    state = {"model": tensors, "epoch": 3, "more": [1, {"t": torch.ones(2)}], "text": OrderedDict(a=(1, 2))}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp", tensors


def test_a_dcp_folder_becomes_names_and_items(dcp_folder: tuple[Path, dict[str, Any]]) -> None:
    imported = lf_ckpt.import_dcp(dcp_folder[0])

    assert_same(
        imported.tensors,
        {**{f"model.{n}": t for n, t in dcp_folder[1].items()}, "more.1.t": torch.ones(2)},
    )
    assert imported.items["epoch"] == 3
    assert imported.items["more.0"] == 1
    assert lf_ckpt.unpack(imported.items["text.a"], {}) == (1, 2)


@pytest.mark.parametrize("offset", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_cut_dcp_folder_is_a_typed_error(
    dcp_folder: tuple[Path, dict[str, Any]], name: str, offset: float
) -> None:
    path = dcp_folder[0] / name
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * offset)])
    with pytest.raises(lf_ckpt.CkptError):
        lf_ckpt.import_dcp(dcp_folder[0])


def test_code_in_dcp_metadata_is_refused_and_does_not_run(dcp_folder: tuple[Path, dict[str, Any]]) -> None:
    (dcp_folder[0] / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(lf_ckpt.CorruptError, match="mkdir is not allowed"):
        lf_ckpt.import_dcp(dcp_folder[0])
    assert not Path("/tmp/lf-ckpt-was-here").exists()


def test_a_huge_memo_number_in_dcp_metadata_takes_no_memory(dcp_folder: tuple[Path, dict[str, Any]]) -> None:
    (dcp_folder[0] / ".metadata").write_bytes(b"\x80\x04]r\xff\xff\xff\x7f.")  # 34 GB in the unpickler of C
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(lf_ckpt.CorruptError):
        lf_ckpt.import_dcp(dcp_folder[0])

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000  # kB


def test_objects_in_a_dcp_folder_are_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.ones(2), "odd": Payload}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(lf_ckpt.UnsupportedError, match="odd is neither tensor nor plain data"):
        lf_ckpt.import_dcp(tmp_path / "dcp")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_damaged_dcp_metadata_is_a_typed_error_or_the_same_state(
    dcp_folder: tuple[Path, dict[str, Any]], data: st.DataObject
) -> None:
    path = dcp_folder[0] / ".metadata"
    good = path.read_bytes()
    bad = bytearray(good)
    at = data.draw(st.integers(0, len(bad) - 1))
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bad)
    try:
        lf_ckpt.import_dcp(dcp_folder[0])
    except lf_ckpt.CkptError:
        pass
    finally:
        path.write_bytes(good)


def test_formats_are_told_apart(
    tmp_path: Path, dcp_folder: tuple[Path, dict[str, Any]], store: lf_ckpt.Store
) -> None:
    state = {"w": torch.ones(3)}
    safetensors.save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "b.pt")
    torch.save(state, tmp_path / "c.bin", _use_new_zipfile_serialization=False)
    lf_ckpt.export_file(store, 2, tmp_path / "d.lfckpt")
    lf_ckpt.export_safetensors(store, 2, tmp_path / "e")
    (tmp_path / "f").write_bytes(b"text")

    for name in ("a.safetensors", "b.pt", "c.bin"):
        assert_same(lf_ckpt.import_any(tmp_path / name).tensors, state)
    assert "model.w" in lf_ckpt.import_any(dcp_folder[0]).tensors
    assert_same(lf_ckpt.import_any(tmp_path / "d.lfckpt").tensors, store.load(2).tensors)
    assert_same(lf_ckpt.import_any(tmp_path / "e").tensors, store.load(2).tensors)
    for name in ("f", "gone"):
        with pytest.raises(lf_ckpt.UnsupportedError, match=name):
            lf_ckpt.import_any(tmp_path / name)
