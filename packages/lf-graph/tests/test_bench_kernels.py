"""bench_kernels.py: parity before time, groups kept whole, rates and tables; never how fast."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench_modules import BENCHMARKS
from torch import Tensor

from lf_graph import tune
from lf_graph.tune._timer import Timing, calls_for, summary

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("bench_kernels")
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in [
            m for m in sys.modules if m.split(".")[0] in ("bench_kernels", "kernel_rows", "kernel_table")
        ]:
            sys.modules.pop(name)


def inputs(device: torch.device) -> tuple[Tensor, Tensor]:
    x, w = torch.randn(7, 5, device=device), torch.randn(5, device=device)
    return x.requires_grad_(), w.requires_grad_()


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def wrong(x: Tensor, w: Tensor) -> Tensor:
    return x * w * 1.5


def waits(x: Tensor, w: Tensor) -> Tensor:
    raise RuntimeError("does not run")


def build(
    bench: Any, fn: Callable[..., Tensor], double: bool = False
) -> Callable[[torch.device], Callable[[], Any]]:
    def made(device: torch.device) -> Callable[[], Any]:
        given: Sequence[Tensor] = inputs(device)
        if double:
            given = bench.kernel_rows.as_float64(given)
        call: Callable[[], Any] = bench.kernel_rows.forward_backward(fn, *given)
        return call

    return made


def rows_of(bench: Any, op: str = "scale fwd+bwd") -> list[Any]:
    group = bench.kernel_rows.Group(op, "7x5 fp32", bytes=1000, flops=2000, tolerance=1e-5)
    return [
        group.row(bench.REFERENCE, build(bench, scaled, double=True)),
        group.row("lf-graph", build(bench, scaled), ours=True),
        group.row("bad", build(bench, wrong), ours=True),
        group.row("fails", build(bench, waits)),
        group.row("absent", build(bench, scaled), needs=("no_such_module",)),
        group.row("gpu", build(bench, scaled), cuda_only=True),
        group.row("compiled", lambda d: build(bench, bench.kernel_rows.compiled(scaled))(d)),
    ]


def test_only_what_is_right_is_timed(bench: Any) -> None:
    timed: list[str] = []

    def time_it(row: Any) -> dict[str, Any]:
        timed.append(row.name)
        return {"us": 2.0}

    results = {r["name"]: r for r in bench.run_group(rows_of(bench), CPU, time_it)}

    assert timed == ["lf-graph", "compiled"]
    statuses = {n: r["status"] for n, r in results.items()}
    assert statuses == {
        "lf-graph": "ok",
        "bad": "wrong",
        "fails": "failed",
        "absent": "skipped",
        "gpu": "skipped",
        "compiled": "ok",
    }
    assert results["lf-graph"]["parity"] < 1e-6
    assert "5.0e-01 from the reference" in results["bad"]["error"]
    assert "does not run" in results["fails"]["error"]
    assert "no_such_module" in results["absent"]["error"]
    assert [r["name"] for r in bench.broken(results.values())] == ["bad"]


def test_a_group_needs_one_reference(bench: Any) -> None:
    with pytest.raises(ValueError, match="0 rows called reference"):
        next(bench.run_group(rows_of(bench)[1:], CPU, bench.no_timing))


def test_gradients_count_for_parity(bench: Any) -> None:
    call = bench.kernel_rows.forward_backward(scaled, *inputs(CPU))
    outputs = call()

    assert [t.shape for t in outputs] == [(7, 5), (7, 5), (5,)]
    torch.testing.assert_close(call()[1], outputs[1], rtol=0, atol=0)


def test_backward_alone_repeats_on_one_forward(bench: Any) -> None:
    given = inputs(CPU)
    both = bench.kernel_rows.forward_backward(scaled, *given)()
    alone = bench.kernel_rows.backward(scaled, *given)

    for _ in range(2):
        torch.testing.assert_close(alone(), both[1:], rtol=0, atol=0)


def test_forward_keeps_no_graph(bench: Any) -> None:
    assert not bench.kernel_rows.forward(scaled, *inputs(CPU))().requires_grad


def test_every_row_of_a_group_sees_the_same_values_in_new_memory(bench: Any) -> None:
    (_, ours, *_) = rows_of(bench)
    first, second = (bench.prepared(ours, CPU)() for _ in range(2))

    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(first, second, strict=True))


def test_distance_is_of_the_worst_output_and_never_hides_nan(bench: Any) -> None:
    reference = [torch.tensor([4.0, 2.0]), torch.tensor([1.0])]

    assert bench.distance([torch.tensor([4.0, 1.0]), torch.tensor([1.0])], reference) == 0.25
    assert bench.distance([torch.tensor([4.0, float("nan")]), torch.tensor([1.0])], reference) == float("inf")
    assert bench.distance([torch.tensor([4.0])], reference) == float("inf")
    assert bench.distance([torch.zeros(0)], [torch.zeros(0)]) == 0.0
    assert bench.distance([torch.ones(2)], [torch.zeros(2)]) == 1.0


def test_match_keeps_whole_groups(bench: Any) -> None:
    rows = rows_of(bench) + rows_of(bench, "other fwd")

    assert [len(g) for g in bench.grouped(rows, "")] == [7, 7]
    (only,) = bench.grouped(rows, "other fwd | 7x5 fp32 | lf-graph")
    assert {r.op for r in only} == {"other fwd"}
    assert len(only) == 7


def test_rates_are_of_bytes_and_flops(bench: Any) -> None:
    assert bench.rates(1000.0, 4_000_000_000, 0) == {"gb_s": 4000.0, "tflops": None}
    assert bench.rates(1000.0, 0, 10**12) == {"gb_s": None, "tflops": 1000.0}


def test_table_compares_with_the_fastest_other_that_is_right(bench: Any) -> None:
    common = {"op": "o", "shape": "s", "status": "ok"}
    results = [
        common | {"name": "eager", "ours": False, "us": 30.0, "spread": 0.1},
        common | {"name": "library", "ours": False, "us": 20.0, "spread": 0.1},
        common | {"name": "cheat", "ours": False, "status": "wrong", "us": 1.0, "error": "off"},
        common | {"name": "lf-graph", "ours": True, "us": 10.0, "spread": 0.1, "gb_s": 4000.0},
    ]
    lines = bench.tables(results).splitlines()

    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]
    assert [(c[0], c[3]) for c in cells if c[1] and c[2]] == [
        ("eager", "0.67"),
        ("library", "1.00"),
        ("**lf-graph**", "2.00"),
    ]
    assert ["wrong: off" in line for line in lines].count(True) == 1


def planted(bench: Any, monkeypatch: pytest.MonkeyPatch, rows: Sequence[Any]) -> list[bool]:
    """Makes the benchmark know only these rows; records which size was asked for."""
    module, asked = ModuleType("kernel_rows.planted"), []

    def made(small: bool) -> Sequence[Any]:
        asked.append(small)
        return rows

    module.rows = made  # type: ignore[attr-defined]
    monkeypatch.setattr(bench, "modules", lambda: ["planted"])
    monkeypatch.setitem(sys.modules, "kernel_rows.planted", module)
    return asked


def test_check_compares_small_shapes_and_its_status_tells(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = planted(bench, monkeypatch, rows_of(bench))
    assert bench.main(["--check"]) == 1
    assert "wrong" in capsys.readouterr().out

    planted(bench, monkeypatch, rows_of(bench)[:2])
    assert bench.main(["--check"]) == 0
    assert asked == [True]


def test_results_are_written_after_every_group_and_time_ends_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(bench)[:2] + rows_of(bench, "later")[:2]
    planted(bench, monkeypatch, rows)
    clock = iter([0.0, 1.0, 11.0])
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    target = tmp_path / "r.json"

    assert bench.main(["--check", "--budget-s", "10", "--json", str(target)]) == 0

    written = json.loads(target.read_text())
    assert [(r["op"], r["name"], r["status"]) for r in written["rows"]] == [
        ("scale fwd+bwd", "lf-graph", "ok")
    ]
    assert "out of time: 1 of 2 groups were not measured" in capsys.readouterr().out


def test_show_puts_the_later_file_into_a_document(bench: Any, tmp_path: Path) -> None:
    common = {"op": "o", "shape": "s", "status": "ok", "name": "lf-graph", "ours": True, "spread": 0.0}
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, us in zip(paths, (10.0, 77.0), strict=True):
        path.write_text(json.dumps({"rows": [common | {"us": us}]}))
    document = tmp_path / "doc.md"
    document.write_text("x\n<!-- results kernels: begin -->\n<!-- results kernels: end -->\n")

    command = ["--show", *map(str, paths), "--into", str(document)]
    with pytest.raises(SystemExit, match="not what the results say"):
        bench.main([*command, "--check"])
    assert "77.0" not in document.read_text()
    bench.main(command)
    bench.main([*command, "--check"])

    text = document.read_text()
    assert "77.0" in text
    assert "10.0" not in text


def test_copies_exceed_the_cache_three_times(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("P", (), {"L2_cache_size": 50_000_000})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: properties)
    row = functools.partial(bench.KernelRow, "o", "s", "n", lambda d: lambda: torch.ones(1))

    assert bench.copies_for(row(bytes=50_000_000), CPU, cold=True) == 3
    assert bench.copies_for(row(bytes=1000), CPU, cold=True) == 16
    assert bench.copies_for(row(bytes=10**9), CPU, cold=True) == 1
    assert bench.copies_for(row(bytes=1000), CPU, cold=False) == 1


@pytest.mark.parametrize(("us", "copies"), [(0.0, 1), (3.0, 3), (99.0, 16), (10_000.0, 7), (float("inf"), 3)])
def test_a_window_has_twenty_calls_and_every_copy_equally_often(us: float, copies: int) -> None:
    calls = calls_for(us, copies)

    assert calls >= 20
    assert calls % copies == 0


def test_summary_is_the_median_of_windows_per_call() -> None:
    assert summary([200.0, 220.0, 1000.0], 20) == Timing(11.0, 40 / 11, 20)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_succeeds() -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_kernels.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0
    assert "times on a GPU only" in done.stdout


@pytest.mark.gpu
def test_rows_are_timed_on_a_gpu(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted(bench, monkeypatch, rows_of(bench)[:2])
    target = tmp_path / "r.json"

    assert bench.main(["--json", str(target)]) == 0

    (row,) = json.loads(target.read_text())["rows"]
    assert row["us"] > 0
    assert row["calls"] >= 20
    assert row["copies"] == 16


@pytest.fixture
def tuning(bench: Any) -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("tune_kernels")
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("tune_kernels", None)


def test_tuning_launches_rows_of_ours_once_and_names_those_that_fail(
    tuning: Any, bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    group = bench.kernel_rows.Group("other", "7x5 fp32")
    fails = group.row("lf-graph", build(bench, waits), ours=True)
    gpu = group.row("lf-graph gpu", build(bench, scaled), ours=True, cuda_only=True)
    rows = tuning.chosen([*rows_of(bench), fails, gpu], "", CPU)

    assert [r.name for r in rows] == ["lf-graph", "bad", "lf-graph"]
    assert tuning.chosen(rows, "other |", CPU) == [fails]
    assert tuning.note_keys(rows, CPU) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("| lf-graph: launched")
    assert printed[-1].endswith("RuntimeError: does not run")


def test_tunables_that_no_row_launches_are_named(tuning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "load_kernels", lambda: None)
    monkeypatch.setattr(tuning, "TUNABLES", {"launched": None, "forgotten": None})
    chosen = tune.Chosen("launched", (1,), "default", "")
    monkeypatch.setattr(tuning.tune, "stats", lambda: SimpleNamespace(chosen=(chosen,)))

    assert tuning.without_rows() == ["forgotten"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tuning_without_a_gpu_says_so(tuning: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tuning.main([]) == 0
    assert "nothing was tuned" in capsys.readouterr().out
