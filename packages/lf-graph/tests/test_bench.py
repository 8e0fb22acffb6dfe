"""The benchmarks of this package: what they compute, and that their bookkeeping is right; never how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_modules import BENCHMARKS, loaded, result

CPU = torch.device("cpu")
bench = pytest.fixture(scope="module")(loaded)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "bench_step.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def trained(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


# --- workloads: the models that the bars were measured on


def test_full_sizes_have_the_parameters_the_bars_were_measured_with(bench: Any) -> None:
    m, w = bench.models, bench.workloads
    with torch.device("meta"):
        counts = [trained(x) for x in (m.VLA(w.VLA_DIMS), m.LM(w.LM_DIMS), m.LM(w.MOE_DIMS))]
    assert [round(n / 1e9, 2) for n in counts] == [1.29, 1.64, 2.82]


def test_grouped_experts_compute_what_the_loop_computes(bench: Any) -> None:
    torch.manual_seed(0)
    loop = bench.models.ExpertLoop(32, 16, experts=4, top_k=2)
    grouped = bench.models.GroupedMoE.from_loop(loop)
    x = torch.randn(2, 9, 32)

    y = grouped(x)

    expected = loop(x)
    assert (y - expected).norm() / expected.norm() < 1e-2  # bfloat16 products against float32


def test_frozen_parts_of_the_vla_get_no_gradient_and_all_others_do(bench: Any) -> None:
    (workload,) = bench.workloads.workloads(tiny=True)["vla"]
    model = workload.model(CPU)

    workload.loss(model, workload.batch(2, CPU)).backward()

    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    frozen = [model.patch, model.vit, model.proj, model.lm.e, *model.lm.b[: -model.tuned]]
    assert not any(p.requires_grad for part in frozen for p in part.parameters())


def test_models_and_batches_depend_on_their_seed_only(bench: Any) -> None:
    (workload,) = bench.workloads.workloads(tiny=True)["vla"]
    torch.manual_seed(1234)

    first, second, other = workload.model(CPU), workload.model(CPU), workload.model(CPU, seed=1)

    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.act.weight, other.act.weight)
    assert all(map(torch.equal, workload.batch(2, CPU), workload.batch(2, CPU)))


def test_the_exact_model_is_a_workload_whose_plain_row_runs(bench: Any) -> None:
    pytest.importorskip("lf_meta")
    (workload,) = bench.bench_step.chosen_workloads(["n16"], tiny=True)
    row = bench.stock.row_of(workload, 1, bench.stock.EAGER_FUSED)

    found = bench.measure.measure(row, CPU, bench.measure.Effort(windows=1, through_steps=1))

    assert found["status"] == "ok", found
    assert found["losses"][2] < found["losses"][0]


def test_batches_are_fed_in_place_whatever_their_nesting(bench: Any) -> None:
    feeds = ({"a": torch.zeros(2)}, torch.zeros(1))
    prepared = bench.measure.Prepared(lambda: feeds[1], lambda: None, feeds=feeds)

    prepared.feed(({"a": torch.tensor([1.0, 2.0])}, torch.tensor([3.0])))

    assert feeds[0]["a"].tolist() == [1.0, 2.0]
    assert feeds[1].tolist() == [3.0]


# --- the measuring frame


def test_losses_start_from_the_initial_weights_however_long_the_row_warmed_up(bench: Any) -> None:
    (workload,) = bench.workloads.workloads(tiny=True)["vla"]
    case = bench.measure.Case(workload, 2, CPU)
    prepared = bench.stock.prepare(case, bench.stock.EAGER_FUSED)
    at_first = bench.measure.first_losses(prepared, seed=2)
    for _ in range(3):
        prepared.step()

    again = bench.measure.first_losses(prepared, seed=2)

    assert again == at_first
    assert at_first[0] > at_first[2]


def test_a_row_that_fails_becomes_a_result_with_its_error(bench: Any) -> None:
    def setup(case: Any) -> Any:
        raise RuntimeError("out of luck")

    (workload,) = bench.workloads.workloads(tiny=True)["vla"]
    row = bench.measure.Row(workload, 2, "broken", "ours", setup, needs_gpu=False)

    found = bench.measure.measure(row, CPU, bench.measure.Effort())

    assert (found["status"], found["error"]) == ("failed", "RuntimeError: out of luck")


def test_a_row_is_closed_even_when_a_step_fails(bench: Any) -> None:
    closed = []

    def setup(case: Any) -> Any:
        def step() -> torch.Tensor:
            raise RuntimeError("no")

        return bench.measure.Prepared(step, lambda: None, close=lambda: closed.append(True))

    (workload,) = bench.workloads.workloads(tiny=True)["vla"]
    row = bench.measure.Row(workload, 2, "broken", "ours", setup, needs_gpu=False)

    bench.measure.measure(row, CPU, bench.measure.Effort())

    assert closed == [True]


def test_frozen_bfloat16_weights_leave_the_trained_ones_in_float32(bench: Any) -> None:
    (workload,) = bench.workloads.workloads(tiny=True)["vla"]

    model = bench.stock.build(bench.measure.Case(workload, 2, CPU), bench.stock.EAGER_FUSED)

    kinds = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


def test_launches_and_kernel_time_are_counted_apart_from_named_ranges(bench: Any) -> None:
    cuda = torch.autograd.DeviceType.CUDA
    kernel = SimpleNamespace(device_type=cuda, name="gemm", device_time=2000.0)
    named = SimpleNamespace(device_type=cuda, name="Optimizer.step#AdamW.step", device_time=500.0)
    host = SimpleNamespace(device_type=torch.autograd.DeviceType.CPU, name="aten::mm", device_time=0.0)
    calls = [SimpleNamespace(key="cudaLaunchKernel", count=3), SimpleNamespace(key="aten::mm", count=7)]

    found = bench.measure.count_events([kernel, named, host], calls)

    assert found == {"launches": 3, "kernels": 2, "busy_ms": 2.5, "kernel_ms": 2.0}


def test_the_attention_kernel_of_a_row_is_put_back(bench: Any) -> None:
    cuda = torch.backends.cuda
    before = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()

    with bench.stock.only_attention("flash"):
        inside = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()

    assert inside == (True, False, False)
    after = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    assert after == before


# --- the command


def test_the_tiny_run_measures_every_plain_row_and_reports_the_others(tmp_path: Path) -> None:
    out = tmp_path / "step.json"

    done = run("--tiny", "--windows", "2", "--rows", "stock", "--match", "eager,|graph", "--json", str(out))

    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    eager = [r for r in rows if r["row"].endswith(("eager", "fused"))]
    assert {r["workload"] for r in eager} == {"vla", "lm-8", "lm-16", "moe"}
    assert all(r["status"] == "ok" and r["parity"] < 0.2 for r in eager), eager
    if not torch.cuda.is_available():
        assert {r["status"] for r in rows if r["row"] == "graph"} == {"skipped"}
    assert "| eager | stock |" in done.stdout


def test_plain_rows_are_the_median_of_processes(bench: Any, tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    only = ["--workloads", "lm", "--match", "lm-8|1|eager fused", "--rows", "stock"]

    bench.bench_step.main(["--tiny", "--windows", "2", "--processes", "2", *only, "--json", str(out)])

    (row,) = json.loads(out.read_text())["rows"]
    assert len(row["processes_ms"]) == 2
    assert row["step_ms"] in row["processes_ms"]


def test_rows_are_chosen_by_what_they_contain_and_lack_and_warmed_before(bench: Any, capfd: Any) -> None:
    only = ["--tiny", "--workloads", "lm", "--rows", "stock", "--windows", "2"]

    bench.bench_step.main([*only, "--match", "lm-8|1|eager&!fused", "--warm", "eager"])

    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("warm", "lm"))]
    assert [line.split(":")[0] for line in lines] == ["warm lm-8|1|eager", "lm-8|1|eager [stock]"], lines
    assert "done" in lines[0]


@pytest.mark.gpu
def test_on_a_gpu_a_captured_step_learns_what_eager_learns_with_one_launch(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    only = ("--rows", "stock", "--match", "vla|2|eager,vla|2|graph,moe|2|eager,moe|2|graph")

    done = run("--tiny", "--windows", "2", *only, "--json", str(out))

    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    graphs = [r for r in rows if r["row"] == "graph"]
    assert len(graphs) == 2
    assert all(r["status"] == "ok" and r["parity"] < 0.02 for r in graphs), graphs
    assert all(r["launches"] <= 4 < r["kernels"] for r in graphs), graphs
    eager = {r["workload"]: r for r in rows if r["row"] == "eager"}
    assert all(eager[g["workload"]]["launches"] > 100 for g in graphs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_full_run_says_so_and_ends_well() -> None:
    done = run("--json", "unused.json")

    assert done.returncode == 0
    assert "needs a CUDA GPU" in done.stdout


def test_rows_that_do_not_fit_the_budget_are_named_and_not_run(bench: Any, tmp_path: Path) -> None:
    args = bench.bench_step.arguments(["--tiny", "--budget-s", "0", "--json", str(tmp_path / "r.json")])
    (workload,) = bench.workloads.workloads(tiny=True)["vla"]
    session = bench.bench_step.Run(args, CPU)

    session.all(bench.stock.rows(workload))

    document = json.loads((tmp_path / "r.json").read_text())
    assert {r["status"] for r in document["rows"]} == {"not run"}
    assert all("s left" in r["error"] for r in document["rows"])


def test_urgent_rows_run_first_and_slow_ones_last(bench: Any) -> None:
    found = bench.workloads.workloads()
    rows = [r for name in ("vla", "moe") for w in found[name] for r in bench.stock.rows(w)]

    ordered = bench.bench_step.by_urgency(rows)

    urgency = [r.urgent for r in ordered]
    assert urgency == sorted(urgency, reverse=True)
    waits = [r.expect_s for r in ordered if not r.urgent]
    assert waits == sorted(waits)


def test_rows_that_launch_much_are_timed_before_anything_is_profiled(bench: Any) -> None:
    args = bench.bench_step.arguments([])
    (vla,) = bench.workloads.workloads()["vla"]

    ordered = bench.bench_step.running_order(bench.stock.rows(vla), args)

    matter = [r.launches_matter for r in ordered]
    assert matter == sorted(matter, reverse=True)
    assert {r.name for r in ordered if r.launches_matter} == {"eager", "eager fused"}


def test_rows_timed_first_are_profiled_last_and_keep_their_times(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    (vla,) = bench.workloads.workloads(tiny=True)["vla"]

    def fake_measure(row: Any, device: Any, effort: Any) -> dict[str, Any]:
        events.append(f"{row.name}, profiled {effort.profiled}")
        return result(row=row.name)

    def fake_profile(row: Any, device: Any) -> dict[str, Any]:
        events.append(f"profile {row.name}")
        return {"launches": 7}

    monkeypatch.setattr(bench.bench_step, "measure", fake_measure)
    monkeypatch.setattr(bench.bench_step, "profile_again", fake_profile)
    rows = [bench.stock.row_of(vla, 2, v) for v in (bench.stock.GRAPH, bench.stock.EAGER)]
    session = bench.bench_step.Run(bench.bench_step.arguments([]), torch.device("cuda"))

    session.all(rows)

    assert events == ["eager, profiled False", "graph, profiled True", "profile eager"]
    assert [(r["row"], r.get("launches"), r["step_ms"]) for r in session.results] == [
        ("eager", 7, 10.0),
        ("graph", None, 10.0),
    ]


def test_every_row_is_named_once(bench: Any) -> None:
    found = bench.workloads.workloads()
    keys = [r.key for group in found.values() for w in group for r in bench.stock.rows(w)]

    assert len(keys) == len(set(keys))


def test_an_unknown_workload_is_refused(bench: Any) -> None:
    with pytest.raises(SystemExit, match="no workload 'vision'"):
        bench.bench_step.chosen_workloads(["vision"], tiny=True)


def test_one_failed_process_fails_the_median(bench: Any) -> None:
    broken = result(status="failed", error="lost")

    assert bench.bench_step.median_of([result(), broken, result()])["status"] == "failed"


# --- the report


def test_the_best_stock_row_keeps_master_weights_and_is_not_ours(bench: Any) -> None:
    rows = [
        result(row="graph", step_ms=8.0),
        result(row="bf16", step_ms=5.0, masters=False),
        result(row="ours", source="ours", step_ms=4.0),
        result(row="broken", status="failed", step_ms=1.0),
    ]

    assert bench.report.best_stock(rows)["row"] == "graph"


def test_parity_is_the_largest_relative_distance_from_the_eager_row(bench: Any) -> None:
    eager = result(losses_reseeded=[2.0, 1.5])
    ours = result(row="ours", source="ours", losses=[2.2, 1.05])

    found = {r["row"]: r["parity"] for r in bench.report.with_parity([eager, ours])}

    assert found == pytest.approx({"eager": 0.5, "ours": 0.1})


def test_parity_of_a_loss_that_is_not_a_number_is_infinite(bench: Any) -> None:
    assert bench.report.distance([float("nan"), 1.0], [1.0, 1.0]) == float("inf")


def test_a_later_file_replaces_a_row_and_a_failure_does_not(bench: Any, tmp_path: Path) -> None:
    files = []
    for i, row in enumerate([result(), result(step_ms=7.0), result(status="failed", error="x")]):
        files.append(tmp_path / f"{i}.json")
        files[-1].write_text(json.dumps({"machine": {"gpu": "G"}, "rows": [row]}))

    machines, rows = bench.report.load(files)

    assert machines == ["gpu G"]
    assert [(r["status"], r["step_ms"]) for r in rows] == [("ok", 7.0)]


def test_tables_show_rows_without_numbers_and_the_ratio_to_the_best_stock(bench: Any) -> None:
    rows = [
        result(),
        result(row="ours", source="ours", step_ms=5.0),
        result(row="x", status="failed", error="boom"),
    ]

    text = bench.report.tables(rows)

    assert "| ours | ours | 5.00 | 10.0% |  | 0.500 |" in text
    assert "failed: boom" in text


MARKED = "# Title\n\n<!-- results: begin -->\n\nold\n\n<!-- results: end -->\n\nlast words\n"


def test_a_document_gets_the_tables_between_its_markers_and_keeps_the_rest(
    bench: Any, tmp_path: Path
) -> None:
    document, results = tmp_path / "README.md", tmp_path / "r.json"
    document.write_text(MARKED)
    rows = [result(), result(row="lf-graph", source="ours", step_ms=5.0)]
    results.write_text(json.dumps({"machine": {"gpu": "G"}, "rows": rows}))

    bench.report.main([str(results), "--source", "stock", "--into", str(document)])

    text = document.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("\n\nlast words\n")
    assert "gpu G" in text
    assert "| eager | stock | 10.00 |" in text
    assert "old" not in text
    assert "lf-graph" not in text


def test_an_outdated_document_fails_the_check_and_is_left_alone(bench: Any, tmp_path: Path) -> None:
    document, results = tmp_path / "README.md", tmp_path / "r.json"
    document.write_text(MARKED)
    results.write_text(json.dumps({"machine": {}, "rows": [result()]}))

    with pytest.raises(SystemExit, match="not what the results say"):
        bench.report.main([str(results), "--into", str(document), "--check"])
    assert document.read_text() == MARKED

    bench.report.main([str(results), "--into", str(document)])
    bench.report.main([str(results), "--into", str(document), "--check"])


@pytest.mark.parametrize(
    "text", ["no markers", MARKED + MARKED, "<!-- results: end --><!-- results: begin -->"]
)
def test_a_document_without_its_two_markers_is_refused(bench: Any, text: str) -> None:
    with pytest.raises(ValueError, match="needs one line"):
        bench.report.between_markers(text, "body")


def test_the_peers_document_has_its_markers(bench: Any) -> None:
    text = (BENCHMARKS / "peers" / "README.md").read_text()

    assert "body" in bench.report.between_markers(text, "body")
