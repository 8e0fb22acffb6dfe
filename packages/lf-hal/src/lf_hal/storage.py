"""How far narrow weights are from those they were made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_hal.errors import WeightsError
from lf_hal.lir.graph import Graph, Recipe

__all__ = ["storage_report"]

Array = npt.NDArray[Any]
_RANGE = {"bf16": "finite values up to 3.38e38", "f16": "finite values up to 65504", "i8": "finite values"}


def storage_report(graph: Graph, weights: Mapping[str, Array], dtype: str) -> dict[str, Any]:
    """What a manifest says of storage: how many weights are narrow, and their error relative to the weights' norm.

    Args:
        graph: one of :func:`lf_hal.passes.store_weights`.
        weights: every weight and derived weight by name.
        dtype: what was asked for.

    Returns:
        ``dtype``, ``narrow`` (their number), ``relative_error`` (norm of all differences over the norm of all weights)
        and ``worst``, the weight with the largest such error of its own (name and error; None where none is narrow).

    Raises:
        WeightsError: a weight is not finite as it is stored.
    """
    rows = {r.output.name: r for r in graph.recipes if r.kind in ("narrow", "int8_rows")}
    total, lost, worst = 0.0, 0.0, None
    for recipe in rows.values():
        source = recipe.inputs[0]
        exact = np.asarray(weights[source], np.float64)
        with np.errstate(invalid="ignore"):
            found = _widened(recipe, weights)
        if not (np.isfinite(exact).all() and np.isfinite(found).all()):
            wanted = _RANGE[recipe.output.type.dtype]
            raise WeightsError(
                source, f"{wanted}, to store it as {recipe.output.type.dtype}", "others; keep f32"
            )
        size, error = float((exact**2).sum()), float(((exact - found) ** 2).sum())
        total, lost = total + size, lost + error
        own = (error / size) ** 0.5 if size else 0.0
        if worst is None or own > worst[1]:
            worst = (source, own)
    relative = (lost / total) ** 0.5 if total else 0.0
    return {
        "dtype": dtype,
        "narrow": len(rows),
        "relative_error": relative,
        "worst": list(worst) if worst else None,
    }


def _widened(recipe: Recipe, weights: Mapping[str, Array]) -> Array:
    stored = weights[recipe.output.name]
    if recipe.kind == "int8_rows":
        scale = np.asarray(weights[recipe.inputs[1]], np.float64)
        return np.asarray(stored.astype(np.float64) * scale.reshape(-1, *[1] * (stored.ndim - 1)))
    if recipe.output.type.dtype == "bf16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)
