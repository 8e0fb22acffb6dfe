"""The learning rate as a pure function of the step, so that a resume cannot disturb it."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, floor: float, warmup: int, total: int) -> float:
    """Linear warm-up to ``peak``, then a cosine to ``floor``.

    Args:
        step: 0-based optimizer step.
        warmup: steps of warm-up; step 0 already gets peak / warmup.
        total: steps of the whole schedule; later steps stay at the floor.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * progress))
