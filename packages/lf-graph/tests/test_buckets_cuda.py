"""Buckets, pools and the eager fallback on a CUDA device: what the recorder cannot show."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lf_graph
from lf_graph import (
    Buckets,
    BudgetError,
    Chain,
    DynamicMaskBuffer,
    Eager,
    GraphPool,
    Piece,
    TrainStep,
    capture,
)

pytestmark = pytest.mark.gpu
WIDTH, HEADS, VOCABULARY = 64, 4, 128


@pytest.fixture(autouse=True)
def _fp32_matmuls() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    lf_graph.close()


class Attention(nn.Module):
    """Masked self-attention over token ids [B, T] -> [B, T, vocabulary]."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.mask = DynamicMaskBuffer(capacity, batch=2, causal=False, device="cuda")
        self.cuda()

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        b, t = ids.shape
        q, k, v = self.qkv(self.embed(ids)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask.write(lengths, t))
        return self.head(mixed.transpose(1, 2).reshape(b, t, WIDTH))


class Loss(nn.Module):
    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.model = Attention(capacity)

    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(ids, lengths)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total, (labels != -100).sum()


def full(x: Tensor) -> Tensor:
    return torch.full((x.shape[0],), x.shape[1], device="cuda")


def tokens(length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, length), device="cuda")


def test_500_lengths_make_5_captures_and_equal_the_unpadded_model() -> None:
    model, draw = Attention(512), random.Random(1)
    buckets = Buckets(model, (32, 64, 128, 256, 512), dims={"ids": 1}, lengths="lengths", unpad=1)
    lengths = [512, 200, 100, 50, 20, *(draw.randint(1, 512) for _ in range(495))]
    for i, length in enumerate(lengths):
        ids = tokens(length)
        out = buckets(ids)
        if i % 10 == 0:
            out.sum().backward()
            ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            expected = model(ids, full(ids))
            expected.sum().backward()
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
            for a, p in zip(ours, model.parameters(), strict=True):
                torch.testing.assert_close(a, p.grad, rtol=1e-3, atol=1e-3)
            model.zero_grad()
    stats = buckets.stats()
    assert (stats.captures, stats.hits, stats.evictions, stats.eager) == (5, 495, 0, 0)


def test_known_lengths_wait_for_nothing_and_keep_memory_steady() -> None:
    model = Loss(256)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-3), accumulate=2, max_graphs=3)
    buckets = Buckets(
        step, (64, 128, 256), dims={"ids": 1, "labels": 1}, pad={"labels": -100}, lengths="lengths"
    )
    buckets.prepare(tokens(256), tokens(256))
    batches = [(tokens(n), tokens(n)) for n in (60, 256, 130, 1, 128, 64)]
    for ids, labels in batches[:2]:
        buckets.micro(ids, labels)
    buckets.update()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            for first, second in (batches[:2], batches[2:4], batches[4:]):
                buckets.micro(*first)
                buckets.micro(*second)
                buckets.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == before
    assert buckets.stats().captures == 3
    step.close()


def test_a_training_step_over_buckets_equals_the_eager_loop() -> None:
    ours, theirs = Loss(128), Loss(128)
    step = TrainStep(ours, torch.optim.AdamW(ours.parameters(), 1e-3), accumulate=2, max_graphs=3)
    buckets = Buckets(
        step, (32, 64, 128), dims={"ids": 1, "labels": 1}, pad={"labels": -100}, lengths="lengths"
    )
    adam = torch.optim.AdamW(theirs.parameters(), 1e-3)
    draw = random.Random(2)
    for _ in range(8):
        counts = []
        for _ in range(2):
            length = draw.randint(1, 128)
            ids, labels = tokens(length), tokens(length)
            buckets.micro(ids, labels)
            total, count = theirs(ids, labels, full(ids))
            total.backward()
            counts.append(count)
            del ids, labels  # freed while the step may not have read them yet
        buckets.update()
        for p in theirs.parameters():
            assert p.grad is not None
            p.grad /= torch.stack(counts).sum()
        adam.step()
        adam.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4)
    step.close()


