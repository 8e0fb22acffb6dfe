"""Buckets: any length replays one of a few graphs, with the numbers of the unpadded input."""

from __future__ import annotations

import copy
import json
import random
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from metered import MeteredBackend
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lf_graph import (
    Buckets,
    BudgetError,
    ClosedError,
    DynamicMaskBuffer,
    GraphCaptureError,
    GraphError,
    GraphPool,
    SignatureError,
    StaleReplayError,
    TrainStep,
)

VOCABULARY, WIDTH = 32, 8


class Attention(nn.Module):
    """Token logits [B, T, 32]; keys past ``lengths`` are hidden by a mask buffer."""

    def __init__(self, capacity: int, batch: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.mask = DynamicMaskBuffer(capacity, batch=batch, causal=False)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        b, t = ids.shape
        q, k, v = self.qkv(self.embed(ids)).view(b, t, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask.write(lengths, t))
        return self.head(mixed.transpose(1, 2).reshape(b, t, WIDTH))


class Pooled(nn.Module):
    """A masked mean over time, cheap for thousands of positions: [B, T] floats -> [B, 3]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(1, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        seen = torch.arange(x.shape[1])[None, :] < lengths[:, None]
        hidden = torch.tanh(self.up(x[..., None])) * seen[..., None]
        return self.down(hidden.sum(1) / lengths[:, None])


def full(x: Tensor) -> Tensor:
    return torch.full((x.shape[0],), x.shape[1])


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def square(x: Tensor) -> Tensor:
    return x * x


# -- the numbers -------------------------------------------------------------------------------------------


def test_500_lengths_make_5_captures_and_equal_the_unpadded_model() -> None:
    """A4: pytorch#119640, one graph per length without bound."""
    model, draw = Pooled(), random.Random(1)
    buckets = Buckets(model, (256, 512, 1024, 2048, 4096), dims={"x": 1}, lengths="lengths")
    lengths = [draw.randint(1, 4096) for _ in range(500)]
    last_new = max(
        lengths.index(next(n for n in lengths if lo < n <= hi)) for lo, hi in _ranges(buckets.edges)
    )
    for i, length in enumerate(lengths):
        x = torch.randn(2, length)
        found = buckets(x)
        assert buckets.stats().captures == 5 or i < last_new
        expected = model(x, full(x))
        torch.testing.assert_close(found, expected)
        if i % 5 == 0:
            found.sum().backward()
            ours = gradients(model)
            expected.sum().backward()
            for a, b in zip(ours, gradients(model), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    stats = buckets.stats()
    assert (stats.captures, stats.hits, stats.evictions, stats.eager) == (5, 495, 0, 0)


def _ranges(edges: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip((0, *edges), edges, strict=False))


@pytest.mark.parametrize("unpad", [None, 1])
def test_attention_equals_eager_forward_and_backward(unpad: int | None) -> None:
    model, draw = Attention(16), random.Random(0)
    buckets = Buckets(model, (4, 8, 16), dims={"ids": 1}, lengths="lengths", unpad=unpad)
    for length in [draw.randint(1, 16) for _ in range(12)]:
        ids = torch.randint(0, VOCABULARY, (2, length))
        weights = torch.randn(2, length, VOCABULARY)
        out = buckets(ids)
        assert out.shape[1] == (length if unpad else min(e for e in buckets.edges if e >= length))
        (out[:, :length] * weights).sum().backward()
        ours = gradients(model)
        expected = model(ids, full(ids))
        (expected * weights).sum().backward()
        torch.testing.assert_close(out[:, :length], expected)
        torch.testing.assert_close(ours, gradients(model))


def test_lengths_of_a_batch_are_read_by_the_replay() -> None:
    """A2: flash-attention#1164, lengths frozen in the graph. Captured with [5, 3] in a capacity of 16."""
    model = Attention(16)
    buckets = Buckets(model, (16,), dims={"ids": 1}, lengths="lengths")
    for lengths in ([5, 3], [1, 7], [16, 2], [8, 8]):
        ids = torch.randint(0, VOCABULARY, (2, max(lengths)))
        found = buckets(ids, torch.tensor(lengths))
        for row, n in enumerate(lengths):
            alone = model(ids[row : row + 1, :n], torch.tensor([n]))
            torch.testing.assert_close(found[row : row + 1, :n], alone)
    assert buckets.stats().captures == 1


def packed(x: Tensor, lengths: Tensor) -> Tensor:
    """Attention inside segments of a packed sequence [T, D]; lengths int64 [S] add up to what is real."""
    ends = lengths.cumsum(0)
    segment = torch.searchsorted(ends, torch.arange(x.shape[0]), right=True)
    seen = segment[:, None] == segment[None, :]
    return F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=seen[None])[0]


def test_packed_segments_are_read_by_the_replay() -> None:
    buckets = Buckets(packed, (16,), dims={"x": 0}, lengths="lengths", unpad=0)
    for lengths in ([5, 3], [1, 7], [16, 0], [8, 8]):
        x = torch.randn(sum(lengths), 4)
        alone = [packed(part, torch.tensor([len(part)])) for part in x.split(lengths) if len(part)]
        torch.testing.assert_close(buckets(x, torch.tensor(lengths)), torch.cat(alone))
    assert buckets.stats().captures == 1


@given(
    edges=st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True).map(sorted),
    data=st.data(),
    rows=st.integers(1, 3),
    most=st.integers(1, 4),
)
@settings(max_examples=15, deadline=None)
def test_any_sequence_of_lengths_equals_eager(edges: list[int], data: Any, rows: int, most: int) -> None:
    model = Pooled()
    lengths = data.draw(st.lists(st.integers(1, edges[-1]), min_size=1, max_size=8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Buckets(model, edges, dims={"x": 1}, lengths="lengths", max_graphs=most) as buckets:
            for length in lengths:
                x = torch.randn(rows, length)
                torch.testing.assert_close(buckets(x), model(x, full(x)))
            stats = buckets.stats()
    assert stats.hits + stats.captures == len(lengths)
    assert stats.captures - stats.evictions == sum(b.open for b in stats.buckets) <= most


def test_gradients_add_up_over_buckets() -> None:
    model = Pooled()
    buckets = Buckets(model, (4, 8), dims={"x": 1}, lengths="lengths")
    batches = [torch.randn(2, n) for n in (3, 7, 2, 8)]
    for x in batches:
        buckets(x).sum().backward()
    ours = gradients(model)
    for x in batches:
        model(x, full(x)).sum().backward()
    torch.testing.assert_close(ours, gradients(model))


def test_an_input_gets_its_own_gradient_without_the_padding() -> None:
    buckets = Buckets(square, (8,), unpad=1)
    for length in (3, 5):
        x = torch.randn(2, length, requires_grad=True)
        y = x * 2
        buckets(y).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, 8 * x.detach())


def test_a_leaf_input_keeps_its_gradient_over_the_next_call() -> None:
    buckets = Buckets(square, (8,))
    first, second = torch.ones(1, 8, requires_grad=True), torch.full((1, 8), 3.0, requires_grad=True)
    buckets(first).sum().backward()
    buckets(second).sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    assert (first.grad.unique().tolist(), second.grad.unique().tolist()) == ([2.0], [6.0])


def test_without_grad_mode_a_call_only_replays_forward() -> None:
    buckets = Buckets(square, (8,), unpad=1)
    x = torch.randn(1, 5, requires_grad=True)
    buckets(x)
    with torch.no_grad():
        found = buckets(x)
    assert not found.requires_grad
    assert torch.equal(found, x * x)


# -- padding -----------------------------------------------------------------------------------------------


def test_positions_beyond_the_length_hold_the_pad_value() -> None:
    def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + 0, b + 0

    buckets = Buckets(both, (6,), pad={"b": -100})
    for length in (5, 2):
        a, b = buckets(torch.ones(1, length), torch.ones(1, length, dtype=torch.int64))
        assert a.tolist() == [[1.0] * length + [0.0] * (6 - length)]
        assert b.tolist() == [[1] * length + [-100] * (6 - length)]


def test_nested_arguments_and_keywords_are_named_by_their_path() -> None:
    def fn(batch: dict[str, Tensor], *, scale: float, weights: Tensor) -> Tensor:
        return batch["ids"] * scale + batch["rows"][:, None] + weights

    buckets = Buckets(fn, (4,), dims={"batch.ids": 1, "weights": 1}, pad={"weights": 7}, unpad=1)
    batch = {"ids": torch.ones(2, 3), "rows": torch.tensor([1.0, 2.0])}
    found = buckets(batch, scale=2.0, weights=torch.zeros(2, 3))
    assert found.tolist() == [[3.0] * 3, [4.0] * 3]


def test_lengths_are_filled_where_the_caller_leaves_them_out() -> None:
    def fn(x: Tensor, lengths: Tensor | None = None) -> Tensor:
        assert lengths is not None
        return lengths + 0 * x.sum().long()

    buckets = Buckets(fn, (4, 8), dims={"x": 1}, lengths="lengths")
    x = torch.ones(2, 3)
    assert buckets(x).tolist() == [3, 3]
    assert buckets(x[:, :2]).tolist() == [2, 2]
    assert buckets(torch.ones(2, 5), lengths=None).tolist() == [5, 5]
    assert Buckets(fn, (4,), dims={"x": 1}, lengths="lengths")(x, None).tolist() == [3, 3]
    given = Buckets(fn, (4,), dims={"x": 1}, lengths="lengths")
    assert given(x, torch.tensor([3, 1])).tolist() == [3, 1]
    assert given(x, torch.tensor([2, 3])).tolist() == [2, 3]


def test_inputs_need_not_be_contiguous() -> None:
    buckets = Buckets(square, (8,), unpad=1)
    for view in (torch.randn(5, 2).t(), torch.randn(2, 10)[:, ::2], torch.randn(1, 5).expand(2, 5)):
        assert torch.equal(buckets(view), view * view)


def test_a_host_number_that_follows_the_length_is_refused_not_frozen() -> None:
    """A2: ``max_seqlen`` as it was at the capture gave wrong attention silently."""

    def fn(x: Tensor, max_seqlen: int) -> Tensor:
        return x * max_seqlen

    buckets = Buckets(fn, (8,), dims={"x": 1})
    buckets(torch.ones(1, 5), 5)
    with pytest.raises(SignatureError, match=r"args\[1\]: 5 -> 6"):
        buckets(torch.ones(1, 6), 6)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_known_length_writes_in_place_and_reads_nothing_back() -> None:
    buckets = Buckets(Pooled(), (8,), dims={"x": 1}, lengths="lengths")
    x = torch.randn(2, 5)
    call = buckets._read((x,), {})
    buckets(x)
    bucket = buckets._buckets[8]
    addresses = [p.data_ptr() for p in bucket.places]
    with Operators() as seen:
        call.write(bucket.places)
    assert set(seen.names) <= {"aten::detach", "aten::slice", "aten::fill_", "aten::_foreach_copy_"}
    buckets(x[:, :2])
    assert [p.data_ptr() for p in bucket.places] == addresses


# -- lengths that have no bucket ---------------------------------------------------------------------------


def test_longer_than_the_last_edge_is_an_error_by_default() -> None:
    with pytest.raises(GraphError, match=r"length 9 is beyond the last edge 8: add an edge"):
        Buckets(square, (4, 8))(torch.ones(1, 9))


def test_longer_runs_eagerly_when_asked_and_is_counted() -> None:
    model = Pooled()
    buckets = Buckets(model, (4, 8), dims={"x": 1}, lengths="lengths", longer="eager")
    for length in (8, 9, 20):
        x = torch.randn(2, length)
        torch.testing.assert_close(buckets(x), model(x, full(x)))
    stats = buckets.stats()
    assert (stats.captures, stats.eager, stats.longest_eager) == (1, 2, 20)
    assert "2 calls ran eagerly, the longest with 20 positions" in str(stats)


def test_the_off_switch_runs_every_call_unpadded_under_autocast() -> None:
    model = nn.Linear(3, 3)
    buckets = Buckets(model, (8,), policy="eager", autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    found = buckets(torch.randn(2, 3))
    assert (found.shape, found.dtype) == ((2, 3), torch.bfloat16)
    assert (buckets.stats().captures, buckets.stats().eager) == (0, 1)


# -- captures, evictions -----------------------------------------------------------------------------------


def test_the_least_recently_used_graph_is_closed_and_its_return_warns_once() -> None:
    buckets = Buckets(square, (2, 4, 8), max_graphs=2, name="lm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (2, 4, 2, 8, 2):  # 8 displaces 4
            buckets(torch.ones(1, length))
    assert [b.open for b in buckets.stats().buckets] == [True, False, True]
    with pytest.warns(RuntimeWarning, match=r"lm: bucket 4 was evicted and is captured again.*max_graphs=2"):
        buckets(torch.ones(1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buckets(torch.ones(1, 8))
    stats = {b.edge: b for b in buckets.stats().buckets}
    assert [(stats[e].captures, stats[e].evictions) for e in (2, 4, 8)] == [(1, 1), (2, 0 + 1), (2, 1)]


def test_the_warning_points_at_the_call() -> None:
    buckets = Buckets(square, (2, 4), max_graphs=1)
    buckets(torch.ones(1, 2))
    buckets(torch.ones(1, 4))
    with pytest.warns(RuntimeWarning) as caught:
        buckets(torch.ones(1, 2))
    assert caught[0].filename == __file__


def test_prepare_captures_all_buckets_the_largest_first() -> None:
    sizes: list[int] = []

    def fn(x: Tensor) -> Tensor:
        sizes.append(x.shape[1])
        return x + 1

    buckets = Buckets(fn, (2, 4, 8))
    buckets.prepare(torch.ones(1, 5))
    assert list(dict.fromkeys(sizes)) == [8, 4, 2]
    for length in range(1, 9):
        buckets(torch.ones(1, length))
    assert (buckets.stats().captures, buckets.stats().hits) == (3, 8)


def test_another_batch_size_or_dtype_is_refused_old_to_new() -> None:
    buckets = Buckets(square, (4,))
    buckets(torch.ones(2, 3))
    with pytest.raises(SignatureError, match=r"float32\[2, 4\] on cpu -> float32\[3, 4\] on cpu"):
        buckets(torch.ones(3, 3))
    with pytest.raises(SignatureError, match=r"float32.*-> float64"):
        buckets(torch.ones(2, 3, dtype=torch.float64))


def test_a_backward_after_another_buckets_forward_is_refused() -> None:
    buckets = Buckets(Pooled(), (4, 8), dims={"x": 1}, lengths="lengths")
    early = buckets(torch.ones(1, 3))
    buckets(torch.ones(1, 6))
    with pytest.raises(StaleReplayError):
        early.sum().backward()


def test_a_failed_capture_leaves_the_other_buckets_usable() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * x.sum().item() if x.shape[1] == 8 else x * x

    buckets = Buckets(fn, (4, 8))
    buckets(torch.ones(1, 3))
    for _ in range(2):
        with pytest.raises(GraphCaptureError, match="_local_scalar_dense"):
            buckets(torch.ones(1, 7))
    assert buckets(torch.full((1, 4), 3.0)).tolist() == [[9.0] * 4]
    assert buckets.stats().captures == 1


# -- memory ------------------------------------------------------------------------------------------------


def hungry(backend: MeteredBackend) -> Any:
    def fn(x: Tensor) -> Tensor:
        backend.needs = 100 * x.shape[1]
        return x * x

    return fn


def test_a_bucket_that_cannot_fit_is_refused_before_its_capture() -> None:
    backend = MeteredBackend()
    buckets = Buckets(hungry(backend), (4, 8, 16), pool=GraphPool(backend, max_bytes=1000))
    buckets(torch.ones(1, 8))
    made = backend.captures
    with pytest.raises(BudgetError, match=r"fn\[16\] needs about 1600 bytes.*of 1000"):
        buckets(torch.ones(1, 16))
    assert backend.captures == made
    assert [b.open for b in buckets.stats().buckets] == [False, True, False]


def test_smaller_buckets_use_the_memory_of_the_largest() -> None:
    backend = MeteredBackend()
    buckets = Buckets(hungry(backend), (4, 8, 16), pool=GraphPool(backend, max_bytes=1600))
    buckets.prepare(torch.ones(1, 16))
    stats = buckets.stats()
    assert (stats.captures, stats.evictions, stats.bytes) == (3, 0, 1600)
    assert [b.bytes for b in stats.buckets] == [0, 0, 1600]
    assert [b.predicted_bytes for b in stats.buckets] == [400, 800, 1600]


def test_the_budget_closes_old_buckets_until_a_new_one_fits() -> None:
    backend = MeteredBackend(keeps=700)
    buckets = Buckets(hungry(backend), (4, 8, 16), pool=GraphPool(backend, max_bytes=1700))
    for length in (16, 8, 4):  # 1600 bytes, 700 of them kept; then 1400 kept: the last would need 200 more
        buckets(torch.ones(1, length))
    stats = buckets.stats()
    assert [(b.open, b.evictions) for b in stats.buckets] == [(True, 0), (True, 0), (False, 1)]
    assert stats.bytes == 1600


# -- a training step ---------------------------------------------------------------------------------------


class Loss(nn.Module):
    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.model = Attention(capacity)

    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(ids, lengths)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total, (labels != -100).sum()


def batches(count: int, longest: int) -> list[tuple[Tensor, Tensor]]:
    draw = random.Random(3)
    lengths = [draw.randint(1, longest) for _ in range(count)]
    return [(torch.randint(0, VOCABULARY, (2, n)), torch.randint(0, VOCABULARY, (2, n))) for n in lengths]


def stepped(step: TrainStep, edges: tuple[int, ...]) -> Buckets:
    return Buckets(step, edges, dims={"ids": 1, "labels": 1}, pad={"labels": -100}, lengths="lengths")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_training_step_over_buckets_equals_the_eager_loop(accumulate: int) -> None:
    """New buckets also come up between micro-batches of one update."""
    ours = Loss(16)
    theirs = Loss(16)
    theirs.load_state_dict(ours.state_dict())
    step = TrainStep(ours, torch.optim.AdamW(ours.parameters(), 1e-2), accumulate=accumulate, max_graphs=3)
    buckets, adam = stepped(step, (4, 8, 16)), torch.optim.AdamW(theirs.parameters(), 1e-2)
    data = batches(6 * accumulate, 16)
    for at in range(0, len(data), accumulate):
        sums = []
        for ids, labels in data[at : at + accumulate]:
            buckets.micro(ids, labels)
            total, count = theirs(ids, labels, full(ids))
            total.backward()
            sums.append((total.detach(), count))
        found = buckets.update()
        counted = torch.stack([c for _, c in sums]).sum()
        for p in theirs.parameters():
            assert p.grad is not None
            p.grad /= counted
        adam.step()
        adam.zero_grad()
        torch.testing.assert_close(found.loss, torch.stack([t for t, _ in sums]).sum() / counted)
        assert found.count == counted
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert (buckets.stats().captures, step.stats().captures) == (3, 3)
    step.close()


def test_preparing_a_step_trains_nothing() -> None:
    model = Loss(8)
    before = copy.deepcopy(model.state_dict())
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-2), max_graphs=2)
    buckets = stepped(step, (4, 8))
    buckets.prepare(*batches(1, 8)[0])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for batch in batches(5, 8):
        buckets(*batch)
    assert (buckets.stats().captures, buckets.stats().hits, step.stats().captures) == (2, 5, 2)
    step.close()


def test_a_bucket_that_other_batches_of_the_step_displaced_is_counted() -> None:
    step = a_step()
    buckets = stepped(step, (4, 8))
    ids = torch.ones(2, 8, dtype=torch.int64)
    buckets(ids, ids)
    for width in (5, 6):  # not through the buckets; the step holds two graphs
        step(ids[:, :width], ids[:, :width], full(ids[:, :width]))
    buckets(ids, ids)
    assert [(b.edge, b.captures, b.hits) for b in buckets.stats().buckets] == [(4, 0, 0), (8, 2, 1)]
    assert step.captures == 4
    step.close()


def a_step(max_graphs: int = 2) -> TrainStep:
    model = Loss(8)
    return TrainStep(model, torch.optim.AdamW(model.parameters()), max_graphs=max_graphs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 5}, r"\['max_bytes'\] belong to the TrainStep"),
        ({"copy_outputs": False}, r"\['copy_outputs'\] belong to the TrainStep"),
        ({"longer": "eager"}, "no eager way"),
        ({"policy": "eager"}, "no eager way"),
        ({"max_graphs": 2}, "its own max_graphs"),
        ({"unpad": 0}, "no outputs"),
        ({"edges": (2, 4, 8)}, r"3 buckets need TrainStep\(max_graphs=3\)"),
    ],
)
def test_options_of_a_step_stay_with_the_step(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Buckets(a_step(), **{"edges": (4, 8), **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "pack"}, "policy='pack'"),
        ({"longer": "cut"}, "longer='cut'"),
        ({"max_graphs": 0}, "at least 1"),
        ({"max_bytes": 5, "pool": GraphPool("cpu")}, "leave the pool out"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Buckets(square, (4, 8), **options)


def test_only_a_step_has_micro_batches() -> None:
    with pytest.raises(GraphError, match="no TrainStep"):
        Buckets(square, (4,)).micro(torch.ones(1, 2))
    with pytest.raises(GraphError, match="no TrainStep"):
        Buckets(square, (4,)).update()


# -- reports and the end -----------------------------------------------------------------------------------


def test_stats_tell_hits_padding_and_print() -> None:
    buckets = Buckets(square, (4, 8), name="lm")
    for length in (3, 4, 6):
        buckets(torch.ones(2, length))
    stats = buckets.stats()
    small, large = stats.buckets
    assert (small.hits, small.captures, small.real, small.computed) == (1, 1, 14, 16)
    assert large.padding == pytest.approx(2 / 6)
    assert stats.padding == pytest.approx((32 - 26) / 26)
    assert (
        str(stats).splitlines()[0]
        == "lm on recorder: 1 hits, 2 captures, 0 evictions, padding 23.1%, 0.0 MiB"
    )
    read = json.loads(stats.to_json())
    assert (read["version"], read["buckets"][1]["edge"], read["name"]) == (1, 8, "lm")


def test_use_after_close_is_refused() -> None:
    with Buckets(square, (4,)) as buckets:
        buckets(torch.ones(1, 2))
    with pytest.raises(ClosedError):
        buckets(torch.ones(1, 2))
    assert not any(b.open for b in buckets.stats().buckets)
