"""Our rows with the operators of lf_graph.kernels in the place of the model's: head and loss in one, experts in one.

python bench_step.py --workloads lm,moe --rows ours,fused,stock
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from measure import Row
from models import GroupedMoE
from ours import Ours, row_of
from stock import only_attention
from torch import Tensor, nn
from workloads import Workload

from lf_graph.kernels import grouped_experts, linear_cross_entropy


def fused_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of ``models.LM`` without its logits."""
    ids, labels = batch
    loss, _ = linear_cross_entropy(model.hidden(ids), model.head.weight, labels, reduction="mean")
    return loss


class FusedMoE(GroupedMoE):
    """The same experts through :func:`lf_graph.kernels.grouped_experts`, gate and up side by side."""

    @classmethod
    def of(cls, grouped: GroupedMoE) -> FusedMoE:
        """The same function as ``grouped``, on its device."""
        experts, width, ffn = grouped.g.shape
        with torch.device("meta"):
            made = cls(width, ffn, experts, grouped.top_k)
        made.r, made.d = grouped.r, grouped.d
        made.gu = nn.Parameter(torch.cat((grouped.g.detach(), grouped.u.detach()), -1))
        del made.g, made.u
        return made

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weight, order, ends = self.route(x)
        rows = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        out = grouped_experts(
            x.bfloat16(),
            self.gu.bfloat16(),
            self.d.bfloat16(),
            weight[:, 0],
            ends,
            order // self.top_k,
            rows.view(-1, self.top_k),
        )
        return out.to(x.dtype).view(shape)


def fuse_experts(model: nn.Module) -> nn.Module:
    """Exchange the grouped experts of ``models.LM``."""
    for block in model.b:
        if isinstance(block.m, GroupedMoE):
            block.m = FusedMoE.of(block.m)
    return model


def configurations(workload: Workload) -> list[Ours]:
    """The fused operators one after the other, so that each gain has its row."""
    loss = Ours("lf-graph, fused loss", compile="model", loss=fused_loss, expect_s=60)
    if workload.name.startswith("moe"):
        experts = Ours("lf-graph, fused experts", compile="model", change=fuse_experts, expect_s=60)
        both = Ours(
            "lf-graph, fused experts and loss",
            compile="model",
            change=fuse_experts,
            loss=fused_loss,
            expect_s=60,
        )
        return [loss, experts, both]
    if not workload.name.startswith("lm"):
        return []
    cudnn = replace(loss, name="lf-graph, fused loss, cudnn", around=partial(only_attention, "cudnn"))
    return [loss, cudnn]


def rows(workload: Workload) -> list[Row]:
    """The rows of a workload; none for models without a vocabulary."""
    return [row_of(workload, batch, ours) for batch in workload.batches for ours in configurations(workload)]
