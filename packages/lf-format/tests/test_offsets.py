"""Case A1: offsets, sums and merges beyond 2**31 and 2**32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lf_format as lff
from lf_format._index import cumulative, plane_maps

Write = Callable[..., Path]


@pytest.mark.parametrize("boundary", [2**31, 2**32, 2**40])
@pytest.mark.parametrize(("before", "first"), [(128, 24), (64, 8), (128, 32)], ids=["-16", "+16", "0"])
def test_a1_records_around_a_boundary_read_by_index_and_shuffled(
    write: Write, boundary: int, before: int, first: int
) -> None:
    records = [np.full(first, 1), np.full(16, 500), np.full(16, 65_000)]
    path = write(records, vocab_size=65_536, buckets=(64,), _base_offset=boundary - before)
    with lff.Reader(path) as reader:
        second = int(reader.extents([1]).offset[0])
        assert second - boundary == {(128, 24): -16, (64, 8): 16, (128, 32): 0}[before, first]
        for i in (2, 0, 1):
            assert reader.record(i).tokens.tolist() == records[i].tolist()
    assert lff.verify(path).ok


def test_a1_sums_of_lengths_do_not_wrap() -> None:
    lengths = np.full(40_000, 65_535, np.int32)
    assert int(cumulative(lengths)[-1]) == 40_000 * 65_535 > 2**31
    fields = (lff.Field("tokens", "tokens", "uint32", "input"),)
    maps, raw = plane_maps(fields, [lengths.astype("<u4")], np.array([0, 40_000]))
    assert int(maps[0].within[-1]) == int(raw[0]) == 4 * 40_000 * 65_535 > 2**32


@pytest.mark.parametrize(
    ("field", "steps", "nbytes"),
    [
        (lff.Field.tokens(dtype="uint32"), 2**28, 2**30),
        (lff.Field.bits("mask"), 2**32 - 1, 2**29),
        (lff.Field.tensor("x", "float64", (-1, 2**10)), 2**17, 2**30),
    ],
    ids=["tokens", "bits", "tensor"],
)
def test_a1_sizes_of_the_largest_fields_do_not_wrap(field: lff.Field, steps: int, nbytes: int) -> None:
    counts = np.full(5, steps, "<u4")
    assert field.nbytes(counts).tolist() == [nbytes] * 5
    assert int(cumulative(field.nbytes(counts))[-1]) == 5 * nbytes > 2**31
    assert field.nbytes_of(steps) == nbytes
