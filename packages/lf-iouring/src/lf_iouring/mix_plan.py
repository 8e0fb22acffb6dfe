"""Batches from several data sets, each batch from one of them, by exact weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._errors import PlanError
from ._permute import Ids
from .mixing import Mixture
from .plan import STATE_VERSION, BatchSpec, Plan, Window, counter, digest, rank_rows, require_same


class MixPlan:
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
        self._blocks = [plan.shuffle_block_size for plan in plans]
        self.steps_per_epoch = sum(plan.steps_per_epoch for plan in plans)

    def batch(self, step: int) -> BatchSpec:
        """See Plan; `epoch` is that of the mixture."""
        window = self.window(step, 1)
        return BatchSpec(step, int(window.epoch[0]), int(window.edge[0]), window.ids[0])

    def window(self, first_step: int, count: int, rows: slice = slice(None)) -> Window:
        """See Plan."""
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

    def rank_rows(self, rank: int, world: int) -> slice:
        """See Plan."""
        return rank_rows(self.global_batch, rank, world)

    def state(self, step: int) -> dict[str, Any]:
        """See Plan."""
        return {
            "version": STATE_VERSION,
            "step": int(step),
            "seed": self.seed,
            "global_batch": self.global_batch,
            "epoch": int(step) // self.steps_per_epoch,
            "fingerprint": self.fingerprint,
            "params": {
                "shuffle": self.shuffle,
                "records": self.records,
                "buckets": digest(self.buckets),
                "sources": len(self._plans),
                **({"shuffle_block_size": self._blocks} if any(self._blocks) else {}),
            },
        }

    def check_state(self, state: Mapping[str, Any]) -> int:
        """See Plan."""
        step = counter(state, "step")
        require_same(state, self.state(step))
        return step
