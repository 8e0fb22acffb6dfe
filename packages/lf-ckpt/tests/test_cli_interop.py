"""export, import and verify of a single file on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ckpt_states import assert_same, files_under, state

import lf_ckpt
from lf_ckpt import cli

safetensors = pytest.importorskip("safetensors.torch")


def named(seed: int) -> dict[str, torch.Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in state(seed).items()}
    return {**tensors, "model.tied": tensors["model.layer0.weight"], "optim.m": torch.ones(5)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with lf_ckpt.open(tmp_path / "store") as store:
        for step in (10, 20):
            store.save(step, named(step), {"epoch": step}).wait()
    return tmp_path / "store"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_weights_are_exported_under_the_names_of_the_module(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(capsys, "export", path, "--safetensors", tmp_path / "out", "--prefix", "model.")

    assert code == 0
    assert "step 20: 4 tensors, 1 tied names, 1 left out, 1 files" in out
    found = safetensors.load_file(tmp_path / "out/model.safetensors")
    assert_same(found, state(20))


def test_a_step_goes_to_a_file_and_from_there_into_another_store(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(capsys, "export", path, 10, "--lfckpt", tmp_path / "x.lfckpt", "--json")
    assert code == 0
    assert json.loads(out)["step"] == 10
    assert run(capsys, "verify", tmp_path / "x.lfckpt")[0] == 0
    assert "step 10 ok (every byte" in run(capsys, "verify", tmp_path / "x.lfckpt", "--deep")[1]

    code, out = run(capsys, "import", tmp_path / "new", tmp_path / "x.lfckpt", "--step", 3)

    assert code == 0
    assert "step 3: 6 tensors, 1 items" in out
    with lf_ckpt.open(tmp_path / "new", read_only=True) as store:
        loaded = store.load()
    assert_same(loaded.tensors, named(10))
    assert loaded.tensors["model.tied"] is loaded.tensors["model.layer0.weight"]
    assert loaded.items == {"epoch": 10}


def test_an_import_gets_a_prefix_and_supersedes_nothing(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt")
    before = files_under(path)

    code, out = run(capsys, "import", path, tmp_path / "old.pt", "--step", 20)
    assert code == 2
    assert "step 20 is there already" in out
    assert files_under(path) == before
    assert run(capsys, "import", path, tmp_path / "old.pt", "--step", 30, "--prefix", "model.")[0] == 0

    with lf_ckpt.open(path, read_only=True) as store:
        assert store.load(30).tensors.keys() == {"model.w"}


def test_damage_is_exit_code_one(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "export", path, "--lfckpt", tmp_path / "x.lfckpt")
    data = bytearray((tmp_path / "x.lfckpt").read_bytes())
    data[5000] ^= 1
    (tmp_path / "x.lfckpt").write_bytes(data)

    assert run(capsys, "verify", tmp_path / "x.lfckpt", "--deep")[0] == 1
    assert run(capsys, "import", tmp_path / "new", tmp_path / "x.lfckpt", "--step", 1)[0] == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["export", "STORE", "15", "--lfckpt", "OUT"], "no step 15"),
        (["export", "STORE", "--lfckpt", "STORE"], "there already"),
        (["export", "STORE", "--safetensors", "OUT", "--only", "nothing*"], "nothing"),
        (["import", "OUT", "STORE", "--step", "1"], "safetensors"),
        (["import", "OUT", "GONE", "--step", "1"], "GONE"),
        (["verify", "GONE"], "not a checkpoint store"),
        (["import", "OUT", "STORE", "--step", "-1"], "--step -1"),
        (["export", "STORE", "--safetensors", "OUT", "--max-shard-bytes", "0"], "--max-shard-bytes 0"),
        (["bench", "STORE", "--gib", "nan"], "--gib nan"),
        (["bench", "STORE", "--gib", "inf"], "--gib inf"),
    ],
)
def test_what_cannot_be_done_is_exit_code_two(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    places = {"STORE": path, "OUT": tmp_path / "out", "GONE": tmp_path / "GONE"}

    code, out = run(capsys, *[places.get(a, a) for a in arguments])

    assert code == 2
    assert text in out
    assert not (tmp_path / "out").exists()


def test_a_target_must_be_named(path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["export", str(path)])
    assert caught.value.code == 2
