"""The sweep and the loss curves: what they conclude from numbers, and that they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_modules import loaded, result

CPU = torch.device("cpu")
bench = pytest.fixture(scope="module")(loaded)


def sized(tokens: int, row: str, ms: float, **fields: Any) -> dict[str, Any]:
    return result(row=row, step_ms=ms, units_per_s=tokens / ms * 1000, **fields)


def curve(bench: Any, row: str, seed: int, *losses: float, error: str = "") -> Any:
    return bench.curves.Curve("w", row, "stock", seed, losses, error)


# --- sweep


def test_the_sweep_keeps_one_sequence_until_the_position_table_ends(bench: Any) -> None:
    found = bench.sweep.sweep_workloads("lm", tiny=False)

    shapes = [(w.batches[0], w.length) for w in found]
    assert shapes[:5] == [(1, 128), (1, 256), (1, 512), (1, 1024), (1, 2048)]
    assert shapes[5:] == [(2, 2048), (4, 2048)]


def test_graphs_stop_paying_where_the_gain_falls_below_five_percent_for_good(bench: Any) -> None:
    times = {128: (20, 10), 256: (10.4, 10), 512: (20, 10), 1024: (10.4, 10), 2048: (10, 10)}
    rows = [r for n, (e, g) in times.items() for r in (sized(n, "eager fused", e), sized(n, "graph", g))]

    by_size = bench.sweep.pivot(rows)

    assert bench.sweep.stops_paying(by_size, "graph") == 1024


def test_graphs_that_always_pay_have_no_end(bench: Any) -> None:
    by_size = bench.sweep.pivot([sized(128, "eager fused", 20.0), sized(128, "graph", 10.0)])

    assert bench.sweep.stops_paying(by_size, "graph") is None
    assert "graph: pays everywhere" in bench.sweep.table(
        [r for rows in by_size.values() for r in rows.values()]
    )


def test_a_size_whose_row_failed_is_shown_without_it(bench: Any) -> None:
    rows = [
        sized(128, "eager fused", 20.0, kernel_ms=5.0, launches=900),
        sized(128, "graph", 10.0, launches=1),
        sized(256, "eager fused", 20.0, kernel_ms=5.0, launches=900),
        result(row="graph", status="failed", error="boom"),
    ]

    text = bench.sweep.table(rows)

    assert "| 128 | 20.00 | 10.00 | 2.00 | 900 / 1 | 5.0 | 75% |" in text
    assert "| 256 | 20.00 |  |  | 900 /  | 5.0 | 75% |" in text


def test_the_tiny_sweep_measures_every_size(bench: Any) -> None:
    document = bench.sweep.main(["--tiny", "--rows", "stock", "--windows", "1"])

    measured = bench.report.measured(document["rows"])
    assert {bench.sweep.size_of(r) for r in measured if r["row"] == "eager fused"} == {8, 32}


# --- curves


def test_a_quarter_keeps_every_kind_of_layer(bench: Any) -> None:
    dims = bench.curves.quarter(bench.workloads.VLA_DIMS)

    assert (dims.vision_layers, dims.language.layers, dims.tuned, dims.action_layers) == (6, 4, 1, 8)


def test_a_verdict_compares_with_the_spread_of_eager_itself(bench: Any) -> None:
    curves = [
        curve(bench, "eager", 0, 2.0, 1.0),
        curve(bench, "eager again", 0, 2.0, 1.01),
        curve(bench, "graph", 0, 2.0, 1.005),
        curve(bench, "far", 0, 2.0, 1.5),
    ]

    found = {v.row: v for v in bench.curves.verdicts(curves)}

    assert found["graph"].within
    assert not found["far"].within
    assert found["graph"].eager_spread == pytest.approx(0.01, rel=0.02)
    assert found["graph"].bit_equal == 0


def test_eagers_spread_is_that_of_its_two_curves_farthest_apart(bench: Any) -> None:
    curves = [
        curve(bench, "eager", 0, 2.0, 1.0),
        curve(bench, "eager again", 0, 2.0, 1.0),
        curve(bench, "eager, foreach AdamW", 0, 2.0, 1.01),
        curve(bench, "eager, flash", 0, 2.0, 0.99),
        curve(bench, "graph", 0, 2.0, 0.985),
    ]

    found = {v.row: v for v in bench.curves.verdicts(curves)}

    assert found["graph"].within
    assert found["graph"].eager_spread == pytest.approx(0.02, rel=0.02)


def test_the_same_arithmetic_must_give_the_same_bits(bench: Any) -> None:
    sgd = "lf-graph, not compiled, SGD"
    curves = [curve(bench, row, seed, 2.0, 1.0) for row in ("eager", "eager again") for seed in (0, 1)]
    curves += [curve(bench, "eager, flash", 0, 2.0, 1.5)]
    curves += [curve(bench, row, 0, 2.0, 0.5) for row in ("eager, SGD", sgd)]

    (equal,) = [v for v in bench.curves.verdicts(curves) if v.row == sgd]
    curves += [curve(bench, "eager, SGD", 1, 2.0, 0.5), curve(bench, sgd, 1, 2.0, 0.5000001)]
    (other,) = [v for v in bench.curves.verdicts(curves) if v.row == sgd]

    assert (equal.within, equal.bit_equal) == (True, 1)
    assert (other.within, other.bit_equal) == (False, 1)


def test_bit_equality_is_counted_by_seed(bench: Any) -> None:
    curves = [curve(bench, row, seed, 2.0, 1.0) for row in ("eager", "eager again") for seed in (0, 1)]
    curves += [curve(bench, "graph", 0, 2.0, 1.0), curve(bench, "graph", 1, 2.0, 1.0000001)]

    (graph,) = [v for v in bench.curves.verdicts(curves) if v.row == "graph"]

    assert (graph.bit_equal, graph.seeds) == (1, 2)
    assert not graph.within


def test_a_row_that_failed_is_reported_and_never_within(bench: Any) -> None:
    curves = [curve(bench, row, 0, 2.0) for row in ("eager", "eager again")]
    curves.append(curve(bench, "graph", 0, error="lost"))

    (graph,) = [v for v in bench.curves.verdicts(curves) if v.row == "graph"]

    assert (graph.within, graph.error) == (False, "lost")
    assert "failed: lost" in bench.curves.table([graph])


def test_a_loss_that_is_not_a_number_is_never_within(bench: Any) -> None:
    curves = [curve(bench, row, 0, 2.0) for row in ("eager", "eager again")]
    curves.append(curve(bench, "graph", 0, float("nan")))

    (graph,) = [v for v in bench.curves.verdicts(curves) if v.row == "graph"]

    assert not graph.within


def test_curves_train_on_other_batches_every_step_and_repeat_bit_by_bit(bench: Any, tmp_path: Path) -> None:
    out = tmp_path / "curves.json"
    command = ["--tiny", "--workloads", "vla", "--rows", "stock", "--steps", "4", "--seeds", "2"]

    bench.curves.main([*command, "--json", str(out)])

    document = json.loads(out.read_text())
    again = [v for v in document["verdicts"] if v["row"] == "eager again"]
    assert [v["bit_equal"] for v in again] == [2]
    by_seed = {c["seed"]: c["losses"] for c in document["curves"]}
    assert by_seed[0] != by_seed[1]
    assert len(by_seed[0]) == 4


# --- more stock configurations


def tuned(bench: Any, workload: str, name: str) -> Any:
    (found, *_) = bench.workloads.workloads(tiny=True)[workload]
    return next(r for r in bench.tune_stock.rows(found) if r.name == name)


@pytest.mark.parametrize("workload", ["vla", "moe", "lm"])
def test_kept_bfloat16_copies_of_the_weights_leave_the_losses_as_they_are(bench: Any, workload: str) -> None:
    (found, *_) = bench.workloads.workloads(tiny=True)[workload]
    variant = bench.stock.Variant("kept casts")
    case = bench.measure.Case(found, found.batches[0], CPU)

    kept = bench.measure.first_losses(bench.tune_stock.prepare_kept_casts(case, variant), seed=2)

    plain = bench.measure.first_losses(bench.stock.prepare(case, variant), seed=2)
    assert kept == pytest.approx(plain, rel=2e-3)
    assert kept[0] != kept[2]


def test_restarting_a_row_with_kept_casts_restores_the_copies_too(bench: Any) -> None:
    (workload,) = bench.workloads.workloads(tiny=True)["moe"]
    case = bench.measure.Case(workload, 2, CPU)
    prepared = bench.tune_stock.prepare_kept_casts(case, bench.stock.Variant("kept casts"))

    first = bench.measure.first_losses(prepared, seed=2)

    assert bench.measure.first_losses(prepared, seed=2) == first


def test_block_arguments_are_found_by_running_the_model(bench: Any) -> None:
    (workload,) = bench.workloads.workloads(tiny=True)["vla"]
    case = bench.measure.Case(workload, 2, CPU)
    model = case.model()

    calls = bench.tune_stock.block_calls(model, workload, case.inputs(), "cpu")

    assert calls.keys() == set(workload.blocks(model))
    crossing = calls[model.dit[0]]
    alone = calls[model.dit[1]]
    assert (len(crossing.args), crossing.args[2].shape[-1]) == (3, 32)
    assert alone.args[2] is None


def test_a_bound_block_takes_tensors_only_and_computes_the_same(bench: Any) -> None:
    (workload,) = bench.workloads.workloads(tiny=True)["vla"]
    case = bench.measure.Case(workload, 2, CPU)
    model = case.model().eval()
    call = bench.tune_stock.block_calls(model, workload, case.inputs(), "cpu")[model.dit[1]]

    bound = bench.tune_stock.TensorsOnly(model.dit[1], call)

    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bound(*bound.tensors(call.args)), model.dit[1](*call.args))


def test_the_matrix_library_of_a_row_is_put_back_when_it_closes_or_fails(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ["cublas"]

    def library(name: str | None = None) -> str:
        chosen.append(name or chosen[-1])
        return chosen[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", library)
    (workload,) = bench.workloads.workloads(tiny=True)["vla"]
    case = bench.measure.Case(workload, 2, CPU)
    plain = bench.stock.Variant("plain")

    prepared = bench.tune_stock.prepare_cublaslt(case, plain)
    inside = chosen[-1]
    prepared.close()

    assert (inside, chosen[-1]) == ("cublaslt", "cublas")
    monkeypatch.setattr(bench.stock, "prepare", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.tune_stock.prepare_cublaslt(case, plain)
    assert chosen[-1] == "cublas"


def test_every_tuned_row_has_a_name_of_its_own(bench: Any) -> None:
    for group in bench.workloads.workloads().values():
        for workload in group:
            keys = [r.key for m in (bench.stock, bench.tune_stock) for r in m.rows(workload)]
            assert len(keys) == len(set(keys))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["graph, kept casts", "graphed callables"])
def test_on_a_gpu_a_tuned_row_learns_what_eager_learns(bench: Any, name: str) -> None:
    row, device = tuned(bench, "vla", name), torch.device("cuda")

    found = bench.measure.measure(row, device, bench.measure.Effort(windows=2, profiled=False))

    eager = bench.stock.row_of(row.workload, row.batch, bench.stock.EAGER_FUSED)
    plain = bench.measure.measure(eager, device, bench.measure.Effort(windows=2, profiled=False))
    assert found["status"] == "ok", found
    # both draw dropout in another order than eager does
    assert bench.report.distance(found["losses"], plain["losses"]) < 0.3


@pytest.mark.gpu
def test_on_a_gpu_the_captured_curve_is_the_eager_one(bench: Any, tmp_path: Path) -> None:
    out = tmp_path / "curves.json"

    bench.curves.main(["--tiny", "--rows", "stock", "--steps", "6", "--seeds", "1", "--json", str(out)])

    graphs = [v for v in json.loads(out.read_text())["verdicts"] if v["row"] == "graph"]
    assert len(graphs) == 3
    assert all(not v["error"] and v["distance"] < max(v["eager_spread"], 1e-3) for v in graphs), graphs


def test_rows_on_8_bits_train_near_the_reference(bench: Any, tmp_path: Path) -> None:
    out = tmp_path / "curves.json"
    command = ["--tiny", "--workloads", "lm", "--rows", "float8_rows", "--steps", "3", "--seeds", "1"]

    bench.curves.main([*command, "--json", str(out)])

    found = {v["row"]: v for v in json.loads(out.read_text())["verdicts"]}
    for scaling in ("tensor", "row"):
        assert 0 < found[f"eager, float8 by {scaling}"]["distance"] < 0.01
