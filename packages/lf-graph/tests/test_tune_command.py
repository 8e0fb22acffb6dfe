"""The command of the tuner, and the processes that check candidates for it."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import tune_cases as cases
from tune_cases import (
    CPU,
    DEFAULT,
    FAST,
    KEY,
    RAISES,
    SLOW,
    WRONG,
    FakeTimer,
    reasons,
    tunable,
)

from lf_graph import tune
from lf_graph.kernels._tunable import (
    register,
)
from lf_graph.tune import _run, _state
from lf_graph.tune.__main__ import main
from lf_graph.tune._ahead import check_ahead
from lf_graph.tune._search import Effort, search
from lf_graph.tune._table import Entry, Table, parse

_fresh = pytest.fixture(autouse=True)(cases.fresh)


def test_workers_check_ahead_and_survive_a_candidate_that_ends_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *sys.path]))
    kernel = register(
        tunable(WRONG, cases.EXITS, FAST, RAISES, name=cases.WORKERS),
    )
    faults = check_ahead([(kernel, KEY)], CPU, 1, math.inf, ["tune_cases"])

    by_way = {c["WAY"]: reason for (_, _, c), reason in faults.items()}
    assert {way for way, reason in by_way.items() if not reason} == {DEFAULT["WAY"], FAST["WAY"]}
    assert "out of resource" in by_way[RAISES["WAY"]]
    assert by_way[cases.EXITS["WAY"]] == "ended its process: exit status 77"
    assert by_way[WRONG["WAY"]].startswith("wrong: output 0")
    effort = Effort(FakeTimer(), checked=faults)
    entry = search(kernel, KEY, CPU, effort)
    assert entry.config == FAST
    assert len(entry.rejected) == 3
    assert effort.checks == 2  # the default and the one that passed, once more here


def test_what_workers_checked_is_timed_for_every_key_before_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = register(tunable(FAST, SLOW, WRONG))
    keys: list[Any] = [(1,), (2,)]
    checked = {
        (kernel.name, key, c): r for key in keys for c, r in ((FAST, ""), (WRONG, "wrong: said a worker"))
    }
    monkeypatch.setattr(_run, "check_ahead", lambda *args: checked)
    order: list[tuple[Any, bool]] = []
    searched = _run.tuned

    def noting(now: Any, t: Any, key: Any, effort: Any, started: Any) -> Entry:
        entry = searched(now, t, key, effort, started)
        order.append((key, entry.complete))
        return entry

    monkeypatch.setattr(_run, "tuned", noting)
    report = tune.run(keys={kernel.name: keys}, timer=FakeTimer(), workers=2)

    assert order == [((1,), False), ((2,), False), ((1,), True), ((2,), True)]
    assert [e.config for e in report.tuned] == [FAST, FAST]
    assert reasons(report.tuned[0]) == {3: "wrong: said a worker"}
    assert [len(e.trials) for e in report.tuned] == [4, 4]


def test_workers_blame_no_candidate_for_inputs_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *sys.path]))
    unknown = tunable(FAST, name="tests.nobody_registers_this")

    assert check_ahead([(unknown, KEY)], CPU, 1, math.inf, ["tune_cases"]) == {}


def test_the_command_lists_shows_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = register(tunable(FAST, WRONG))
    tune.run(keys={kernel.name: [KEY]}, timer=FakeTimer())

    assert main(["--list"]) == 0
    assert "tests.double: 1 known keys, 1 tuned, 0 shipped" in capsys.readouterr().out
    assert main(["--show"]) == 0
    shown = capsys.readouterr().out
    assert "WAY=1 warps=4 stages=3, 8.0 us, 1.25x the default (3 tried, 1 rejected)" in shown
    assert "WAY=3 warps=4 stages=3: wrong: output 0" in shown
    assert main(["--export", str(tmp_path / "ship")]) == 0
    (entry,) = parse((tmp_path / "ship" / "cpu.json").read_text()).entries.values()
    assert (entry.config, entry.trials) == (FAST, ())


def test_the_command_rebuilds_and_its_status_tells(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(tunable(FAST))
    tune.run(keys={"tests.double": [KEY]}, timer=FakeTimer())
    if not torch.cuda.is_available():
        assert main(["--rebuild"]) == 1
        assert "measures on a GPU" in capsys.readouterr().err
    monkeypatch.setattr(
        "lf_graph.tune.__main__.run", lambda *a, **k: tune.run(*a, **{**k, "timer": FakeTimer()})
    )

    assert main(["--rebuild"]) == 0
    assert "1 tuned, 0 known before" in capsys.readouterr().out
    assert main([]) == 0
    assert "0 tuned, 1 known before" in capsys.readouterr().out


def test_exporting_keeps_what_was_shipped_and_not_measured_now(tmp_path: Path) -> None:
    kernel = register(tunable(FAST))
    entry = search(kernel, KEY, CPU, Effort(FakeTimer()))
    older = Entry(kernel.name, ("older",), entry.source, SLOW, 1.0, 1.0, True)
    now = _state.state()
    now.shipped = Table(now.card).with_entry(older)
    now.keep(entry)

    main(["--export", str(tmp_path)])

    table = parse((tmp_path / "cpu.json").read_text())
    assert {k for _, k in table.entries} == {KEY, ("older",)}


def test_the_command_names_a_module_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--import", "no_such_module_here", "--list"]) == 1
    assert "dotted name of a module: No module named 'no_such_module_here'" in capsys.readouterr().err


def test_a_folder_that_is_none_is_named_and_one_without_a_table_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dir", os.devnull, "--list"]) == 1
    captured = capsys.readouterr()
    assert f"--dir {os.devnull} is no folder" in captured.err
    assert captured.out == ""
    assert main(["--dir", str(tmp_path / "new"), "--list"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(str(tmp_path / "new"))
    assert first.endswith(": no table yet")
