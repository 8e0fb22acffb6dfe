"""stats: padding and bucket edges as pure functions, and the command."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lf_format as lff
from lf_format import cli


def test_summary_of_known_lengths() -> None:
    summary = lff.summarize(np.array([1, 2, 3, 10]))
    assert (summary.records, summary.tokens, summary.shortest, summary.longest) == (4, 16, 1, 10)
    assert (summary.mean, summary.p50, summary.p99) == (4.0, 3, 10)
    assert lff.summarize(np.zeros(0, np.uint32)).records == 0


def test_padding_counts_positions_up_to_the_edge() -> None:
    found = lff.bucket_set(np.array([1, 4, 5, 8]), (4, 8))
    assert (found.records, found.tokens) == ((2, 2), (5, 13))
    assert found.padding == pytest.approx(1 - 18 / 24)


@pytest.mark.parametrize("edges", [(), (0, 8), (8, 8), (8, 4), (4,)], ids=repr)
def test_edges_that_hold_no_buckets_are_refused(edges: tuple[int, ...]) -> None:
    with pytest.raises(lff.FormatError):
        lff.bucket_set(np.array([5]), edges)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    count=st.integers(1, 4),
    multiple=st.sampled_from([1, 4]),
)
def test_suggested_buckets_are_the_best_of_all(lengths: list[int], count: int, multiple: int) -> None:
    array = np.array(lengths)
    candidates = sorted({-(-n // multiple) * multiple for n in lengths})
    top = candidates[-1]
    choices = itertools.combinations(candidates[:-1], min(count, len(candidates)) - 1)
    best = min(lff.bucket_set(array, (*choice, top)).padding for choice in choices)
    edges = lff.suggest_buckets(array, count, multiple)
    assert len(edges) <= count
    assert lff.bucket_set(array, edges).padding == pytest.approx(best)


def test_many_distinct_lengths_are_thinned_but_hold_every_record() -> None:
    lengths = np.random.default_rng(0).integers(1, 100_000, 5000)
    edges = lff.suggest_buckets(lengths, 8)
    assert edges[-1] == lengths.max()
    assert lff.bucket_set(lengths, edges).padding < lff.bucket_set(lengths, (50_000, 100_000)).padding


def test_stats_command_prints_both_sets(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", "--json", "--multiple", "1", str(sample)]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["lengths"]["records"] == 64
    assert value["buckets"]["edges"] == [8, 16, 64]
    assert value["suggested"]["padding"] < value["buckets"]["padding"]
    assert cli.main(["stats", str(sample)]) == 0
    assert "padding" in capsys.readouterr().out


def test_stats_of_an_empty_file(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", str(write([]))]) == 0
    assert "0 records" in capsys.readouterr().out


def test_head_shows_the_first_records(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["head", "-n", "2", "--tokens", "3", "--json", str(sample)]) == 0
    rows = json.loads(capsys.readouterr().out)["records"]
    with lff.Reader(sample) as reader:
        assert [row["tokens"] for row in rows] == [reader.record(i).tokens[:3].tolist() for i in range(2)]
