"""Exact weighted mixing: which source the n-th draw comes from, and which of that source's draws it is."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from ._errors import PlanError
from ._permute import Ids

Weight = int | float | Fraction
MAX_PERIOD = 1 << 16  # draws after which the pattern repeats; it is kept as a table


class Mixture:
    """A periodic sequence of sources in which every prefix has each source within one of its exact share.

    The j-th draw of a source with weight w of W in all may come from draw floor(j W / w) on and has to come
    before ceil((j + 1) W / w); the earliest deadline goes first. Unit jobs that use the whole resource always
    meet such deadlines (proportionate fairness: Baruah, Cohen, Plaxton, Varvel, Algorithmica 1996). All of it
    is integer arithmetic, and any draw is computed from its number alone.

    Args:
        weights: one positive number a source; floats count as the decimal they print as.

    Attributes:
        weights: the same as integers without a common divisor.
        period: their sum; the pattern repeats after so many draws.

    Raises PlanError for weights that are not positive, or whose period exceeds MAX_PERIOD.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = _whole(weights)
        self.period = sum(self.weights)
        if self.period > MAX_PERIOD:
            raise PlanError(
                f"weights {self.weights} repeat after {self.period} draws only, more than {MAX_PERIOD}: round them"
            )
        self._source = _pattern(self.weights, self.period)
        self._turn = np.empty(self.period, np.int64)
        for source, weight in enumerate(self.weights):
            self._turn[self._source == source] = np.arange(weight)
        self._each = np.array(self.weights, np.int64)

    def at(self, draws: Ids) -> tuple[Ids, Ids]:
        """Source int64[k] of each of `draws` int64[k] (>= 0), and how many draws that source had before."""
        rounds, place = np.divmod(draws, self.period)
        source = self._source[place]
        return source, rounds * self._each[source] + self._turn[place]


def _whole(weights: Sequence[Weight]) -> tuple[int, ...]:
    try:
        exact = [Fraction(str(weight)) for weight in weights]
    except ValueError:
        raise PlanError(f"weights {weights!r}: they must be finite numbers") from None
    if not exact or min(exact) <= 0:
        raise PlanError(f"weights {weights!r}: they must be positive, one a source")
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    return tuple(weight // divisor for weight in whole)


def _pattern(weights: tuple[int, ...], period: int) -> Ids:
    """One period by earliest deadline first; ties go to the first source."""
    given = [0] * len(weights)
    release = [0] * len(weights)
    deadline = [-(-period // weight) for weight in weights]
    pattern = np.empty(period, np.int64)
    for draw in range(period):
        ready = (source for source, at in enumerate(release) if at <= draw)
        source = min(ready, key=deadline.__getitem__)
        pattern[draw] = source
        given[source] += 1
        release[source] = given[source] * period // weights[source]
        deadline[source] = -(-(given[source] + 1) * period // weights[source])
    return pattern
