"""The benchmark on documents of real lengths: what it trains on, that its rows compute one loss, what it says."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_modules import loaded

pytest.importorskip("lf_iouring")
CPU = torch.device("cpu")
bench = pytest.fixture(scope="module")(loaded)


@pytest.fixture(autouse=True)
def _plain_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside of the tests: kernels in Triton's interpreter, which they are tested in, take minutes here."""
    monkeypatch.setattr(importlib.import_module("lf_graph.kernels._choice"), "_INTERPRETED", False)


@pytest.fixture(scope="module")
def lengths(bench: Any) -> Any:
    return importlib.import_module("bench_lengths")


@pytest.fixture(scope="module")
def data(bench: Any) -> Any:
    return importlib.import_module("lengths_data")


@pytest.fixture(scope="module")
def models(bench: Any) -> Any:
    return importlib.import_module("lengths_models")


@pytest.fixture(scope="module")
def rows(bench: Any) -> Any:
    return importlib.import_module("lengths_rows")


@pytest.fixture(scope="module")
def corpus(data: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The full benchmark's lengths divided by eight."""
    return data.Corpus(
        data.Shape(97, rows=8, length=256, shortest=65, documents=300), tmp_path_factory.mktemp("a")
    )


@pytest.fixture(scope="module")
def setting(lengths: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return lengths.setting_of(True, tmp_path_factory.mktemp("b"), CPU)


def pieces(batch: Any) -> list[tuple[bytes, bytes]]:
    """ids and labels of every sequence in a packed batch."""
    (ids, labels, borders), _ = batch
    cuts = itertools.pairwise(borders.tolist())
    return [(ids[a:b].numpy().tobytes(), labels[a:b].numpy().tobytes()) for a, b in cuts if b > a]


def expected_pieces(corpus: Any) -> set[tuple[bytes, bytes]]:
    found = set()
    for number in range(len(corpus.lengths)):
        ids = corpus[number].astype(np.int64)
        labels = np.append(ids[1:], -100)
        found.add((ids.tobytes(), labels.tobytes()))
    return found


def test_padded_rows_of_the_full_benchmark_are_empty_by_the_share_of_the_baselines(data: Any) -> None:
    shape = data.Shape(50257)
    lengths = shape.lengths()
    assert round(1 - lengths.mean() / shape.length, 3) == 0.187
    assert (lengths.min(), lengths.max()) == (516, 2048)
    assert (lengths == 2048).mean() == pytest.approx(0.5, abs=1e-3)


def test_both_loaders_pack_whole_documents_into_nearly_full_rows(data: Any, corpus: Any) -> None:
    whole, places = expected_pieces(corpus), corpus.shape.capacity
    for feed, unused_pieces in (
        (data.torch_feed(corpus, "packed", CPU), True),
        (data.loong_feed(corpus, CPU), False),
    ):
        batches = list(itertools.islice(feed, 12))
        feed.close()
        for batch in batches:
            (ids, labels, borders), useful = batch
            assert (len(ids), len(labels), len(borders)) == (places, places, corpus.shape.borders)
            assert borders.dtype == torch.int32
            assert borders[-1] == (places if unused_pieces else useful)
            assert (labels[useful:] == -100).all()
            documents = [p for p in pieces(batch) if p in whole]
            assert sum(len(ids) for ids, _ in documents) == 8 * useful
        assert sum(useful for _, useful in batches) / (12 * places) > 0.95


def test_padded_batches_hold_one_document_a_row(data: Any, corpus: Any) -> None:
    whole = {ids for ids, _ in expected_pieces(corpus)}
    (ids, labels), useful = next(data.torch_feed(corpus, "padded", CPU))
    real = (labels != -100).sum(1) + 1
    assert ids.shape == labels.shape == (8, 256)
    assert int(real.sum()) == useful
    for row, label, n in zip(ids, labels, real.tolist(), strict=True):
        assert row[:n].numpy().tobytes() in whole
        assert torch.equal(label[: n - 1], row[1:n])


def test_an_unused_end_is_cut_into_sequences_that_stock_attention_can_take(data: Any, corpus: Any) -> None:
    (_, _, borders), useful = data.packed([corpus[0]], corpus.shape, fill_end=True)
    sizes = borders.diff()
    assert useful == len(corpus[0])
    assert int(borders[-1]) == corpus.shape.capacity
    assert int(sizes.max()) <= corpus.shape.length
    shortest = [np.zeros(65, np.uint16)] * (corpus.shape.capacity // 65)
    (_, _, borders), _ = data.packed(shortest, corpus.shape, fill_end=True)
    assert int(borders[-1]) == corpus.shape.capacity


def test_every_row_that_a_cpu_can_run_has_the_loss_of_the_eager_one(
    lengths: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lengths.json"
    command = ["--tiny", "--rows", "stock,ours,ladder", "--windows", "1", "--steps", "8", "--json", str(out)]
    lengths.main(command)
    document = json.loads(out.read_text())
    found = {r["row"]: r for r in document["rows"]}
    assert found["eager"]["status"] == "ok", found["eager"]
    for name, r in found.items():
        if torch.cuda.is_available() or r["status"] != "skipped":
            assert r["status"] == "ok", r
            assert r["parity"] < (1e-2 if torch.cuda.is_available() else 1e-3), name
            assert r["losses"][0] > r["losses"][-1]
        else:
            assert r["error"] == "needs a GPU"
    assert {"lf-graph", "lf-graph, gr00t_n16_lm", "+ early release", "+ compiled"} <= found.keys()
    assert found["lf-graph"]["padding"] < found["eager"]["padding"]
    assert "| lf-graph | ours | packed, lf-iouring |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["", "lf-graph"])
def test_a_row_compiled_as_a_whole_has_the_loss_of_the_eager_one(
    rows: Any, setting: Any, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    monkeypatch.setattr(rows, "WHOLE", {"backend": "aot_eager", "fullgraph": True})
    losses = []
    for way in (rows.Eager(), rows.Eager(attention, compile=True)):
        row = rows.of("row", way)
        trained = row.setup(setting)
        losses.append([float(trained.step(*setting.parity_batch(row))) for _ in range(2)])
        trained.close()
    torch._dynamo.reset()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_sees_what_ours_sees(
    models: Any, data: Any, corpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:  # compiled code of a mask is for a GPU
        patched.setattr(torch, "compile", lambda f: f)
        make = models.document_mask(corpus.shape.capacity, CPU)
    (_, _, borders), useful = data.packed([corpus[i][:20] for i in range(4)], corpus.shape, fill_end=True)
    q, k, v = torch.randn(3, corpus.shape.capacity, 2, 16).unbind()
    with torch.no_grad():
        flex, ours = models.attend_flex(q, k, v, make(borders)), models.attend_ours(q, k, v, borders)
    torch.testing.assert_close(flex[:useful], ours[:useful], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_row_of_flex_attention_compiles_once_for_all_documents(
    rows: Any, setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile(f, fullgraph=True, backend="eager"))
    flex = rows.loss_of(setting, setting.model(), rows.Eager("flex", compile=True))
    ours = rows.loss_of(setting, setting.model(), rows.Eager("lf-graph"))
    feed = setting.feed("torch", "packed")
    # not monkeypatch: its undo deletes what the module's own __dict__ does not hold, and torch then hides the setting
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        losses = [[float(loss(*batch)) for loss in (flex, ours)] for batch, _ in itertools.islice(feed, 3)]
    feed.close()
    torch._dynamo.reset()
    for one, other in losses:
        assert one == pytest.approx(other, rel=1e-5)
    assert len({one for one, _ in losses}) == 3


@pytest.mark.parametrize("fused", [False, True])
def test_packed_forms_of_the_model_have_its_loss_and_gradients(
    models: Any, rows: Any, setting: Any, fused: bool
) -> None:
    def gradients(loss: torch.Tensor, model: Any) -> dict[str, torch.Tensor]:
        loss.backward()
        return {n.replace(".a.", "."): p.grad for n, p in model.named_parameters()}

    row = rows.of("", rows.Eager())
    plain, other = setting.model(), models.take_packed(setting.model(), models.attend_ours, fused)
    loss = plain(*setting.parity_batch(row))
    their_row = rows.of("", rows.Eager("lf-graph"), loader="lf-iouring")
    packed = models.packed_loss(other, fused, *setting.parity_batch(their_row))
    torch.testing.assert_close(packed, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradients(packed, other), gradients(loss, plain), rtol=1e-3, atol=1e-6)


def test_the_model_of_lf_meta_gets_the_same_weights(models: Any, rows: Any, setting: Any) -> None:
    pytest.importorskip("lf_meta")
    plain = setting.model()
    theirs = models.as_gr00t(plain, fused_loss=True)
    loss = plain(*setting.parity_batch(rows.of("", rows.Eager())))
    way = rows.of("", rows.Eager("lf-graph"), loader="lf-iouring")
    ids, _, borders = setting.parity_batch(way)
    total, count = theirs(ids, cu_seqlens=borders)
    torch.testing.assert_close(total / count, loss, rtol=1e-5, atol=0)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in plain.parameters())


def test_what_matters_most_comes_first_and_fits_the_time(lengths: Any) -> None:
    ways = lengths.chosen_rows("stock,ours", "")
    assert [w.name for w in ways[:3]] == ["eager", "lf-graph", "packed varlen_attn, whole"]
    assert sum(w.expect_s for w in ways[:4]) <= 250
    assert sum(w.expect_s for w in lengths.chosen_rows("ladder", "")) <= 250
    with pytest.raises(SystemExit, match="no rows 'theirs'"):
        lengths.chosen_rows("theirs", "")


def test_a_row_that_would_end_too_late_or_fails_says_so(lengths: Any, rows: Any, setting: Any) -> None:
    way = rows.Way("broken", "stock", functools.partial(_fails, "no memory"))
    assert lengths.why_not(way, torch.device("cuda"), 10.0)[0] == "not run"
    assert lengths.why_not(way, CPU, 10.0) is None
    result = lengths.measure(way, setting, lengths.arguments([]))
    assert (result["status"], result["error"]) == ("failed", "ValueError: no memory")
    assert "failed: ValueError: no memory" in lengths.table([result])


def _fails(message: str, setting: Any) -> None:
    raise ValueError(message)


def test_ratios_are_of_useful_tokens(lengths: Any) -> None:
    windows = [{"useful": 90, "seconds": s, "wait_ms": 1.0} for s in (1.0, 0.5, 2.0)]
    numbers = lengths.summary(windows, 2, 60)
    assert (numbers["units_per_s"], numbers["step_ms"]) == (90.0, 500.0)
    assert numbers["padding"] == pytest.approx(0.25)
    base = {"source": "stock", "layout": "padded", "loader": "torch", "status": "ok", "prep_s": 1.0}
    base |= {"workload": "lengths", "batch": 8, "losses": [1.0], "losses_reseeded": [1.0], "peak_gib": 1.0}
    found = [base | numbers | {"row": "eager"}]
    found.append(base | numbers | {"row": "lf-graph", "source": "ours", "units_per_s": 225.0})
    assert "| 225 | " in lengths.table(found)
    assert "| 2.50 | 2.500 |" in lengths.table(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would run the full model")
def test_without_a_gpu_it_says_so_and_measures_nothing(
    lengths: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths.main([])
    assert "needs a CUDA GPU" in capsys.readouterr().out
