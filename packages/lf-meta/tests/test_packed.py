"""Packed rows: the language models' loss of sequences in one row is their loss of the sequences one by one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lf_format as lff
from lf_graph import TrainStep, check
from lf_iouring import LoongDataLoader
from lf_meta.errors import ConfigError
from lf_meta.models import build_model
from lf_meta.models.packed import pad_borders

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
VOCAB = 97
SMALL: dict[str, dict[str, Any]] = {
    "gr00t_n16_lm": {"layers": 2, "hidden": 32, "heads": 2, "ffn": 48},
    "gr00t_n16_moe": {"layers": 2, "hidden": 32, "heads": 2, "ffn": 16, "experts": 4},
}
MODELS = pytest.mark.parametrize("name", list(SMALL))
KINDS = pytest.mark.parametrize("kind", ["varlen", "sdpa"])
LENGTHS = [9, 1, 0, 17, 2]


def made(name: str, **args: Any) -> Any:
    torch.manual_seed(0)
    return build_model(name, "tiny", VOCAB, {**SMALL[name], **args})


def documents(lengths: list[int], seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


def padded(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(d) for d in documents])
    tokens = torch.zeros(len(documents), max(int(lengths.max()), 2), dtype=torch.int64)
    for row, document in zip(tokens, documents, strict=True):
        row[: len(document)] = document
    return tokens, lengths


def packed(
    documents: list[Tensor], capacity: int = 40, borders: int = 8, unused: int = 5
) -> tuple[Tensor, Tensor]:
    """(tokens [capacity], cu_seqlens [borders]); the last border repeats, ``unused`` ids fill the end."""
    tokens = torch.full((capacity,), unused)
    ends = np.cumsum([0, *(len(d) for d in documents)])
    tokens[: ends[-1]] = torch.cat(documents)
    cu = torch.full((borders,), int(ends[-1]), dtype=torch.int32)
    cu[: len(ends)] = torch.from_numpy(ends)
    return tokens, cu


def outcome(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss, count and gradients of the mean loss."""
    model.zero_grad()
    loss, count = model(*args, **kwargs)
    (loss / count.clamp(min=1)).backward()
    return loss.detach(), count, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@MODELS
@KINDS
@pytest.mark.parametrize("fused", [False, True])
def test_loss_count_and_gradients_are_those_of_padded_rows(name: str, kind: str, fused: bool) -> None:
    model = made(name, packed_attention=kind, fused_loss=fused).double()
    expected = outcome(model, *padded(documents(LENGTHS)))
    tokens, cu = packed(documents(LENGTHS))
    actual = outcome(model, tokens, cu_seqlens=cu)
    assert actual[1] == 8 + 0 + 0 + 16 + 1
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert len(actual[2]) == len(list(model.parameters()))


@MODELS
@KINDS
def test_in_float32_it_is_the_sum_over_sequences_one_by_one(name: str, kind: str) -> None:
    model = made(name, packed_attention=kind).eval()
    with torch.no_grad():
        alone = [model(d[None], torch.tensor([len(d)])) for d in documents(LENGTHS) if len(d)]
        tokens, cu = packed(documents(LENGTHS))
        loss, count = model(tokens, cu_seqlens=cu)
    torch.testing.assert_close(loss, sum(x[0] for x in alone), rtol=1e-5, atol=0)
    assert count == sum(x[1] for x in alone)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=7), st.booleans())
def test_any_lengths_fit_together(lengths: list[int], exact: bool) -> None:
    model = made("gr00t_n16_lm").double()
    capacity = max(sum(lengths), 1) if exact else 90
    tokens, cu = packed(documents(lengths), capacity)
    expected = outcome(model, *padded(documents(lengths)))
    torch.testing.assert_close(outcome(model, tokens, cu_seqlens=cu), expected, rtol=1e-9, atol=1e-12)


@MODELS
@KINDS
def test_the_loss_mask_is_that_of_padded_rows(name: str, kind: str) -> None:
    model = made(name, packed_attention=kind).double()
    mask = [d % 3 > 0 for d in documents(LENGTHS)]
    tokens, lengths = padded(documents(LENGTHS))
    expected = outcome(model, tokens, lengths, padded(mask)[0].bool())
    row, cu = packed(documents(LENGTHS))
    actual = outcome(model, row, loss_mask=packed(mask, unused=1)[0], cu_seqlens=cu)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert 0 < actual[1] < 25


@MODELS
@KINDS
def test_unused_capacity_contributes_nothing(name: str, kind: str) -> None:
    model = made(name, packed_attention=kind)
    results = []
    for unused in (0, 96):
        tokens, cu = packed(documents(LENGTHS), unused=unused)
        results.append(outcome(model, tokens, cu_seqlens=cu))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    tokens, cu = packed([d.clamp(max=90) for d in documents(LENGTHS)], unused=96)
    outcome(model, tokens, cu_seqlens=cu)
    assert not model.embed.weight.grad[96].any()


