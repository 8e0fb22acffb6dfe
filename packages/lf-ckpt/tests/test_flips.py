"""Flipped bits in every file of every kind of step, and in the files beside the steps (case A2)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from ckpt_kinds import KINDS, Kind
from ckpt_states import assert_same

import lf_ckpt
from lf_ckpt import cli

FLIPS = 24 * int(os.environ.get("LF_FAULTS", "1"))  # of each kind: 240 in all
pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture(scope="module")
def path(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of steps of this kind, without retention."""
    path = tmp_path_factory.mktemp("flips") / "store"
    kind.prepare(path)
    Kind(kind.name, kind.before, kind.after, {**kind.options, "keep": ()}, ranks=kind.ranks).act(
        path, lf_ckpt.FileLayer()
    )
    return path


def assert_never_wrong(kind: Kind, path: Path) -> bool:
    """Every step, and the newest one, loads the right bits or is refused; whether anything was refused."""
    states, refused = kind.states(), False
    with lf_ckpt.open(path, read_only=True) as store:
        for step, wanted in states.items():
            try:
                assert_same(store.load(step).tensors, wanted)
            except lf_ckpt.CorruptError:
                refused = True
        try:
            loaded = store.load()
        except lf_ckpt.NoCheckpointError as error:
            assert {step for step, _ in error.fallbacks} == set(states)  # noqa: PT017
        else:
            assert_same(loaded.tensors, states[loaded.step])
            passed = [step for step, _ in loaded.report.fallbacks]
            assert passed == list(range(max(states), loaded.step, -1))
    return refused


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def test_flips_never_load_wrong_and_deep_verification_finds_all(
    kind: Kind, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(kind.name)
    files = sorted(p for p in path.glob("steps/*/*") if p.stat().st_size)
    refused = 0
    for trial in range(FLIPS):
        file = files[trial % len(files)]
        at, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
        flip(file, at, bit)
        refused += assert_never_wrong(kind, path)
        assert cli.main(["verify", str(path), "--deep"]) == 1, (file, at, bit)
        flip(file, at, bit)
    assert refused > FLIPS // 3
    capsys.readouterr()
    assert cli.main(["verify", str(path), "--deep"]) == 0


@pytest.mark.parametrize("name", ["HEAD", "LOCK", "FORMAT"])
def test_flips_beside_the_steps_lose_no_step(tmp_path: Path, name: str) -> None:
    """HEAD is a hint; LOCK names an owner; FORMAT has a checksum."""
    kind = KINDS[2]
    kind.prepare(tmp_path)
    kind.act(tmp_path, lf_ckpt.FileLayer())
    file = tmp_path / name
    if name == "LOCK":
        file.write_bytes(b'{"host": "h"}\n')
    good, chance = file.read_bytes(), random.Random(0)
    for _ in range(20):
        flip(file, chance.randrange(len(good)), chance.randrange(8))
        try:
            with lf_ckpt.open(tmp_path, read_only=True) as store:
                assert_same(store.load().tensors, kind.after)
                assert store.load().step == kind.step
            assert name != "FORMAT"
        except lf_ckpt.CkptError as error:
            assert name == "FORMAT"
            assert "FORMAT" in str(error)  # noqa: PT017
            assert cli.main(["verify", str(tmp_path)]) == 1
            with pytest.raises(lf_ckpt.CkptError):  # and no writer makes a new store of it
                lf_ckpt.open(tmp_path)
        file.write_bytes(good)
    assert cli.main(["verify", str(tmp_path), "--deep"]) == 0
