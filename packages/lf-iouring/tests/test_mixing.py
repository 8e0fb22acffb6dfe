"""Exact mixing: shares, statelessness, and loaders over several data sets."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf_iouring import PlanError
from lf_iouring.mixing import Mixture

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@given(WEIGHTS)
@settings(max_examples=300, deadline=None)
def test_every_prefix_is_within_one_of_the_exact_share(weights):
    mixture = Mixture(weights)
    source, _ = mixture.at(np.arange(2 * mixture.period + 3))
    draws = np.arange(1, len(source) + 1)
    for number, weight in enumerate(mixture.weights):
        behind = draws * weight - np.cumsum(source == number) * mixture.period
        assert np.abs(behind).max() < mixture.period


@given(WEIGHTS, st.lists(st.integers(0, 5000), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_a_draw_is_computed_from_its_number_alone(weights, draws):
    mixture = Mixture(weights)
    source, turn = mixture.at(np.arange(5001))
    for number in range(len(mixture.weights)):
        assert np.array_equal(turn[source == number], np.arange(np.count_nonzero(source == number)))
    some_source, some_turn = mixture.at(np.array(draws))
    assert np.array_equal(some_source, source[draws])
    assert np.array_equal(some_turn, turn[draws])


def test_far_draws_are_exact():
    source, turn = Mixture([7, 2, 1]).at(np.array([10**15, 10**15 + 9]))
    first, _ = Mixture([7, 2, 1]).at(np.array([0, 9]))
    assert np.array_equal(source, first)
    assert turn[0] == 10**14 * (7, 2, 1)[source[0]]


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([10, 20], (1, 2)),
        ([Fraction(1, 3), Fraction(2, 3)], (1, 2)),
        ([5], (1,)),
    ],
)
def test_weights_become_whole_numbers(weights, whole):
    assert Mixture(weights).weights == whole


@pytest.mark.parametrize("weights", [[], [0], [1, -1], [float("nan")], [float("inf")], [1, 65536], ["x"]])
def test_weights_that_cannot_be_exact_are_refused(weights):
    with pytest.raises(PlanError, match="weights"):
        Mixture(weights)
