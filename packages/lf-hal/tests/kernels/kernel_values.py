"""Values that the cases are made of."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from kernel_runs import PANEL

F = npt.NDArray[np.float32]
f32 = np.float32
KINDS = ("random", "subnormal", "special")
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1.0,
        -1.0,
        1e38,
        -1e38,
        1e-38,
        1e-45,
        -1e-45,
        0.5,
        3.4e38,
        2.0,
        -3.0,
    ],
    f32,
)


def values(kind: str, *shape: int, seed: int = 0) -> F:
    """Random floats: of ordinary size, mostly subnormal, or ordinary with a few special ones among them."""
    rng = np.random.default_rng([seed, *shape, KINDS.index(kind)])
    x = rng.standard_normal(shape).astype(f32)
    if kind == "subnormal":
        return x * f32(1e-38)
    if kind == "special" and x.size:
        flat = x.reshape(-1)
        some = rng.random(flat.size) < 0.02
        flat[some] = rng.choice(SPECIAL, int(some.sum()))
    return x


def dense(shape: tuple[int, ...]) -> list[int]:
    """Strides of an array without gaps."""
    return [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]


def panels(n: int) -> int:
    return (n + PANEL - 1) // PANEL


__all__ = ["KINDS", "SPECIAL", "F", "dense", "f32", "panels", "values"]
