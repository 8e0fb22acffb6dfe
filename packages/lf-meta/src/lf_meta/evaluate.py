"""Loss on the held-out split: sum / count over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

import lf_format as lff
from lf_meta.config import LoaderSection
from lf_meta.dist import World
from lf_meta.feed import Batch, Order, make_feed, to_micro_batches


@dataclass(frozen=True)
class EvalResult:
    """Mean loss in nats per predicted token, and how many tokens it is the mean of."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))


@dataclass(frozen=True)
class EvalJob:
    """A split and how to run over it in file order; ``batches`` 0 takes the whole split."""

    dataset: lff.Dataset
    loader: LoaderSection
    global_batch: int
    batches: int
    autocast: Callable[[], AbstractContextManager[object]]

    @torch.no_grad()
    def run(self, model: nn.Module, world: World, stopping: Callable[[], int]) -> EvalResult | None:
        """Evaluate; None when ``stopping`` reported a signal, which every rank sees at the same batch."""
        totals = torch.zeros(2, device=world.device)
        was_training = model.training
        model.eval()
        order = Order(self.global_batch, shuffle=False, epochs=1)
        with closing(make_feed(self.dataset, self.loader, order, world)) as feed:
            for batch in islice(feed, self.batches or None):
                if stopping():
                    model.train(was_training)
                    return None
                totals += self._batch_totals(model, batch, world)
        model.train(was_training)
        loss_sum, count = world.sum_(totals).tolist()
        return EvalResult(loss_sum / max(count, 1), int(count))

    def _batch_totals(self, model: nn.Module, batch: Batch, world: World) -> torch.Tensor:
        ((tokens, lengths, mask),) = to_micro_batches(batch, 1, world.device)
        with self.autocast():
            loss_sum, count = model(tokens, lengths, mask)
        return torch.stack((loss_sum.float(), count.float()))
