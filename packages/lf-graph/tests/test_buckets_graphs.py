"""Buckets: lengths without a bucket, captures and evictions, the memory budget, reports and the end."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from bucket_cases import Pooled, full, square
from metered import MeteredBackend
from torch import Tensor, nn

from lf_graph import (
    Buckets,
    BudgetError,
    ClosedError,
    GraphCaptureError,
    GraphError,
    GraphPool,
    SignatureError,
    StaleReplayError,
)

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
