"""Torch modules that are compiled in tests and benchmarks: ResNets and a decoder-only language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DecodeStep", "LanguageModel", "ResNet", "resnet18", "resnet50", "with_statistics"]


class Block(nn.Module):
    """Two convolutions of 3 x 3, or three of 1, 3 and 1 with a wide end, around a shortcut."""

    def __init__(self, inside: int, width: int, stride: int, wide: bool) -> None:
        super().__init__()
        out = width * (4 if wide else 1)
        plan = [(1, 1), (3, stride), (1, 1)] if wide else [(3, stride), (3, 1)]
        sizes = [width] * (len(plan) - 1) + [out]
        layers: list[nn.Module] = []
        channels = inside
        for (kernel, step), size in zip(plan, sizes, strict=True):
            layers += [
                nn.Conv2d(channels, size, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(size),
                nn.ReLU(),
            ]
            channels = size
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride != 1 or inside != out
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """He et al., arXiv 1512.03385: a stem, four stages of blocks, an average and a linear layer."""

    def __init__(self, depths: tuple[int, ...], wide: bool, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        channels = 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for i in range(depth):
                blocks.append(Block(channels, width, 2 if stage and i == 0 else 1, wide))
                channels = width * (4 if wide else 1)
        self.stages = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.stages(self.stem(x))), 1))


def resnet18(classes: int = 1000) -> ResNet:
    return ResNet((2, 2, 2, 2), wide=False, classes=classes)


def resnet50(classes: int = 1000) -> ResNet:
    return ResNet((3, 4, 6, 3), wide=True, classes=classes)


def with_statistics(module: nn.Module) -> nn.Module:
    """``module`` in eval mode, its batch norms with means and variances that are not 0 and 1."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_mean, -0.2, 0.2)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.uniform_(part.bias, -0.2, 0.2)
    return module.eval()


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, dim // heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.attn_norm(x), cos, sin)[0]
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output, and all keys and values; the last of them only if there is a past."""
        b, t, _ = x.shape
        q = rotate(self.q(x).view(b, t, self.heads, self.width).transpose(1, 2), cos, sin)
        k = rotate(self.k(x).view(b, t, self.kv_heads, self.width).transpose(1, 2), cos, sin)
        v = self.v(x).view(b, t, self.kv_heads, self.width).transpose(1, 2)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, t, -1)), k, v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class LanguageModel(nn.Module):
    """A decoder of Llama's kind: grouped heads, rotary positions, RMS norms, gated linear units."""

    def __init__(
        self, vocab: int, dim: int, layers: int, heads: int, kv_heads: int, hidden: int, length: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab, bias=False)
        half = dim // heads // 2
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


class DecodeStep(nn.Module):
    """One token of a language model after ``past`` others, whose keys and values are inputs."""

    def __init__(self, model: LanguageModel, past: int) -> None:
        super().__init__()
        self.model, self.past = model, past

    def caches(self) -> list[Tensor]:
        """Random keys and values of the past, two for each layer: [1, kv_heads, past, width]."""
        first = self.model.layers[0]
        shape = (1, first.kv_heads, self.past, first.width)
        return [torch.randn(shape) for _ in range(2 * len(self.model.layers))]

    def forward(self, ids: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        x = self.model.embed(ids)
        at = slice(self.past, self.past + 1)
        cos, sin = self.model.cos[at], self.model.sin[at]
        made: list[Tensor] = []
        for layer, keys, values in zip(self.model.layers, caches[::2], caches[1::2], strict=True):
            y, *new = layer.attend(layer.attn_norm(x), cos, sin, (keys, values))
            made += new
            x = x + y
            y = layer.mlp_norm(x)
            x = x + layer.down(F.silu(layer.gate(y)) * layer.up(y))
        return self.model.head(self.model.norm(x)), *made
