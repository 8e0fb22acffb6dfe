"""Flat gradient buffers: the sums of dense all-reduces, tables in them by rows."""

from __future__ import annotations

from typing import Any

import comm_flat_jobs as jobs
import pytest
import torch
from comm_ranks import Ranks

from lf_comm import BufferReducer

MIXED = {"table": torch.bfloat16, "bias": torch.bfloat16}


@pytest.mark.parametrize("options", [{}, {"dtypes": MIXED}, {"bucket_bytes": 4096}, {"only": ["table"]}])
def test_two_ranks_get_the_dense_sums_bit_for_bit(ranks: Ranks, options: dict[str, Any]) -> None:
    stock = ranks.call(jobs.summed, 2, how="stock", **options)
    ours = ranks.call(jobs.summed, 2, how="ours", **options)

    assert [answer[:2] for answer in ours] == [answer[:2] for answer in stock]
    for _, _, paths, sent in ours:
        assert paths["table"] in ("gather", "union", "split")
        assert ("experts" in paths) == ("only" not in options)
        assert sent < 3 * sum(torch.Size(s).numel() * 4 for s in jobs.SHAPES.values())


def test_four_ranks_have_the_same_sums(ranks: Ranks) -> None:
    answers = ranks.call(jobs.summed, 4, how="ours")

    assert all(answer[:2] == answers[0][:2] for answer in answers)


def test_one_rank_sends_nothing(ranks: Ranks) -> None:
    (stock,) = ranks.call(jobs.summed, 1, how="stock")
    (ours,) = ranks.call(jobs.summed, 1, how="ours")

    assert ours[:2] == stock[:2]
    assert ours[3] == 0


def test_ranks_that_differ_are_told_and_nothing_is_summed(ranks: Ranks) -> None:
    assert all("ranks differ" in said for said in ranks.call(jobs.disagreement, 2))


def test_what_cannot_be_meant_is_refused() -> None:
    buffers, views = jobs.flat()
    with pytest.raises(RuntimeError, match="bind"):
        BufferReducer()(buffers)
    with pytest.raises(ValueError, match="no gradient of a parameter tabel"):
        BufferReducer(only="tabel").bind(views)
    with pytest.raises(TypeError, match="table: its gradient is not contiguous"):
        BufferReducer().bind({"table": views["table"].t()})
    reducer = BufferReducer()
    reducer.bind({**views, "elsewhere": torch.zeros(4, 4)})
    with pytest.raises(ValueError, match="elsewhere: its gradient lies in none of the buffers"):
        reducer(buffers)
    with pytest.raises(ValueError, match="bucket_bytes=0"):
        BufferReducer(bucket_bytes=0)