@MODELS
@KINDS
def test_no_sequence_sees_another_and_positions_restart(name: str, kind: str) -> None:
    model = made(name, packed_attention=kind).double().eval()
    first, second = documents([11, 13])

    def losses(*found: Tensor) -> float:
        tokens, cu = packed(list(found))
        mask = torch.zeros(40, dtype=torch.bool)
        mask[int(cu[len(found) - 1]) : int(cu[len(found)])] = True
        with torch.no_grad():
            return float(model(tokens, loss_mask=mask, cu_seqlens=cu)[0])

    alone = losses(second)
    assert losses(first, second) == pytest.approx(alone, rel=1e-12)
    assert losses((first + 1) % VOCAB, second) == pytest.approx(alone, rel=1e-12)
    assert losses(first[:4], first[4:], second) == pytest.approx(alone, rel=1e-12)
    assert losses(second[:6], second[6:]) != pytest.approx(alone, rel=1e-3)


@MODELS
@KINDS
@pytest.mark.parametrize("lengths", [[], [0, 0], [1, 1, 1]])
def test_a_row_without_a_target_has_no_loss(name: str, kind: str, lengths: list[int]) -> None:
    model = made(name, packed_attention=kind, fused_loss=True)
    tokens, cu = packed([torch.zeros(0, dtype=torch.int64), *documents(lengths)])
    loss, count, gradients = outcome(model, tokens, cu_seqlens=cu)
    assert (float(loss), int(count)) == (0.0, 0)
    assert len(gradients) == len(list(model.parameters()))
    assert not any(g.any() for g in gradients)


def test_a_row_may_have_a_dimension_of_its_own() -> None:
    model = made("gr00t_n16_lm")
    tokens, cu = packed(documents(LENGTHS))
    mask = tokens > 20
    torch.testing.assert_close(
        model(tokens[None], None, mask[None], cu), model(tokens, None, mask, cu), rtol=0, atol=0
    )


@MODELS
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda t, cu: {"tokens": t}, "one of the two"),
        (lambda t, cu: {"tokens": t[None], "lengths": cu, "cu_seqlens": cu}, "one of the two"),
        (lambda t, cu: {"tokens": t.view(2, 20), "cu_seqlens": cu}, r"\[2, 20\]"),
        (lambda t, cu: {"tokens": t, "cu_seqlens": cu.long()}, "int32"),
        (lambda t, cu: {"tokens": t, "cu_seqlens": cu[None]}, r"\[1, 8\]"),
        (lambda t, cu: {"tokens": t, "cu_seqlens": cu, "loss_mask": t.view(2, 20)}, "loss_mask"),
    ],
)
def test_inputs_that_are_no_packed_row_are_refused(name: str, inputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(name)(**inputs(*packed(documents(LENGTHS))))


@MODELS
def test_dropout_of_attention_needs_sdpa(name: str) -> None:
    tokens, cu = packed(documents(LENGTHS))
    model = made(name, dropout=0.5)
    with pytest.raises(ConfigError, match="packed_attention"):
        model(tokens, cu_seqlens=cu)
    model.eval()(tokens, cu_seqlens=cu)
    rates = (0.0, 0.5)
    losses = [made(name, dropout=p, packed_attention="sdpa")(tokens, cu_seqlens=cu)[0].item() for p in rates]
    assert losses[0] != losses[1]


def test_block_sparse_attention_refuses_packed_rows() -> None:
    tokens, cu = packed(documents(LENGTHS))
    with pytest.raises(ConfigError, match=r"model\.args\.attention"):
        made("gr00t_n16_moe", attention="block_sparse", sparse_block=4)(tokens, cu_seqlens=cu)


def test_only_known_kinds_of_attention_are_taken() -> None:
    with pytest.raises(ConfigError) as caught:
        made("gr00t_n16_lm", packed_attention="flash")
    assert caught.value.key == "model.args.packed_attention"


@MODELS
@KINDS
def test_a_graph_can_hold_it_whatever_the_lengths(name: str, kind: str) -> None:
    model = made(name, packed_attention=kind, fused_loss=True)
    first, second = packed(documents(LENGTHS)), packed(documents([4, 4, 20], seed=5))
    report = check(
        lambda tokens, cu: model(tokens, cu_seqlens=cu)[0],
        *first,
        again=second,
    )
    assert report.ok, report


@MODELS
@KINDS
def test_a_replay_with_other_lengths_is_the_eager_loss(name: str, kind: str) -> None:
    model = made(name, packed_attention=kind)
    twin = copy.deepcopy(model)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.0))
    for seed, lengths in enumerate([LENGTHS, [40], [1] * 7, [0, 3], [13, 13, 13]]):
        tokens, cu = packed(documents(lengths, seed))
        with torch.no_grad():
            loss, count = twin(tokens, cu_seqlens=cu)
        result = step(tokens, cu_seqlens=cu)
        assert float(result.count) == int(count)
        if int(count):
            assert float(result.loss) == float(loss / count)
    assert step.stats().captures == 1
    step.close()


