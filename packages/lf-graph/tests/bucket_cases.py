"""Models and functions of the tests of Buckets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf_graph import (
    DynamicMaskBuffer,
)

VOCABULARY, WIDTH = 32, 8


class Attention(nn.Module):
    """Token logits [B, T, 32]; keys past ``lengths`` are hidden by a mask buffer."""

    def __init__(self, capacity: int, batch: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.mask = DynamicMaskBuffer(capacity, batch=batch, causal=False)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        b, t = ids.shape
        q, k, v = self.qkv(self.embed(ids)).view(b, t, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask.write(lengths, t))
        return self.head(mixed.transpose(1, 2).reshape(b, t, WIDTH))


class Pooled(nn.Module):
    """A masked mean over time, cheap for thousands of positions: [B, T] floats -> [B, 3]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(1, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        seen = torch.arange(x.shape[1])[None, :] < lengths[:, None]
        hidden = torch.tanh(self.up(x[..., None])) * seen[..., None]
        return self.down(hidden.sum(1) / lengths[:, None])


def full(x: Tensor) -> Tensor:
    return torch.full((x.shape[0],), x.shape[1])


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def square(x: Tensor) -> Tensor:
    return x * x
