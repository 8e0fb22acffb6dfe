"""Backbone of ``gr00t_n16_vla``: SigLIP2 vision tower, 2 x 2 connector, Qwen3 language layers.

Wiring after Isaac-GR00T ``modeling_siglip2.py`` with rope and window attention off (as its config.json has them),
``modeling_eagle3_vl.py`` (``mlp1``, pixel unshuffle) and transformers ``qwen3``. Projections that read the same input
are one matrix: q, k, v, and gate, up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf_meta.models.gr00t_lm import rope_tables, rotate
from lf_meta.models.gr00t_vla_config import VLAConfig

EMBEDDING_STD = 0.02


class VisionBlock(nn.Module):
    """Pre-norm block without causality, [N, patches, hidden] to the same."""

    def __init__(self, c: VLAConfig) -> None:
        super().__init__()
        d = c.vision_hidden
        self.heads = c.vision_heads
        self.attention_norm = nn.LayerNorm(d, eps=c.vision_eps)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ffn_norm = nn.LayerNorm(d, eps=c.vision_eps)
        self.up, self.down = nn.Linear(d, c.vision_ffn), nn.Linear(c.vision_ffn, d)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, d)
        x = x + self.out(attended)
        out: Tensor = x + self.down(F.gelu(self.up(self.ffn_norm(x)), approximate="tanh"))
        return out


class VisionTower(nn.Module):
    """Images to patch features; a patch is projected by a linear layer over (row, column, channel)."""

    def __init__(self, c: VLAConfig) -> None:
        super().__init__()
        self.patch, self.grid, self.position_grid = c.patch, c.grid, c.position_grid
        self.patches = nn.Linear(3 * c.patch**2, c.vision_hidden)
        self.position = nn.Embedding(c.position_grid**2, c.vision_hidden)
        self.blocks = nn.ModuleList(VisionBlock(c) for _ in range(c.vision_layers))
        self.norm = nn.LayerNorm(c.vision_hidden, eps=c.vision_eps)
        nn.init.normal_(self.position.weight, std=EMBEDDING_STD)

    def positions(self) -> Tensor:
        """[grid * grid, hidden]: the table, resized bilinearly (in float32 at least) if it has another side."""
        table = self.position.weight
        if self.position_grid == self.grid:
            return table
        plane = table.to(torch.promote_types(table.dtype, torch.float32)).T
        plane = plane.reshape(1, -1, self.position_grid, self.position_grid)
        resized = F.interpolate(plane, (self.grid, self.grid), mode="bilinear", antialias=True)
        return resized[0].flatten(1).T.to(table.dtype)

    def forward(self, images: Tensor) -> Tensor:
        """[N, size, size, 3] normalised images, channels last, to [N, grid * grid, hidden]."""
        n, p, g = images.shape[0], self.patch, self.grid
        cut = images.reshape(n, g, p, g, p, 3).transpose(2, 3).reshape(n, g * g, 3 * p * p)
        x = self.patches(cut.to(self.patches.weight.dtype)) + self.positions()
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


def as_channels_last(images: Tensor) -> Tensor:
    """[..., size, size, 3] floats in -1..1 from either way a batch holds images.

    uint8 [..., size, size, 3] are stored frames (0..255 to -1..1: SigLIP's mean and std are 0.5); floats
    [..., 3, size, size] are ``pixel_values`` that a processor normalised.
    """
    if images.dtype == torch.uint8:
        return images.float() / 127.5 - 1
    return images.movedim(-3, -1)


class Connector(nn.Module):
    """Every 2 x 2 patches become one token of the language model: [N, g * g, v] to [N, g * g / 4, hidden]."""

    def __init__(self, c: VLAConfig) -> None:
        super().__init__()
        self.grid = c.grid
        self.norm = nn.LayerNorm(4 * c.vision_hidden)
        self.up = nn.Linear(4 * c.vision_hidden, c.text_hidden)
        self.down = nn.Linear(c.text_hidden, c.text_hidden)

    def forward(self, x: Tensor) -> Tensor:
        n, half, d = x.shape[0], self.grid // 2, x.shape[-1]
        # channel outermost, then row and column within the square: the order of torch's pixel_unshuffle
        squares = x.view(n, half, 2, half, 2, d).permute(0, 1, 3, 5, 2, 4).reshape(n, half * half, 4 * d)
        out: Tensor = self.down(F.gelu(self.up(self.norm(squares))))
        return out


class TextBlock(nn.Module):
    """A Qwen3 layer: grouped-query attention with normalised q and k, SwiGLU; [B, T, hidden] to the same.

    Causal, and rows are padded at their end, so padding reaches no real position without any mask.
    """

    def __init__(self, c: VLAConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.text_heads, c.text_kv_heads, c.text_head_dim
        total = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.attention_norm = nn.RMSNorm(c.text_hidden, eps=c.text_eps)
        self.qkv = nn.Linear(c.text_hidden, total, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=c.text_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=c.text_eps)
        self.out = nn.Linear(self.heads * self.head_dim, c.text_hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(c.text_hidden, eps=c.text_eps)
        self.gate_up = nn.Linear(c.text_hidden, 2 * c.text_ffn, bias=False)
        self.down = nn.Linear(c.text_ffn, c.text_hidden, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Self-attention over the normalised input."""
        b, t, _ = x.shape
        qkv = self.qkv(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        wide = (
            self.q_norm.weight.dtype
        )  # under autocast q is narrower, and the norm then a chain of small kernels
        q, k = (norm(x.to(wide)) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        q, k = (rotate(x, cos, sin).to(v.dtype) for x in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, t, -1))
        return out

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), cos, sin)
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class Language(nn.Module):
    """Embedding, the frozen lower layers, the tuned upper layers, and the (frozen) norm behind them."""

    def __init__(self, c: VLAConfig) -> None:
        super().__init__()
        self.head_dim, self.rope_base = c.text_head_dim, c.rope_base
        self.embed = nn.Embedding(c.vocab_size, c.text_hidden)
        self.frozen = nn.ModuleList(TextBlock(c) for _ in range(c.text_layers - c.tuned_layers))
        self.tuned = nn.ModuleList(TextBlock(c) for _ in range(c.tuned_layers))
        self.norm = nn.RMSNorm(c.text_hidden, eps=c.text_eps)
        nn.init.normal_(self.embed.weight, std=EMBEDDING_STD)

    def run(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        """x [B, T, hidden] through some of the layers."""
        cos, sin = rope_tables(x.shape[1], self.head_dim, self.rope_base, x.device)
        for block in blocks:
            x = block(x, cos, sin)
        return x


def place_images(embedded: Tensor, is_image: Tensor, images: Tensor) -> Tensor:
    """Put image token k of a row at its k-th placeholder, without shapes that depend on data.

    Args:
        embedded: [B, T, hidden] embedded ids.
        is_image: bool [B, T].
        images: [B, K, hidden].
    """
    rank = (is_image.cumsum(1) - 1).clamp(0, images.shape[1] - 1)
    picked = images.gather(1, rank[..., None].expand(-1, -1, images.shape[2]))
    return torch.where(is_image[..., None], picked.to(embedded.dtype), embedded)
