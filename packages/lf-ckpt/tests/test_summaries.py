"""Retention reads the manifest of every step after every save, and parses only what has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lf_ckpt
from lf_ckpt import summaries
from lf_ckpt.errors import CorruptError
from lf_ckpt.files import FileLayer
from lf_ckpt.manifest import Manifest
from lf_ckpt.reader import parse_manifest, read_manifest
from lf_ckpt.summaries import Summaries

STATE = {"x": torch.arange(5.0), "y": torch.ones(3)}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders whose manifests were parsed."""
    folders: list[str] = []

    def parse(data: bytes, path: str, folder: str) -> Manifest:
        folders.append(folder)
        return parse_manifest(data, path, folder)

    monkeypatch.setattr(summaries, "parse_manifest", parse)
    return folders


def save(path: Path, *steps: int) -> None:
    with lf_ckpt.open(path, keep=[lf_ckpt.Last(3)], full_every=0) as store:
        for step in steps:
            store.save(step, STATE, {"step": step}, metrics={"loss": 1 / step}).wait()


def test_a_writer_parses_the_steps_it_finds_once_and_its_own_never(tmp_path: Path, parsed: list[str]) -> None:
    """It was each step at each save: 4 s of CPU with 40 steps of 1200 tensors."""
    save(tmp_path, 1, 2, 3, 4, 5)
    assert parsed == []
    save(tmp_path, 6, 7, 8, 9)
    assert sorted(parsed) == ["3", "4", "5"]
    with lf_ckpt.open(tmp_path, read_only=True) as store:
        assert store.steps() == store.steps() == (7, 8, 9)


def test_a_summary_is_the_manifest_without_what_grows(tmp_path: Path) -> None:
    save(tmp_path, 1)
    known = Summaries(FileLayer(), str(tmp_path / "steps"))
    whole = read_manifest(FileLayer(), str(tmp_path / "steps"), "1")
    for _ in range(2):
        found = known.read("1")
        assert (found.step, found.root, found.files, found.metrics) == (
            1,
            whole.root,
            whole.files,
            {"loss": 1.0},
        )
        assert (found.tensors, found.items) == ((), {})


def test_what_a_commit_teaches_is_what_a_reader_finds(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        for step in (1, 2):
            store.save(step, STATE, {"step": step}, metrics={"loss": 2}).wait()
        catalog = store._catalog
        taught = catalog.summaries()
    assert taught == [Summaries(FileLayer(), catalog.steps).read(folder) for folder in ("1", "2")]
    assert [m.root for m in taught] == [m.root for m in catalog.committed()]


def test_a_manifest_that_changes_on_disk_is_seen_to(tmp_path: Path) -> None:
    save(tmp_path, 1)
    known = Summaries(FileLayer(), str(tmp_path / "steps"))
    known.read("1")
    path = tmp_path / "steps/1/MANIFEST"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(CorruptError, match="steps/1/MANIFEST"):
            known.read("1")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        known.read("1")
