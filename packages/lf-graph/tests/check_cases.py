"""What several tests of check look at."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def kinds(report) -> list[str]:
    return [f.kind for f in report.findings]


def only(report, kind: str):
    """The one finding of the report, which is of this kind."""
    assert kinds(report) == [kind], str(report)
    return report.findings[0]


# values and shapes that the host reads

X = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])


# clean models


class Block(nn.Module):
    """A transformer block with dropout and fused attention."""

    def __init__(self, d=16, heads=2):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.RMSNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(0.1))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        p = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tied embeddings, two blocks, cross entropy."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


TOKENS = torch.arange(12).view(2, 6)
