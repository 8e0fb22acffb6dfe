"""The language model in less memory: what compiled code computes again, and when gradients are used up.

    python bench_step.py --workloads lm --match lm-2048 --rows memory_rows

The stock rows get the same settings of torch's partitioner. What is predicted of each row stands in NOTES.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from fused import fused_loss
from measure import Row
from ours import Ours, row_of
from stock import WHOLE, WHOLE_GRAPH, Variant
from stock import row_of as stock_row_of
from torch import Tensor, nn
from workloads import Workload

from lf_graph._compile import partitioner_settings
from lf_graph.kernels import linear_cross_entropy

CHEAP = tuple(partitioner_settings("cheap").items())
apart = torch.compiler.disable(linear_cross_entropy)


def loss_apart(model: nn.Module, batch: Any) -> Tensor:
    """:func:`fused.fused_loss` with the head and its loss outside of the compiled code.

    So the gradient of the head's weight is complete, and with ``release="fused"`` gone, before the backward of the
    layers begins, which is where a step needs the most memory.
    """
    ids, labels = batch
    loss, _ = apart(model.hidden(ids), model.head.weight, labels, reduction="mean")
    return loss


def configurations(workload: Workload) -> list[Ours]:
    """From what is kept to the end, to what is used up at once; none but for language models."""
    if not workload.name.startswith("lm"):
        return []
    cheap = Ours("lf-graph, cheap", compile="model", loss=fused_loss, recompute="cheap", expect_s=60)
    early = replace(cheap, name="lf-graph, cheap, release fused", loss=loss_apart, release="fused")
    blocks = replace(early, name="lf-graph, cheap, release fused, blocks", compile="blocks", expect_s=40)
    return [
        early,
        replace(cheap, name="lf-graph, cheap, clip", clip=1.0),
        cheap,
        replace(early, name="lf-graph, cheap, release fused, no shadows", shadows=False),
        blocks,
    ]


def variants() -> list[Variant]:
    """Stock rows whose graphs are cut in the same way."""
    whole = replace(WHOLE, expect_s=60, urgent=True)
    settings = {"partition": CHEAP}
    return [
        replace(whole, name="whole, cheap", **settings),
        replace(WHOLE_GRAPH, name="whole+graph, cheap", expect_s=60, **settings),
    ]


def rows(workload: Workload) -> list[Row]:
    """The rows of a language model."""
    ours = configurations(workload)
    stock = variants() if ours else []
    return [
        row
        for batch in workload.batches
        for row in (
            *(row_of(workload, batch, one) for one in ours),
            *(stock_row_of(workload, batch, variant) for variant in stock),
        )
    ]
