"""The fused rows compute what the rows beside them do."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._functorch.config
from bench_modules import loaded

bench = pytest.fixture(scope="module")(loaded)
CPU = torch.device("cpu")


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_the_loss_without_logits_is_the_loss(bench: Any) -> None:
    fused = importlib.import_module("fused")
    workload = bench.workloads.workloads(tiny=True)["lm"][1]
    a, b = workload.model(CPU), workload.model(CPU)
    batch = workload.batch(2, CPU)
    x, y = workload.loss(a, batch), fused.fused_loss(b, batch)
    torch.testing.assert_close(x, y, rtol=1e-6, atol=0)
    theirs, ours = gradients(a, x), gradients(b, y)
    assert theirs.keys() == ours.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(grad, ours[name], rtol=1e-4, atol=1e-6)


def test_fused_experts_are_the_grouped_ones(bench: Any) -> None:
    fused = importlib.import_module("fused")
    torch.manual_seed(0)
    grouped = bench.models.GroupedMoE(32, 16, 4, 2)
    ours = fused.FusedMoE.of(grouped)
    x = torch.randn(2, 8, 32)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    first, second = grouped(a), ours(b)
    torch.testing.assert_close(first, second, rtol=2e-2, atol=1e-4)
    first.sum().backward()
    theirs = {n: p.grad.clone() for n, p in grouped.named_parameters() if p.grad is not None}
    grouped.zero_grad()
    second.sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(ours.gu.grad, torch.cat((theirs["g"], theirs["u"]), -1), rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(ours.d.grad, theirs["d"], rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["lm", "moe"])
def test_every_fused_row_trains_as_the_plain_one(
    bench: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as outside of the tests: kernels in Triton's interpreter, which they are tested in, take a minute here
    monkeypatch.setattr(importlib.import_module("lf_graph.kernels._choice"), "_INTERPRETED", False)
    fused, ours = importlib.import_module("fused"), importlib.import_module("ours")
    workload = bench.workloads.workloads(tiny=True)[name][-1]
    effort = bench.measure.Effort(windows=1, window_steps=1, through_steps=1, profiled=False)
    plain = bench.measure.measure(ours.row_of(workload, 1, ours.Ours(compile="off")), CPU, effort)
    for configuration in fused.configurations(workload):
        row = bench.measure.measure(ours.row_of(workload, 1, configuration), CPU, effort)
        assert row["status"] == "ok", row
        assert row["losses"] == pytest.approx(plain["losses"], rel=2e-2)


def test_every_row_that_saves_memory_trains_as_the_plain_one(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("lf_graph.kernels._choice"), "_INTERPRETED", False)
    rows, ours = importlib.import_module("memory_rows"), importlib.import_module("ours")
    workload = bench.workloads.workloads(tiny=True)["lm"][-1]

    def losses(one: Any) -> list[float]:
        prepared = ours.prepare(bench.measure.Case(workload, 1, CPU), one)
        found = [float(prepared.step()) for _ in range(3)]
        prepared.close()
        return found

    plain = losses(ours.Ours(compile="off"))
    # nothing is compiled here: rows that differ in that alone are one
    others = {(o.release, o.clip, o.shadows, o.loss): o for o in rows.configurations(workload)}
    assert len(others) == 4
    for one in others.values():
        assert losses(one) == pytest.approx(plain, rel=2e-2), one.name


def test_stock_rows_are_cut_by_the_settings_of_ours(bench: Any) -> None:
    rows, stock = importlib.import_module("memory_rows"), bench.stock
    workload = bench.workloads.workloads(tiny=True)["lm"][-1]
    case = bench.measure.Case(workload, 1, CPU)
    config = torch._functorch.config
    before = config.ban_recompute_materialized_backward
    variant = replace(rows.variants()[0], compile="")
    prepared = stock.prepare(case, variant)
    assert not config.ban_recompute_materialized_backward
    prepared.close()
    assert config.ban_recompute_materialized_backward is before is True
    assert rows.rows(bench.workloads.workloads(tiny=True)["vla"][0]) == []


def test_every_variant_of_ours_is_a_row_of_its_own(bench: Any) -> None:
    tuned = importlib.import_module("tuned")
    for name in ("vla", "moe", "lm"):
        workload = bench.workloads.workloads(tiny=True)[name][0]
        keys = [row.key for row in tuned.rows(workload)]
        assert len(set(keys)) == len(keys) == 10 * len(workload.batches)
