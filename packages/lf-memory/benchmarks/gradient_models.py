"""Decoders for bench_gradients.py, with a loss that never holds the logits of a whole batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder and its batch; `autocast` keeps parameters in float32 and computes in bfloat16."""

    layers: int
    width: int
    heads: int
    vocab: int
    batch: int
    length: int
    dtype: torch.dtype = torch.float32
    autocast: bool = False


SHAPES = {
    "tiny": Shape(layers=2, width=64, heads=2, vocab=256, batch=2, length=64),
    "5m": Shape(layers=4, width=256, heads=4, vocab=4096, batch=2, length=256),
    "134m": Shape(layers=12, width=768, heads=12, vocab=32000, batch=2, length=128),
    "1.34b": Shape(24, 2048, 16, 32000, batch=4, length=2048, dtype=torch.bfloat16),
    "1.6b": Shape(28, 2048, 32, 50257, batch=8, length=512, autocast=True),  # lf-meta's gr00t_n16_lm
}


class ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy of hidden [N, H] @ weight [V, H].t() and labels [N]; gradients are made in forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss = hidden.new_zeros((), dtype=torch.float32)
        step = -(
            -len(labels) // -(-weight.shape[0] // weight.shape[1])
        )  # logits as large as hidden, as Liger does
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(labels), step):
            rows = slice(start, start + step)
            logits = (hidden[rows] @ weight.t()).float()
            probabilities = logits.log_softmax(-1)
            loss += F.nll_loss(probabilities, labels[rows], reduction="sum")
            probabilities.exp_()[torch.arange(len(labels[rows]), device=labels.device), labels[rows]] -= 1.0
            d_logits = (probabilities / len(labels)).to(hidden.dtype)
            d_hidden[rows] = d_logits @ weight
            d_weight.addmm_(d_logits.t(), hidden[rows])
        ctx.save_for_backward(d_hidden, d_weight)
        return loss / len(labels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grads[0].to(d_hidden.dtype), d_weight * grads[0].to(d_weight.dtype), None


class Block(nn.Module):
    """A pre-norm transformer block, [B, T, width] to [B, T, width]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Token ids [B, T + 1] to their loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed, self.position = (
            nn.Embedding(shape.vocab, shape.width),
            nn.Embedding(shape.length, shape.width),
        )
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        tokens, labels = ids[:, :-1], ids[:, 1:]
        x = self.embed(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        hidden = self.norm(x).flatten(0, 1)
        weight = self.head.weight.to(hidden.dtype)
        return ChunkedLoss.apply(hidden, weight, labels.flatten())


class Robot(nn.Module):
    """lf-meta's language model at its 1.6b size, under the same call."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from lf_meta.models.gr00t_lm import build

        self.inner = build("1.6b", shape.vocab)
        self.blocks = self.inner.blocks

    def forward(self, ids: Tensor) -> Tensor:
        tokens, labels = ids[:, :-1], ids[:, 1:]
        hidden = self.inner.hidden(tokens).flatten(0, 1)
        weight = self.inner.head.weight
        if torch.is_autocast_enabled(hidden.device.type):
            hidden, weight = hidden.bfloat16(), weight.bfloat16()
        return ChunkedLoss.apply(hidden, weight, labels.flatten())


def make(name: str, device: torch.device) -> nn.Module:
    """A model by its name in SHAPES, with the same parameters each time."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    with device:
        model: nn.Module = (Robot if name == "1.6b" else Decoder)(shape)
    return model.to(shape.dtype)


def recompute(model: nn.Module) -> None:
    """Compute each block again in backward instead of keeping what it saves."""
    blocks: Any = model.blocks
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def batches(name: str, device: torch.device, count: int) -> list[Tensor]:
    """`count` batches of token ids, the same each time."""
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(1)
    size = (shape.batch, shape.length + 1)
    return [torch.randint(0, shape.vocab, size, generator=generator).to(device) for _ in range(count)]
