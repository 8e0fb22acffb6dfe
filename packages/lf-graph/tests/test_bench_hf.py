"""The benchmark on a Hugging Face model: what it trains, that its rows agree, what it says where it cannot run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_modules import loaded

from lf_graph.kernels import _choice

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
bench = pytest.fixture(scope="module")(loaded)


@pytest.fixture(scope="module")
def hf(bench: Any) -> Any:
    return importlib.import_module("bench_hf")


def test_the_full_decoder_has_half_a_billion_parameters_all_trained_embeddings_tied(hf: Any) -> None:
    with torch.device("meta"):
        model = hf.decoder(hf.FULL)

    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert round(trained / 1e9, 2) == 0.53
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(hf.workload(False, (1,)).blocks(model)) == 24


def test_the_loss_is_that_of_the_model_called_plainly(hf: Any) -> None:
    w = hf.workload(True, (2,))
    model, (ids,) = w.model(CPU), w.batch(2, CPU)

    assert torch.equal(hf.loss_of(model, [ids]), model(input_ids=ids, labels=ids).loss)


def test_the_loss_of_the_rows_with_kernels_is_the_same(hf: Any) -> None:
    w = hf.workload(True, (2,))
    model, (ids,) = w.model(CPU), w.batch(2, CPU)
    expected = hf.loss_of(model, [ids])

    for attention in (False, True):
        torch.testing.assert_close(hf.fused_loss(hf.with_kernels(model, attention), [ids]), expected)
    assert type(model.model.norm).__name__ == "FusedRMSNorm"
    assert model.config._attn_implementation == "lf_graph"


def is_compiled(row: Any) -> bool:
    return row.name.startswith("whole") or row.name.endswith("model")


def test_every_batch_has_the_same_rows_and_quick_ones_of_all_batches_come_first(hf: Any) -> None:
    rows = hf.rows(hf.workload(False, (1, 4)))

    names = {b: sorted(r.name for r in rows if r.batch == b) for b in (1, 4)}
    assert names[1] == names[4]
    assert {"eager", "whole", "whole+graph", "lf-graph, off", "lf-graph, blocks", "lf-graph, model"} < {
        *names[1]
    }
    turn = [2 if "kernels" in r.name else int(is_compiled(r)) for r in rows]
    assert turn == sorted(turn)


def test_a_full_run_of_the_quick_rows_is_expected_within_the_default_budget(hf: Any) -> None:
    rows = [r for r in hf.rows(hf.workload(False, (1, 4))) if "kernels" not in r.name]  # those come last

    quick = [r for r in rows if not is_compiled(r)]
    assert sum(r.expect_s for r in quick) <= hf.arguments([]).budget_s == 100
    one_batch = [r for r in rows if r.batch == 4 and not r.name.endswith("model")]
    assert sum(r.expect_s for r in one_batch) <= 100  # a call for one batch reaches the compiled stock rows


def test_our_row_starts_with_the_losses_of_the_eager_row(
    hf: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "hf.json"
    monkeypatch.setattr(_choice, "_INTERPRETED", False)  # kernels take minutes in the interpreter

    hf.main(
        [
            "--tiny",
            "--batches",
            "2",
            "--match",
            "eager,off,kernels and",
            "--windows",
            "1",
            "--no-profile",
            "--json",
            str(out),
        ]
    )

    rows = {r["row"]: r for r in json.loads(out.read_text())["rows"]}
    assert set(rows) == {"eager", "lf-graph, off", "lf-graph, kernels and attention"}
    assert all(r["status"] == "ok" for r in rows.values()), rows
    if not torch.cuda.is_available():
        assert (
            rows["lf-graph, off"]["losses"] == rows["eager"]["losses"]
        )  # the recorder runs the same operators
    assert rows["lf-graph, off"]["parity"] < 1e-2
    assert rows["lf-graph, kernels and attention"]["parity"] < 1e-2
    assert rows["eager"]["losses"][0] > rows["eager"]["losses"][-1]
    assert "| lf-graph, off | ours |" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would run the full model")
def test_without_a_gpu_it_says_so_and_measures_nothing(
    hf: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf.main(["--json", str(tmp_path / "hf.json")])

    assert "needs a CUDA GPU" in capsys.readouterr().out
    assert not (tmp_path / "hf.json").exists()


def test_without_transformers_it_says_so(
    hf: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hf, "installed", lambda name: None)

    hf.main(["--tiny"])

    assert "pip install transformers" in capsys.readouterr().out
