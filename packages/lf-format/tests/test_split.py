"""Pure decisions: bucket edges, pieces, held-out documents."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lf_format as lff
from lf_format._split import bucket_edges, choose_eval, document_key, pieces


@pytest.mark.parametrize(
    ("arguments", "edges"),
    [
        ((256,), (16, 32, 64, 128, 256)),
        ((100,), (25, 50, 100)),
        ((16,), (16,)),
        ((10,), (10,)),
        ((256, 100), (128, 256)),
        ((2048, 512, 128), (512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048)),
        ((300, None, 128), (128, 256, 300)),
        ((300, 100, 128), (128, 256, 300)),
        ((100, None, 128), (100,)),
    ],
    ids=repr,
)
def test_bucket_edges(arguments: tuple[int, ...], edges: tuple[int, ...]) -> None:
    assert bucket_edges(*arguments) == edges


@pytest.mark.parametrize(
    "arguments", [(0,), (16, 17), (16, 0), (2**28 + 1,), (64, None, 0), (64, 16, -1)], ids=repr
)
def test_edges_that_do_not_fit_together_are_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(lff.FormatError):
        bucket_edges(*arguments)


@given(max_len=st.integers(1, 5000), min_len=st.integers(1, 5000), size=st.none() | st.integers(1, 600))
def test_edges_increase_and_end_at_the_longest_record(max_len: int, min_len: int, size: int | None) -> None:
    edges = bucket_edges(max_len, min(min_len, max_len), size)
    assert edges[-1] == max_len
    assert list(edges) == sorted(set(edges))
    assert edges[0] >= min(min_len, max_len)


@given(length=st.integers(1, 1000), max_len=st.integers(1, 100))
def test_pieces_cover_a_document_once_in_order(length: int, max_len: int) -> None:
    parts = pieces(length, max_len)
    assert [i for start, end in parts for i in range(start, end)] == list(range(length))
    assert all(end - start == max_len for start, end in parts[:-1])


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=2, max_size=60),
    fraction=st.floats(0, 0.99),
    seed=st.integers(0, 100),
)
def test_the_share_is_reached_unless_that_would_leave_no_training_data(
    sizes: list[int], fraction: float, seed: int
) -> None:
    tokens = np.array(sizes)
    keys = [document_key(seed, bytes([i])) for i in range(len(sizes))]
    held = choose_eval(keys, tokens, fraction)
    target = math.ceil(fraction * tokens.sum())
    assert held.sum() < len(sizes)
    assert tokens[held].sum() >= target or held.sum() == len(sizes) - 1
    assert (held.sum() == 0) == (target == 0)


def test_one_huge_document_does_not_swallow_the_share() -> None:
    held = choose_eval([0, 1, 2, 3, 4, 5], np.array([10_000, 100, 100, 100, 100, 100]), 0.02)
    assert held.tolist() == [False, True, True, True, False, False]


def test_the_choice_depends_on_the_seed_and_not_on_the_order() -> None:
    contents = [bytes([i]) * 3 for i in range(100)]
    tokens = np.full(100, 3)

    def chosen(seed: int, order: list[bytes]) -> set[bytes]:
        held = choose_eval([document_key(seed, c) for c in order], tokens, 0.1)
        return {c for c, h in zip(order, held, strict=True) if h}

    assert chosen(0, contents) == chosen(0, contents[::-1]) != chosen(1, contents)
    assert len(chosen(0, contents)) == 10
