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
_SURE = 0.5  # a sparse path that is predicted to take less of dense needs no dense sum beside it
_AGAIN = 64  # sums of a doubtful sparse path, after which one is dense: it costs less than 2 % of them
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
    alone: bool = True  # whether dense sums are measured; not on a GPU, nor within a bucket of DDP
    sparse_run: int = 0  # sums since the last dense one
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
            if self.path == "dense" and self.predicted > 0:
                self.alone = False
            return
        ratio = min(max(seconds / self.predicted, 1 / _FAR), _FAR)
        before = self.corrections.get(self.path, ratio)
        self.corrections[self.path] = before + _LEARN * (ratio - before)

    def choose(self, predicted: Mapping[str, float]) -> str:
        """The path of this sum, from predictions in seconds; paths that cannot win may be missing."""
        # A sparse path that was never run is taken to be as far off as those that were: they have their passes over
        # memory in common. And it is no better than dense: what slows the link down slows them all.
        seen = [ratio for path, ratio in self.corrections.items() if path != "dense"]
        sparse = max(sum(seen) / len(seen) if seen else 1.0, self.corrections.get("dense", 1.0))
        usual = {path: 1.0 if path == "dense" else sparse for path in predicted}
        cost = {
            path: seconds * self.corrections.get(path, usual[path]) for path, seconds in predicted.items()
        }
        best = min(cost, key=cost.__getitem__)
        if best != self.path and cost[best] > (1 - _STAY) * cost.get(self.path, float("inf")):
            best = self.path
        if best != "dense" and cost[best] > _GAIN * cost["dense"]:
            best = "dense"
        if best != "dense" and cost[best] > _SURE * cost["dense"] and self._wants_dense():
            best = "dense"
        self.path, self.predicted = best, predicted[best]
        self._count(best)
        return best

    def _wants_dense(self) -> bool:
        """Whether what dense takes is not known, or was long ago, and a dense sum would tell."""
        return self.alone and ("dense" not in self.corrections or self.sparse_run >= _AGAIN)

    def _count(self, path: str) -> None:
        if path != "dense":
            self.dense_run, self.quiet, self.sparse_run = 0, QUIET, self.sparse_run + 1
            return
        self.sparse_run = 0
        self.dense_run += 1
        if self.dense_run >= QUIET:
            # Asking once more decides over twice as many sums each time, so its share of them goes to nothing.
            self.skip, self.quiet = self.quiet, min(2 * self.quiet, _MOST_QUIET)
            self.dense_run = QUIET - 1
