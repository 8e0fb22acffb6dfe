"""What a step reports."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """Tensors on the device, for which nothing was waited.

    Attributes:
        loss: float32 [], mean loss of the update, sum / count over all micro-batches and ranks.
        count: float32 [], what the loss is the mean of.
    """

    loss: Tensor
    count: Tensor
