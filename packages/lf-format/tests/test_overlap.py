"""overlap: equal records and shared n-grams, against a plain reference, with any memory limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lf_format as lff
from lf_format import cli

Write = Callable[..., Path]
Ids = list[list[int]]


def grams(record: list[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(record[i : i + n]) for i in range(len(record) - n + 1)]


def in_file_order(path: Path) -> Ids:
    with lff.Reader(path) as reader:
        return [reader.record(i).tokens.tolist() for i in range(len(reader))]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    known=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), max_size=8),
    asked=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), max_size=8),
    ngram=st.integers(1, 6),
    memory=st.sampled_from([1, 400, 1 << 28]),
)
def test_overlap_agrees_with_sets_of_tuples(
    write: Write, known: Ids, asked: Ids, ngram: int, memory: int
) -> None:
    files = write(known, "a.loongbin"), write(asked, "b.loongbin")
    asked = in_file_order(files[1])
    report = lff.overlap(*files, ngram=ngram, threshold=0.5, memory=memory)
    there = {g for record in known for g in grams(record, ngram)}
    hits = [[g in there for g in grams(record, ngram)] for record in asked]
    equal = [record in known for record in asked]
    bad = [i for i, (e, h) in enumerate(zip(equal, hits, strict=True)) if e or (h and sum(h) >= 0.5 * len(h))]
    assert report.equal_records == sum(equal)
    assert (report.ngrams, report.common_ngrams) == (sum(map(len, hits)), sum(map(sum, hits)))
    assert report.contaminated == tuple(bad)
    assert report.passes == (1 if asked and memory > 400 else report.passes)


def test_the_memory_limit_costs_passes_not_results(write: Write) -> None:
    files = write([[1, 2, 3, 4]] * 3, "a.loongbin"), write([[1, 2, 3, 4]] * 9, "b.loongbin")
    small, large = (lff.overlap(*files, ngram=2, memory=m) for m in (1, 1 << 20))
    assert (small.passes, large.passes) == (9, 1)
    assert small.contaminated == large.contaminated == tuple(range(9))


def test_widths_of_ids_do_not_matter(write: Write) -> None:
    files = write([[1, 2, 3]], "a.loongbin", vocab_size=256), write([[1, 2, 3]], "b.loongbin", vocab_size=300)
    assert lff.overlap(*files, ngram=3).equal_records == 1


def test_different_tokenizers_are_refused(write: Write) -> None:
    other = lff.TokenizerInfo("other", "ff")
    files = write([[1]], "a.loongbin"), write([[1]], "b.loongbin", tokenizer=other)
    with pytest.raises(lff.FormatError, match="different tokenizers"):
        lff.overlap(*files)


@pytest.mark.parametrize(
    "bad", [{"ngram": 0}, {"threshold": 0.0}, {"threshold": 1.5}, {"memory": 0}], ids=repr
)
def test_arguments_out_of_range_are_refused(write: Write, bad: dict[str, float]) -> None:
    path = write([[1]])
    with pytest.raises(lff.FormatError, match="ngram, threshold"):
        lff.overlap(path, path, **bad)  # type: ignore[arg-type]


def test_overlap_command_exits_1_when_it_finds_something(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    train, clean = str(write([[1] * 20], "t.loongbin")), str(write([[2] * 20], "c.loongbin"))
    assert cli.main(["overlap", train, clean]) == 0
    assert "0 of 8 13-grams" in capsys.readouterr().out
    assert cli.main(["overlap", "--json", train, train]) == 1
    assert json.loads(capsys.readouterr().out)["contaminated"] == [0]
