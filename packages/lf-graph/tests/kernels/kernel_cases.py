"""What the kernel tests share: the device, the distance to a float64 reference, and bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILON = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest distance that one rounding to a dtype explains (fp32: a few hundred additions)."""


@torch.no_grad()
def distance(actual: Tensor, reference: Tensor, floor: float = 1e-12) -> float:
    """max|actual - reference| / max(max|reference|, floor); infinite where there is a NaN."""
    if not reference.numel():
        return 0.0
    difference = (actual.double() - reference.double().to(actual.device)).abs().max()
    scale = reference.double().abs().max().clamp_min(floor)
    return float(torch.nan_to_num(difference / scale.to(actual.device), nan=float("inf")))


def assert_near(
    actual: Sequence[Tensor], reference: Sequence[Tensor], slack: float = 1.0, floor: float = 1e-12
) -> None:
    """Every tensor within ``slack`` roundings of its dtype of its reference, and of the same shape.

    ``floor`` is the size of the terms, where the reference is their sum and may vanish.
    """
    for index, (a, r) in enumerate(zip(actual, reference, strict=True)):
        assert a.shape == r.shape, f"output {index}: {tuple(a.shape)} is not {tuple(r.shape)}"
        away = distance(a, r, floor)
        assert away <= slack * EPSILON[a.dtype], f"output {index} is {away:.3g} away"


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal to the last bit; NaN equals NaN."""
    return all(
        x.dtype == y.dtype and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )
