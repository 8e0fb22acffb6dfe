"""Batches from several data sets, each batch from one of them, by exact weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._errors import PlanError
from ._permute import Ids
from .mixing import Mixture
from .plan import BatchPlan, Plan, Window


class MixPlan(BatchPlan):
    """As Plan, for several data sets: step n is the next batch of the source that draw n of the mixture names.

    Rows of a batch have similar lengths only within a source's buckets, so a batch comes from one source. An
    epoch has as many batches as one pass of every source; a source that is drawn more often goes through
    several passes meanwhile.

    Args:
        plans: one a source, with equal global batch; ids count through the sources.
        mixture: exact weights of the batches.
        fingerprint: name of all sources and their weights.
    """

    def __init__(self, plans: Sequence[Plan], mixture: Mixture, fingerprint: str = "") -> None:
        if len(plans) != len(mixture.weights):
            raise PlanError(f"{len(plans)} data sets and {len(mixture.weights)} weights")
        self._plans, self._mixture = tuple(plans), mixture
        self.global_batch, self.seed, self.shuffle = plans[0].global_batch, plans[0].seed, plans[0].shuffle
        self.fingerprint = fingerprint
        self.buckets = tuple(sorted({edge for plan in plans for edge in plan.buckets}))
        self._first = np.cumsum([0] + [plan.records for plan in plans])
        self.records = int(self._first[-1])
        self.steps_per_epoch = sum(plan.steps_per_epoch for plan in plans)

    def window(self, first_step: int, count: int, rows: slice = slice(None)) -> Window:
        """See BatchPlan; `epoch` is that of the mixture."""
        if first_step < 0 or count < 0:
            raise PlanError(f"step {first_step}, count {count}: both must be >= 0")
        steps = np.arange(first_step, first_step + count, dtype=np.int64)
        sources, turns = self._mixture.at(steps)
        edge = np.empty(count, np.int64)
        ids: Ids = np.empty((count, len(range(self.global_batch)[rows])), np.int64)
        for source in np.flatnonzero(np.bincount(sources)).tolist():
            at = np.flatnonzero(sources == source)
            part = self._plans[source].window(int(turns[at[0]]), len(at), rows)
            edge[at] = part.edge
            ids[at] = np.where(part.ids < 0, -1, part.ids + self._first[source])
        return Window(first_step, steps // self.steps_per_epoch, edge, ids)

    def _params(self) -> dict[str, Any]:
        blocks = [plan.shuffle_block_size for plan in self._plans]
        return {"sources": len(self._plans)} | ({"shuffle_block_size": blocks} if any(blocks) else {})