def block(width: int = 512) -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).cuda()


def test_smaller_buckets_share_the_memory_of_the_largest() -> None:
    buckets = Buckets(block(), (1024, 2048, 4096))
    buckets.prepare(torch.randn(8, 4096, 512, device="cuda"))
    small, middle, large = buckets.stats().buckets
    assert large.predicted_bytes > middle.predicted_bytes > small.predicted_bytes > 0
    assert large.bytes > 0
    # each bucket keeps its output and seeds; what is saved for the backward lies in the memory of the largest
    assert middle.bytes < middle.predicted_bytes
    assert small.bytes + middle.bytes < large.bytes


def test_a_budget_refuses_before_the_capture_and_reserves_nothing() -> None:
    buckets = Buckets(block(), (64, 8192), max_bytes=128 << 20)
    buckets(torch.randn(8, 64, 512, device="cuda"))
    used = buckets.stats().bytes
    with pytest.raises(BudgetError, match="graph memory"):
        buckets(torch.randn(8, 8192, 512, device="cuda"))
    assert buckets.stats().bytes == used
    buckets(torch.randn(8, 60, 512, device="cuda"))
    assert buckets.stats().hits == 1


def test_an_evicted_bucket_and_an_emptied_pool_can_be_captured_again() -> None:
    """The allocator refuses a pool handle whose last graph is gone; the pool must take a new one."""
    model = block(64)
    buckets = Buckets(model, (16, 32), max_graphs=1, unpad=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # captured again, as it must be here
        for length in (16, 32, 16, 32):
            x = torch.randn(2, length, 64, device="cuda")
            torch.testing.assert_close(buckets(x), model(x), rtol=1e-4, atol=1e-5)
    assert buckets.stats().evictions == 3
    pool = GraphPool("cuda")
    for _ in range(3):
        captured = capture(model, torch.randn(2, 64, device="cuda"), pool=pool)
        captured(torch.randn(2, 64, device="cuda")).sum().backward()
        captured.close()
    dropped = capture(model, torch.randn(2, 64, device="cuda"), pool=pool)
    del dropped
    gc.collect()
    capture(model, torch.randn(2, 64, device="cuda"), pool=pool).close()


def test_a_failed_capture_in_a_pool_that_others_use_leaves_them_usable() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * x.sum().item() if x.shape[1] == 32 else x * x

    buckets = Buckets(fn, (16, 32))
    x = torch.randn(2, 16, device="cuda")
    buckets(x)
    for _ in range(3):
        with pytest.raises(lf_graph.GraphCaptureError):
            buckets(torch.randn(2, 32, device="cuda"))
    assert torch.equal(buckets(x), x * x)


def test_a_fallback_runs_eagerly_and_says_why() -> None:
    captured = capture(lambda x: x * x.sum().item(), torch.ones(2, device="cuda"), fallback="eager")
    assert captured(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]
    assert (captured.stats().eager, bool(captured.reason)) == (1, True)


def test_poison_shows_a_stale_read_and_changes_no_correct_number() -> None:
    kept: list[Tensor] = []

    def keep(a: Tensor) -> Tensor:
        kept.append(a.detach())
        return a * 2

    gradients: list[Any] = []
    for poison in (True, False):
        torch.manual_seed(0)
        parts = [nn.Linear(64, 64).cuda() for _ in range(2)]
        elements = [
            Piece(parts[0], ("x",), ("a",)),
            Eager(keep, ("a",), ("b",)),
            Piece(parts[1], ("b",), ("y",)),
        ]
        chain = Chain(elements, ("x",), pool=GraphPool("cuda", poison=poison))
        chain.capture(torch.randn(4, 64, device="cuda"))
        torch.manual_seed(1)
        for _ in range(3):
            kept.clear()
            chain(torch.randn(4, 64, device="cuda")).square().sum().backward()
        assert bool(kept[0].isnan().all()) is poison
        gradients.append([p.grad for m in parts for p in m.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
