"""The stateless permutation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf_iouring import _permute
from lf_iouring._compiled import lib
from lf_iouring._permute import permute

WORD = st.integers(min_value=-(2**63), max_value=2**64 - 1)


def whole(n, **key):
    return permute(np.arange(n), n, **key)


@pytest.mark.parametrize("start", range(1, 5001, 1000))
def test_every_size_up_to_5000_is_a_bijection(start):
    for n in range(start, start + 1000):
        seen = np.zeros(n, bool)
        seen[whole(n, seed=n, epoch=1, stream=0)] = True
        assert seen.all(), n


@given(n=st.integers(1, 3000), seed=WORD, epoch=st.integers(0, 10**9), stream=st.integers(0, 2**33))
@settings(max_examples=60, deadline=None)
def test_any_key_gives_a_bijection(n, seed, epoch, stream):
    assert np.array_equal(np.sort(whole(n, seed=seed, epoch=epoch, stream=stream)), np.arange(n))


@pytest.mark.parametrize("n", [10**9, 2**31, 2**31 + 1, 2**32 + 3, 2**40, 2**62])
def test_large_domains_stay_inside_and_have_no_collisions(n):
    positions = np.unique(np.random.default_rng(0).integers(0, n, 200_000))
    images = permute(positions, n, seed=5, epoch=2, stream=1)
    assert images.min() >= 0
    assert images.max() < n
    assert len(np.unique(images)) == len(positions)
    halves = np.bincount((images > n // 2).astype(int)) / len(images)
    assert abs(halves[0] - 0.5) < 0.01


def test_a_position_asked_alone_equals_the_one_asked_in_a_crowd():
    n = 12_345
    all_at_once = whole(n, seed=3, epoch=4, stream=5)
    for position in (0, 1, 777, n - 1):
        assert permute(np.array([position]), n, seed=3, epoch=4, stream=5)[0] == all_at_once[position]


def test_seed_epoch_and_stream_each_change_the_order():
    base = whole(1000, seed=1, epoch=1, stream=1)
    for key in ({"seed": 2}, {"epoch": 2}, {"stream": 2}):
        other = whole(1000, **({"seed": 1, "epoch": 1, "stream": 1} | key))
        assert (base == other).mean() < 0.02
    swapped = whole(1000, seed=1, epoch=2, stream=0)
    assert (whole(1000, seed=2, epoch=1, stream=0) == swapped).mean() < 0.02


@pytest.mark.parametrize("n", [8, 24, 100])
def test_every_image_is_about_equally_likely(n):
    counts = np.zeros((n, n))
    for seed in range(2000):
        counts[np.arange(n), whole(n, seed=seed, epoch=0, stream=0)] += 1
    expected = 2000 / n
    chi_square = ((counts - expected) ** 2 / expected).sum() / (n - 1) ** 2
    assert chi_square < 1.6


def test_the_order_is_the_published_one():
    """The order is part of a saved position: changing it breaks every resume."""
    assert whole(10, seed=7, epoch=0, stream=0).tolist() == [1, 6, 3, 7, 5, 2, 4, 9, 8, 0]


@pytest.mark.skipif(lib is None, reason="no C module")
@given(
    n=st.integers(1, 2**62),
    seed=WORD,
    epoch=st.integers(0, 10**9),
    stream=st.integers(0, 2**41),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_c_and_python_permute_alike(n, seed, epoch, stream, data):
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), np.int64)
    keys = _permute.round_keys(seed, epoch, stream)
    expected = _permute._permuted(positions, n, max((n - 1).bit_length(), 2), keys)
    assert permute(positions, n, seed=seed, epoch=epoch, stream=stream).tolist() == expected.tolist()
