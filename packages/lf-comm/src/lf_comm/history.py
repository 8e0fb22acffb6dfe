"""What one tensor's sums have taught: which path, how far predictions are off, and when not even to ask.

Pure: every rank feeds in the same numbers and so comes to the same choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_STAY = 0.10  # another path must be this much cheaper
_GAIN = 0.95  # and a sparse one this much cheaper than dense: a wrong prediction should not cost what it could win
_LEARN = 0.5  # weight of the newest measurement
_FAR = 8.0  # a prediction further off was disturbed by something else
QUIET = 16  # sums that were dense one after another before asking stops
_MOST_QUIET = 1024


@dataclass
class History:
    """The past of one tensor."""

    path: str = "dense"
    corrections: dict[str, float] = field(default_factory=dict)
    dense_run: int = 0
    quiet: int = QUIET
    skip: int = 0
    predicted: float = 0.0  # of the last sum, uncorrected; 0 when it was not measured alone

    def asks(self) -> bool:
        """Whether this sum asks which rows are set; False means dense. Called once for each sum."""
        if self.skip == 0:
            return True
        self.skip -= 1
        return False

    def learn(self, seconds: float) -> None:
        """What the last sum took on the slowest rank; 0 when that is not known."""
        if not (seconds > 0 and self.predicted > 0):
            return
        ratio = min(max(seconds / self.predicted, 1 / _FAR), _FAR)
        before = self.corrections.get(self.path, ratio)
        self.corrections[self.path] = before + _LEARN * (ratio - before)

    def choose(self, predicted: Mapping[str, float]) -> str:
        """The path of this sum, from predictions in seconds."""
        # A sparse path that was never run is taken to be as far off as those that were: they have their passes over
        # memory in common. Dense was measured as it runs.
        seen = [ratio for path, ratio in self.corrections.items() if path != "dense"]
        usual = {path: sum(seen) / len(seen) if seen and path != "dense" else 1.0 for path in predicted}
        cost = {
            path: seconds * self.corrections.get(path, usual[path]) for path, seconds in predicted.items()
        }
        best = min(cost, key=cost.__getitem__)
        if best != self.path and cost[best] > (1 - _STAY) * cost[self.path]:
            best = self.path
        if best != "dense" and cost[best] > _GAIN * cost["dense"]:
            best = "dense"
        self.path, self.predicted = best, predicted[best]
        self._count(best)
        return best

    def _count(self, path: str) -> None:
        if path != "dense":
            self.dense_run, self.quiet = 0, QUIET
            return
        self.dense_run += 1
        if self.dense_run >= QUIET:
            # Asking once more decides over twice as many sums each time, so its share of them goes to nothing.
            self.skip, self.quiet = self.quiet, min(2 * self.quiet, _MOST_QUIET)
            self.dense_run = QUIET - 1
