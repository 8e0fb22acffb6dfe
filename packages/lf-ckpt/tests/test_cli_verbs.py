"""gc, diff, verify, plot and bench on the command line, hostile stores, closed pipes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ckpt_faults import Recorder
from ckpt_states import assert_same, files_under, state

import lf_ckpt
from lf_ckpt import cli
from lf_ckpt.cli import plot
from lf_ckpt.manifest_text import dump
from lf_ckpt.reader import read_manifest

COMMON = {"frozen": torch.arange(100_000.0)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Steps 10 (full), 20 and 30 (deltas on it), 40 (full)."""
    path = tmp_path / "store"
    with lf_ckpt.open(path, full_every=2) as store:
        for step in (10, 20, 30, 40):
            store.save(step, COMMON | state(step), {"epoch": step}, metrics={"loss": 100.0 - step}).wait()
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = cli.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def steps(path: Path) -> tuple[int, ...]:
    with lf_ckpt.open(path, read_only=True) as store:
        return store.steps()


def flip(file: Path, at: int = 5000) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_gc_dry_run_says_what_and_why_and_touches_nothing(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_under(path)
    recorder = Recorder()

    code = cli.main(["gc", str(path), "--keep", "last:1,every:20", "--dry-run", "--json"], recorder)
    out = json.loads(capsys.readouterr().out)

    assert code == 0
    assert [(row["folder"], row["action"], row["why"]) for row in out["steps"]] == [
        ("10", "keep", "20 refers to it"),
        ("20", "keep", "Every(steps=20)"),
        ("40", "keep", "the newest step"),
        ("30", "remove", "no rule wants it"),
    ]
    assert out["removed"] == []
    assert recorder.calls == []
    assert files_under(path) == before


def test_gc_removes_what_no_rule_keeps(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path / "steps/50").mkdir()
    (path / "steps/50/rank-0.lfckpt").write_bytes(b"torn")

    code, out = run(capsys, "gc", path, "--keep", "best:loss:1:max")

    assert code == 0
    assert "3 of" not in out
    assert "2 of 4 steps removed" in out
    assert "unfinished" in out
    assert steps(path) == (10, 40)
    assert not (path / "steps/50").exists()


def test_gc_without_rules_only_sweeps(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "gc", path)[0] == 0
    assert steps(path) == (10, 20, 30, 40)


def test_gc_reads_the_newest_step_before_it_trusts_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(path / "steps/40/rank-0.lfckpt")

    code, out = run(capsys, "gc", path, "--keep", "last:1")

    assert code == 0
    assert "40 leave" in out
    with lf_ckpt.open(path, read_only=True) as store:
        assert_same(store.load().tensors, COMMON | state(30))


def test_gc_of_a_store_in_use_is_refused_but_not_its_dry_run(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lf_ckpt.open(path):
        assert run(capsys, "gc", path, "--keep", "last:1")[0] == 2
        assert run(capsys, "gc", path, "--keep", "last:1", "--dry-run")[0] == 0
    assert steps(path) == (10, 20, 30, 40)


@pytest.mark.parametrize("keep", ["last:0", "newest", "last:3,"])
def test_gc_refuses_bad_rules(path: Path, keep: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "gc", path, "--keep", keep)[0] == 2
    assert steps(path) == (10, 20, 30, 40)


def test_diff_prints_what_changed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "diff", path, 10, 20)

    assert code == 0
    assert "changed  layer0.weight  F32[20000]" in out
    assert "max |difference|" in out
    assert "changed  item epoch" in out
    assert "10 -> 20: different; 1 of 5 tensors same" in out
    data = json.loads(run(capsys, "diff", path, 10, 10, "--json")[1])
    assert data["equal"]
    assert data["tensors"][0]["name"] == "frozen"


def test_diff_of_two_stores(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lf_ckpt.open(tmp_path / "other", compress="raw") as store:
        store.save(1, COMMON | state(10), {"epoch": 10}).wait()

    assert "equal; 5 of 5" in run(capsys, "diff", path, 10, 1, "--other", tmp_path / "other")[1]
    assert run(capsys, "diff", path, 10, 77)[0] == 2
    assert run(capsys, "diff", path, 10, 1, "--other", tmp_path)[0] == 2


def test_verify_json_has_rates_and_the_first_bad_block(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(capsys, "verify", path, "--deep", "--json")
    data = json.loads(out)
    assert (code, data["good"], [row["folder"] for row in data["steps"]]) == (
        0,
        True,
        ["10", "20", "30", "40"],
    )
    assert all(row["gb_per_s"] > 0 for row in data["steps"])

    flip(path / "steps/40/rank-0.lfckpt")
    code, out = run(capsys, "verify", path, "--deep", "--json")
    bad = json.loads(out)["steps"][-1]
    assert (code, bad["ok"], bad["problem"]["tensor"], bad["problem"]["extent"]) == (1, False, "frozen", 0)
    assert bad["problem"]["path"] == str(path / "steps/40/rank-0.lfckpt")
    code, out = run(capsys, "verify", path, "--deep")
    assert out.splitlines()[-1].startswith("3 of 4 steps good")
    assert "GB/s; damaged: 40" in out


def test_verify_of_an_empty_store_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lf_ckpt.open(tmp_path).close()

    assert run(capsys, "verify", tmp_path) == (0, "no committed steps\n")


def test_ls_shows_metrics_and_pins(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lf_ckpt.open(path) as store:
        store.pin(20)

    rows = run(capsys, "ls", path)[1].splitlines()

    assert rows[1].endswith("loss=90")
    assert rows[2].endswith("loss=80  held")


def test_plot_writes_a_picture(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for name, magic in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        assert run(capsys, "plot", path, tmp_path / name)[0] == 0
        assert (tmp_path / name).read_bytes().startswith(magic)
    assert run(capsys, "plot", path, tmp_path / "a.exe")[0] == 2
    assert not (tmp_path / "a.exe").exists()


def test_plot_shows_sizes_and_the_stall_that_each_save_had(path: Path) -> None:
    catalog = lf_ckpt.catalog.Catalog(lf_ckpt.FileLayer(), str(path))

    series = plot.series_of(catalog.committed())

    assert series.steps == [10, 20, 30, 40]
    assert series.delta == [False, True, True, False]
    assert series.stored[0] == (path / "steps/10/rank-0.lfckpt").stat().st_size
    assert all(0 < staged <= written for staged, written in zip(series.staged, series.written, strict=True))
    old = [replace(m, seconds={}) for m in catalog.committed()]
    assert all(math.isnan(seconds) for seconds in plot.series_of(old).staged)


def test_plot_without_matplotlib_names_the_extra(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    assert cli.main(["plot", str(path), str(tmp_path / "a.png")]) == 2
    assert "lf-ckpt[plot]" in capsys.readouterr().err


def test_bench_measures_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "bench", tmp_path, "--gib", "0.001", "--saves", 1, "--json")
    data = json.loads(out)

    assert code == 0
    assert data["bytes"] == int(0.001 * (1 << 30)) // 4 * 4
    assert min(data["stall"], data["durable"], data["load_cached"]) > 0
    assert list(tmp_path.iterdir()) == []
    assert run(capsys, "bench", tmp_path, "--gib", "0")[0] == 2
    assert run(capsys, "bench", tmp_path, "--gib", "1e9")[0] == 2
    assert run(capsys, "bench", tmp_path / "none", "--gib", "0.001")[0] == 2


def hostile(path: Path) -> Path:
    """A store whose manifest is valid and means harm to a terminal."""
    with lf_ckpt.open(path) as store:
        name = "\x1b[2J\x1b]0;owned\x07"
        store.save(
            1, {name: torch.ones(3), "\ud800": torch.ones(2)}, {name: "\x1b[31m"}, metrics={name: 1.0}
        ).wait()
    manifest = read_manifest(lf_ckpt.FileLayer(), str(path / "steps"), "1")
    (path / "steps/1/MANIFEST").write_bytes(dump(replace(manifest, created=(1 << 63) - 1))[0])
    return path


@pytest.mark.parametrize(
    "verb", [["ls"], ["show"], ["verify", "--deep"], ["diff", "1", "1"], ["gc"], ["repair"]]
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_hostile_store_cannot_talk_to_the_terminal(
    tmp_path: Path, verb: list[str], options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(capsys, verb[0], hostile(tmp_path), *verb[1:], *options)

    assert code == 0
    assert out
    assert all(c.isprintable() or c == "\n" for c in out)
    out.encode()


def test_errors_about_a_hostile_store_are_escaped_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = hostile(tmp_path)
    flip(path / "steps/1/rank-0.lfckpt", 4100)

    for verb in (["verify", str(path), "--deep"], ["repair", str(path)]):
        assert cli.main(verb) == 1
        captured = capsys.readouterr()
        assert "\\x1b" in captured.out
        assert "\x1b" not in captured.out + captured.err


def test_a_closed_pipe_ends_quietly_and_not_as_good(path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "lf_ckpt.cli", "show", str(path)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)

    assert done.returncode == 141
    assert done.stderr == b""


def test_what_cannot_be_listed_is_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class NoAccess(lf_ckpt.FileLayer):
        def names(self, path: str) -> list[str]:
            raise PermissionError(13, "Permission denied", path)

    for verb in ("ls", "verify", "gc", "repair"):
        assert cli.main([verb, str(path)], NoAccess()) == 2
        assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--lfckpt", "x", "--prefix", "model."],
        ["--lfckpt", "x", "--copy-ties"],
        ["--safetensors", "x", "--canonical"],
    ],
)
def test_an_export_option_that_would_be_ignored_is_refused(
    path: Path, options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)

    assert run(capsys, "export", path, *options)[0] == 2
    assert not (path.parent / "x").exists()


def test_the_verbs_work_on_object_stores(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fsspec")
    url = "memory://lf-ckpt-cli/store"
    with lf_ckpt.open(url) as store:
        for step in (1, 2, 3):
            store.save(step, state(step)).wait()

    assert run(capsys, "ls", url)[0] == 0
    assert run(capsys, "verify", url, "--deep")[0] == 0
    assert run(capsys, "gc", url, "--keep", "last:1")[0] == 0
    assert run(capsys, "repair", url, "--yes") == (0, "nothing to repair\n")
    assert run(capsys, "bench", url)[0] == 2
    with lf_ckpt.open(url, read_only=True) as store:
        assert store.steps() == (3,)
