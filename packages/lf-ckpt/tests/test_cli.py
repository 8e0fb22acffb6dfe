"""lf-ckpt on the command line: what it prints and how it exits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ckpt_states import state

import lf_ckpt
from lf_ckpt import cli


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = state()
    with lf_ckpt.open(tmp_path) as store:
        store.save(10, {**tensors, "tied": tensors["step"]}, {"epoch": 3, "loader": b"abc"}).wait()
        store.save(20, {**tensors, "layer0.weight": torch.zeros(20_000)}).wait()
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = cli.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def test_ls_lists_steps_with_kind_and_base(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "ls", path)
    rows = [line.split() for line in out.splitlines()[1:]]

    assert code == 0
    assert [row[:3] for row in rows] == [["10", "full", "-"], ["20", "delta", "10"]]


def test_ls_json_is_data(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "ls", path, "--json")
    rows = json.loads(out)

    assert code == 0
    assert [(row["step"], row["kind"], row["problem"]) for row in rows] == [
        (10, "full", None),
        (20, "delta", None),
    ]
    assert rows[0]["file_bytes"] == (path / "steps/10/rank-0.lfckpt").stat().st_size


def test_show_names_tensors_ties_and_items(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "show", path, 10)
    assert code == 0
    for text in ("layer0.weight  F32[20000]  80000 ->", "tied  = step", "item epoch  3", "loader  bytes[3]"):
        assert text in out
    assert "same-as-parent" in run(capsys, "show", path)[1]
    assert json.loads(run(capsys, "show", path, 10, "--json")[1])["items"] == {"epoch": 3}


def test_verify_exits_one_and_names_the_damage(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", path, "--deep")[0] == 0
    file = path / "steps/10/rank-0.lfckpt"
    data = bytearray(file.read_bytes())
    data[4096 + 50_000] ^= 1
    file.write_bytes(data)

    assert run(capsys, "verify", path)[0] == 0  # structure only
    code, out = run(capsys, "verify", path, "--deep")
    assert code == 1
    assert "layer0.weight" in out
    assert "extent 0" in out
    assert str(file) in out
    assert run(capsys, "verify", path, 20, "--deep")[0] == 0  # the delta has its own layer0.weight
    file.write_bytes(data[:-1])
    assert run(capsys, "verify", path)[0] == 1
    assert "DAMAGED" in run(capsys, "ls", path)[1]
    assert run(capsys, "show", path, 10)[0] == 1


@pytest.mark.parametrize(
    "arguments", [["ls", "/nonexistent"], ["verify", "{path}", "77"], ["show", "{path}", "x"]]
)
def test_what_is_not_there_is_a_usage_error(
    path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, *(a.format(path=path) for a in arguments))[0] == 2


def test_bad_arguments_exit_two() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["frobnicate"])
    assert caught.value.code == 2


def test_a_store_in_use_can_be_inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lf_ckpt.open(path):
        assert run(capsys, "verify", path, "--deep")[0] == 0
