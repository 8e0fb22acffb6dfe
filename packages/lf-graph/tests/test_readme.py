"""The README shows what committed results say, and its tables name every error and export that it has to."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
from typing import Any

import pytest
from bench_modules import BENCHMARKS, loaded

import lf_graph
from lf_graph import GraphError

README = BENCHMARKS.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (python report\.py .* --into \.\./README\.md.*)$", TEXT, re.MULTILINE)
bench = pytest.fixture(scope="module")(loaded)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_table_is_what_its_command_writes(
    bench: Any, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(BENCHMARKS)

    bench.report.main([*shlex.split(command)[2:], "--check"])


def test_a_table_without_its_command_holds_no_number(bench: Any) -> None:
    for name in ("", "hf", "fused", "memory"):
        begin, end = bench.report.marks(name)
        body = TEXT.split(begin)[1].split(end)[0]
        commands = [c for c in COMMANDS if (f"--mark {name}" in c if name else "--mark" not in c)]
        assert commands or "|" not in body, f"say which command wrote the table of {begin}"


def test_the_pieces_are_those_of_the_committed_run(bench: Any) -> None:
    pieces = importlib.import_module("bench_pieces")
    (shown,) = re.findall(r"bench_pieces\.py --show (\S+)\n", TEXT)

    assert pieces.table(json.loads((BENCHMARKS / shown).read_text())["rows"]) in TEXT

    by_row = {r["row"]: r for r in json.loads((BENCHMARKS / shown).read_text())["rows"]}
    reserved = [r["bytes"] / r["predicted_bytes"] for r in by_row.values() if "bytes" in r]
    assert f"{min(reserved):.1f} to {max(reserved):.1f} times as much" in TEXT
    one, five = by_row["one graph"], by_row["five pieces"]
    said = (
        f"Five pieces take {five['ms'] / one['ms']:.2f} times the time of one graph to run, and "
        f"{five['capture_s'] / one['capture_s']:.1f} times as long to capture"
    )
    assert said in TEXT


def test_the_lengths_are_those_of_the_committed_run(bench: Any) -> None:
    lengths = importlib.import_module("bench_lengths")
    (shown,) = re.findall(r"\((results/lengths\S+json)\)", TEXT)

    assert lengths.table(json.loads((BENCHMARKS / shown).read_text())["rows"]) in TEXT


def test_the_sweep_is_that_of_the_committed_run(bench: Any) -> None:
    sweep = importlib.import_module("sweep")
    rows = json.loads((BENCHMARKS / "results/sweep_h200_2026-12-01.json").read_text())["rows"]

    assert sweep.table(rows) in TEXT


def test_times_beside_the_tables_are_those_of_the_committed_run() -> None:
    found = re.findall(r"batch (\d+), eager, median of 3 processes \(`report\.py (\S+)`\) \| (.*) \|\n", TEXT)
    assert [batch for batch, _, _ in found] == ["16", "4"]
    for batch, command, shown in found:
        rows = json.loads((BENCHMARKS / command).read_text())["rows"]
        by_row = {r["row"]: r["step_ms"] for r in rows if r["batch"] == int(batch) and r["status"] == "ok"}

        eager, fused = by_row["eager"], by_row["eager fused"]
        assert shown == f"{eager:.2f} ms; with fused AdamW and frozen weights in bf16 {fused:.2f} ms"


def test_the_curves_are_those_of_the_committed_runs(bench: Any) -> None:
    commands = re.findall(r"curves\.py --workloads (\S+) --show (\S+)\n", TEXT)
    assert sorted(w for names, _ in commands for w in names.split(",")) == ["lm", "moe", "vla"]

    for names, files in commands:
        shown = bench.curves.shown((BENCHMARKS / f for f in files.split(",")), names.split(","))

        assert shown in TEXT
        assert "| no |" not in shown


def test_every_named_file_is_there() -> None:
    named = re.findall(r"`(?:python )?benchmarks/([\w./-]+)", TEXT) + re.findall(
        r"results/[\w.-]+\.json", TEXT
    )
    assert named
    assert [n for n in named if not (BENCHMARKS / n).exists()] == []


def test_every_public_error_has_its_row() -> None:
    exported = [getattr(lf_graph, name) for name in lf_graph.__all__]
    errors = [e for e in exported if inspect.isclass(e) and issubclass(e, GraphError)]
    assert len(errors) >= 9
    assert [e.__name__ for e in errors if f"| `{e.__name__}` |" not in TEXT] == []


def test_every_export_that_a_user_calls_is_mentioned() -> None:
    results = {"BucketStats", "BucketsStats", "Captured", "Finding", "GraphStats", "HostRouting", "MoEOutput"}
    results |= {"Edge", "ParameterUse", "Partition", "Report", "Spec", "StepResult"}  # what calls give back
    missing = [n for n in lf_graph.__all__ if n not in TEXT and n not in results]
    assert missing == []


def test_named_markers_do_not_touch_each_other(bench: Any) -> None:
    (begin, end), (other, other_end) = bench.report.marks("a"), bench.report.marks()
    text = f"{begin}\nold\n{end}\n{other}\nkept\n{other_end}\n"

    new = bench.report.between_markers(text, "new", "a")

    assert new == f"{begin}\n\nnew\n\n{end}\n{other}\nkept\n{other_end}\n"
    with pytest.raises(ValueError, match="results b: begin"):
        bench.report.between_markers(text, "new", "b")