@MODELS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_captured_step_on_packed_rows_trains_like_an_eager_one_on_padded_rows(
    name: str, device: str, autocast: torch.dtype | None
) -> None:
    model = made(name, fused_loss=True).to(device)
    twin = copy.deepcopy(model)
    eager = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3), autocast=autocast)
    losses: list[list[float]] = [[], []]
    for seed, lengths in enumerate([LENGTHS, [40], [7, 7, 2, 20], [13, 13, 13]]):
        tokens, cu = (t.to(device) for t in packed(documents(lengths, seed)))
        losses[0].append(step(tokens, cu_seqlens=cu).loss.item())
        with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
            loss, count = twin(*(t.to(device) for t in padded(documents(lengths, seed))))
        eager.zero_grad()
        (loss / count).backward()
        eager.step()
        losses[1].append((loss / count).item())
    assert step.stats().captures == 1
    step.close()
    exact = 1e-5 if device == "cpu" else 1e-4  # on a GPU kernels other than the twins run
    assert losses[0] == pytest.approx(losses[1], rel=exact if autocast is None else 5e-3)


@KINDS
def test_it_compiles_whole(kind: str) -> None:
    model = made("gr00t_n16_lm", packed_attention=kind, fused_loss=True)
    tokens, cu = packed(documents(LENGTHS))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        outcome(compiled, tokens, cu_seqlens=cu), outcome(model, *padded(documents(LENGTHS)))
    )


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, list[Tensor]]:
    """A .loongbin of records of 1 to 39 tokens, and the records."""
    rng = np.random.default_rng(0)
    records = [rng.integers(0, VOCAB, n) for n in rng.integers(1, 40, 30)]
    info = lff.TokenizerInfo("random", "00")
    with lff.Writer(tmp_path / "a.loongbin", vocab_size=VOCAB, tokenizer=info, buckets=(40,)) as writer:
        for record in records:
            writer.append(record)
    return tmp_path / "a.loongbin", [torch.from_numpy(r) for r in records]


def test_batches_of_the_loader_are_packed_rows(stored: tuple[Path, list[Tensor]]) -> None:
    model = made("gr00t_n16_lm").double().eval()
    with torch.no_grad():
        rows = [model(*padded([r])) for r in stored[1]]
    with (
        lff.open_dataset(stored[0]) as dataset,
        LoongDataLoader(dataset, global_batch=1, pack=128, epochs=1, return_type="torch") as loader,
        torch.no_grad(),
    ):
        totals = [model(b.tokens.long(), loss_mask=b.loss_mask, cu_seqlens=b.cu_seqlens) for b in loader]
    assert len(totals) > 3
    assert sum(int(count) for _, count in totals) == sum(int(count) for _, count in rows)
    assert sum(float(x) for x, _ in totals) == pytest.approx(sum(float(x) for x, _ in rows), rel=1e-9)


def test_one_graph_takes_every_batch_of_the_loader(stored: tuple[Path, list[Tensor]]) -> None:
    model = made("gr00t_n16_lm")
    twin = copy.deepcopy(model)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.0))
    borders = set()
    with (
        lff.open_dataset(stored[0]) as dataset,
        LoongDataLoader(dataset, global_batch=1, pack=128, epochs=1, return_type="torch") as loader,
    ):
        for batch in loader:
            borders.add(len(batch.cu_seqlens))
            tokens, mask = batch.tokens.long(), batch.loss_mask.bool()
            loss, count = twin(tokens, loss_mask=mask, cu_seqlens=batch.cu_seqlens)
            found = step(tokens, loss_mask=mask, cu_seqlens=pad_borders(batch.cu_seqlens, 129)).loss
            assert found.item() == pytest.approx((loss / count).item(), rel=1e-6)
    assert len(borders) > 1
    assert step.stats().captures == 1
    step.close()


def test_borders_are_padded_with_the_last_and_never_cut() -> None:
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    assert pad_borders(cu, 5).tolist() == [0, 4, 9, 9, 9]
    assert torch.equal(pad_borders(cu, 3), cu)
    for entries, borders in ((cu, 2), (cu[:0], 4)):
        with pytest.raises(ValueError, match="entries"):
            pad_borders(entries, borders)
