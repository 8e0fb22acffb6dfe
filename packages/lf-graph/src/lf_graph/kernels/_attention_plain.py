"""Attention by its formula, with all scores in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from lf_graph.kernels._attention_layout import Layout, cleaned, visible


def plain(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Attention over [batch, rows, heads, head_dim] in fp32 or fp64; packed rows are a batch of one."""
    with torch.autocast(q.device.type, enabled=False):
        return _formula(q, k, v, visible(q, k, layout), layout.scale)


def _formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    dtype = q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    used_q, used_k = seen.any(2), seen.any(1)
    q, k, v = cleaned(q, used_q).to(wide), cleaned(k, used_k).to(wide), cleaned(v, used_k).to(wide)
    groups = q.unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bmhgd,bnhd->bhgmn", groups, k) * scale
    hidden = ~seen[:, None, None]
    scores = scores.masked_fill(hidden, torch.finfo(wide).min)
    weights = scores.softmax(-1).masked_fill(hidden, 0)
    out = torch.einsum("bhgmn,bnhd->bmhgd", weights, v).flatten(2, 3).to(dtype)
    return cleaned(out, used_q)  # gradients may hold NaN there, too
