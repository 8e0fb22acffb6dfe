"""Rows of curves.py that train on 8-bit products: does the loss fall as it does in bfloat16?

    python curves.py --workloads lm --rows float8_rows --steps 300 --json float8_curves.json    # on an H200

The reference of curves.py is bfloat16 autocast from the same weights on the same batches. These rows do other
arithmetic, so "within" is not expected; what counts is that their last losses, over the seeds, lie in the spread of the
reference's.
"""

from __future__ import annotations

from dataclasses import replace

import stock
import torch
from measure import Row
from torch import nn
from workloads import Workload

from lf_graph.kernels import to_float8
from lf_graph.kernels._float8 import Scaling

LEAST = 1024  # sizes below it lose more to rounding passes than the product saves
VOCABULARY = 50000  # heads stay in bfloat16


def chosen(name: str, linear: nn.Linear) -> bool:
    """Large layers of blocks; on a CPU, where models are tiny, all but the head."""
    sizes = (linear.in_features, linear.out_features)
    least = LEAST if torch.cuda.is_available() else 0
    return min(sizes) >= least and max(sizes) < VOCABULARY


def on_float8(workload: Workload, scaling: Scaling) -> Workload:
    """The workload with its layers swapped."""

    def accelerate(model: nn.Module) -> nn.Module:
        model = workload.accelerate(model)
        if not to_float8(model, chosen, scaling=scaling):
            raise ValueError(f"{workload.name}: no layer was swapped for 8-bit products")
        return model

    return replace(workload, accelerate=accelerate)


def rows(workload: Workload) -> list[Row]:
    """Both scalings, without graphs or compiler."""
    return [
        stock.row_of(on_float8(workload, scaling), batch, stock.Variant(f"eager, float8 by {scaling}"))
        for batch in workload.batches
        for scaling in ("tensor", "row")
    ]
