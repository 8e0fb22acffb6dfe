"""Packing: every token once and in order, against references written out in plain loops."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf_iouring import PlanError
from lf_iouring.packing import pack, varlen

DOCUMENTS = ([1, 2, 3], [4, 5], [], list(range(6, 21)))  # case A10
LENGTHS = st.lists(st.integers(0, 40), max_size=60)


def filled(packing, documents, capacity):
    """Rows as lists of (document, token index, token)."""
    rows = [[] for _ in range(packing.rows)]
    columns = (packing.row, packing.place, packing.item, packing.start, packing.length)
    for row, place, item, start, length in zip(*(column.tolist() for column in columns), strict=True):
        assert len(rows[row]) == place, "a gap or an overlap"
        rows[row] += [(item, i, documents[item][i]) for i in range(start, start + length)]
    assert all(len(row) <= capacity for row in rows)
    return rows


def reference_rows(lengths, capacity):
    """First fit decreasing, one piece at a time."""
    pieces = [
        (start, min(capacity, length - start), item)
        for item, length in enumerate(lengths)
        for start in range(0, length, capacity)
    ]
    rows = []
    for start, length, item in sorted(pieces, key=lambda piece: -piece[1]):
        for row in rows:
            if sum(piece[2] for piece in row) + length <= capacity:
                row.append((item, start, length))
                break
        else:
            rows.append([(item, start, length)])
    return rows


def reference_varlen(rows, capacity):
    """cu_seqlens, positions, segments and targets of rows of (document, token index, token)."""
    cu, positions, segments, targets = [0], [], [], []
    for row in rows:
        segment = position = 0
        for at, (item, index, _) in enumerate(row):
            follows = at > 0 and row[at - 1][:2] == (item, index - 1)
            if not follows:
                segment, position = segment + 1, 0
                if at:
                    cu.append(len(positions))
            positions.append(position)
            segments.append(segment)
            targets.append(int(position > 0))
            position += 1
        pad = capacity - len(row)
        if row and pad:
            cu.append(len(positions))
        positions, segments, targets = positions + [0] * pad, segments + [0] * pad, targets + [0] * pad
        cu.append(len(positions))
    return cu, positions, segments, targets


def check_varlen(packing, rows, capacity):
    found = varlen(packing, capacity)
    cu, positions, segments, targets = reference_varlen(rows, capacity)
    assert found.cu_seqlens.tolist() == cu
    assert found.position_ids.reshape(-1).tolist() == positions
    assert found.segment_ids.reshape(-1).tolist() == segments
    assert found.targets.reshape(-1).tolist() == targets
    assert found.max_seqlen == max(b - a for a, b in itertools.pairwise(cu))
    assert found.lengths.tolist() == [len(row) for row in rows]
    for array in (found.cu_seqlens, found.position_ids, found.segment_ids):
        assert array.dtype == np.int32


def test_the_documents_of_case_a10():
    packing = pack([len(document) for document in DOCUMENTS], 8)
    rows = filled(packing, DOCUMENTS, 8)
    assert [[token for _, _, token in row] for row in rows] == [
        [1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11, 12, 13],
        [14, 15, 16, 17, 18, 19, 20],
    ]
    found = varlen(packing, 8)
    assert found.cu_seqlens.tolist() == [0, 3, 5, 8, 16, 23, 24]
    assert found.position_ids[0].tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert found.segment_ids[0].tolist() == [1, 1, 1, 2, 2, 0, 0, 0]
    assert found.targets[0].tolist() == [0, 1, 1, 0, 1, 0, 0, 0]
    check_varlen(packing, rows, 8)


@given(LENGTHS, st.integers(1, 24), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_token_appears_once_and_in_order_within_its_document(lengths, capacity, random, shuffled):
    documents = [list(range(length)) for length in lengths]
    expected = reference_rows(lengths, capacity)
    keys = np.array(random.sample(range(1000), len(expected)), np.int64) if shuffled else None
    packing = pack(lengths, capacity, keys)
    rows = filled(packing, documents, capacity)
    seen = [[] for _ in documents]
    for row in rows:
        for item, index, _ in row:
            seen[item].append(index)
    assert seen == documents
    if rows:
        check_varlen(packing, rows, capacity)


@given(LENGTHS, st.integers(1, 24))
@settings(max_examples=200, deadline=None)
def test_rows_are_those_of_first_fit_decreasing(lengths, capacity):
    packing = pack(lengths, capacity)
    found = [[] for _ in range(packing.rows)]
    columns = (packing.row, packing.item, packing.start, packing.length)
    for row, *segment in zip(*(column.tolist() for column in columns), strict=True):
        found[row].append(tuple(segment))
    assert sorted(found) == sorted(reference_rows(lengths, capacity))


@given(LENGTHS, st.integers(1, 24), st.integers(0, 8), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_a_part_holds_its_rows_and_empty_ones_beyond_the_end(lengths, capacity, first, count):
    documents = [list(range(length)) for length in lengths]
    packing = pack(lengths, capacity)
    rows = filled(packing, documents, capacity) + [[]] * (first + count)
    part = packing.part(first, first + count)
    assert filled(part, documents, capacity) == rows[first : first + count]
    check_varlen(part, rows[first : first + count], capacity)


@pytest.mark.parametrize(("lengths", "capacity"), [([1], 0), ([-1], 4)])
def test_what_cannot_be_packed_is_refused(lengths, capacity):
    with pytest.raises(PlanError, match="packing"):
        pack(lengths, capacity)
