"""A model of blocks of which some read the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

X = torch.arange(12.0).view(3, 4) - 5


class Reads(nn.Module):
    """Reads the device: has to stay eager."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * max(int((x > 0).sum()), 1)


class Router(Reads):
    """Returns a pair."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x + 1


class Block(nn.Module):
    """A parameter of its own, sizes, a factory function and random numbers around a router."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.drop = nn.LayerNorm(4), Router(), nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        y, z = self.router(self.norm(x) * self.scale + self.offset)
        noise = torch.randn(rows, width) * torch.arange(rows)[:, None]
        return self.drop(y) + z + noise.to(x.dtype)


class Model(nn.Module):
    """Two blocks with a plain layer between, and a tree as a result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), nn.Linear(4, 4), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, object]:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            mean = x.mean()
        return {"loss": self.head(x).pow(2).sum() * scale, "mean": mean, "rows": len(x)}


def kinds(parts) -> list[tuple[str, str]]:
    return [(s.kind, s.name) for s in parts.specs]
