"""Action head of ``gr00t_n16_vla``: embodiment tables and the alternating vision-language diffusion transformer.

Wiring after Isaac-GR00T ``gr00t/model/modules/dit.py`` (AlternateVLDiT on diffusers' ``Attention``, ``FeedForward``,
``Timesteps`` and ``TimestepEmbedding``) and ``embodiment_conditioned_mlp.py``. Two things are computed otherwise,
with equal results: a cross-attending block gets only the tokens it may see, not all of them with a mask; and the two
dropouts in a row behind attention are one.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf_meta.models.gr00t_vla_config import VLAConfig

TIME_FREQUENCIES = 256


def time_features(time: Tensor, width: int) -> Tensor:
    """(cos, sin) of time at width / 2 frequencies from 1 down to 1e-4, both ends included: [B] to [B, width]."""
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device=time.device)
    angle = time.float()[:, None] * torch.exp(-math.log(10_000) * steps / (half - 1))
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def action_time_features(time: Tensor, width: int) -> Tensor:
    """(sin, cos) of time at width / 2 frequencies from 1 towards 1e-4, that end left out: [B] to [B, width]."""
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device=time.device)
    angle = time.float()[:, None] * torch.exp(steps * (-math.log(10_000) / half))
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


class _Rows(torch.autograd.Function):
    """table[rows], with the gradient as one product with a one-hot matrix.

    Torch's own gradient fills the table with zeros and adds sample by sample, rounding each sum to the table's dtype;
    the product writes every element once and adds in float32, and rows that no sample has become exactly zero.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = table.shape
        return table[rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        numbers = torch.arange(ctx.shape[0], device=rows.device)
        one_hot = (numbers[:, None] == rows).to(gradient.dtype)
        return (one_hot @ gradient.flatten(1)).view(ctx.shape), None


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that a matrix product of this weight has here: autocast's, where it is on."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


class EmbodimentLinear(nn.Module):
    """A linear layer with its own weights for every embodiment: ([B, T, in], int64 [B]) to [B, T, out].

    Embodiments that a batch does not have get a gradient of exactly zero. Under autocast the table is cast before it
    is read, not after: an optimizer that keeps a half-precision copy then spares the cast and the wide gradient.
    """

    def __init__(self, embodiments: int, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(embodiments, inputs, outputs) * std)
        self.bias = nn.Parameter(torch.zeros(embodiments, outputs))

    def forward(self, x: Tensor, embodiment: Tensor) -> Tensor:
        weight: Tensor = _Rows.apply(self.weight.to(_compute_dtype(self.weight)), embodiment)  # type: ignore[no-untyped-call]
        return torch.baddbmm(self.bias[embodiment].unsqueeze(1), x, weight)


class EmbodimentMLP(nn.Module):
    """layer2(relu(layer1(x))), both of the sample's embodiment."""

    def __init__(self, c: VLAConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(c.embodiments, inputs, c.mlp_hidden, c.table_std)
        self.layer2 = EmbodimentLinear(c.embodiments, c.mlp_hidden, outputs, c.table_std)

    def forward(self, x: Tensor, embodiment: Tensor) -> Tensor:
        out: Tensor = self.layer2(F.relu(self.layer1(x, embodiment)), embodiment)
        return out


class ActionEncoder(nn.Module):
    """Noisy actions [B, T, action_dim] and their time bucket [B] to tokens [B, T, width]."""

    def __init__(self, c: VLAConfig) -> None:
        super().__init__()
        self.width = c.dit_hidden
        self.embed = EmbodimentLinear(c.embodiments, c.action_dim, self.width, c.table_std)
        self.mix = EmbodimentLinear(c.embodiments, 2 * self.width, self.width, c.table_std)
        self.out = EmbodimentLinear(c.embodiments, self.width, self.width, c.table_std)

    def forward(self, actions: Tensor, bucket: Tensor, embodiment: Tensor) -> Tensor:
        x = self.embed(actions, embodiment)
        time = action_time_features(bucket, self.width).to(x.dtype)
        both = torch.cat((x, time[:, None].expand_as(x)), dim=-1)
        out: Tensor = self.out(F.silu(self.mix(both, embodiment)), embodiment)
        return out


class TimeEncoder(nn.Module):
    """Time bucket [B] to the vector [B, width] that modulates every block.

    Every use of it goes through SiLU first, so SiLU is applied here, once.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(TIME_FREQUENCIES, width), nn.Linear(width, width)

    def forward(self, bucket: Tensor) -> Tensor:
        features = time_features(bucket, TIME_FREQUENCIES).to(self.up.weight.dtype)
        return F.silu(self.out(F.silu(self.up(features))))


class SelfAttention(nn.Module):
    """[B, T, width] to the same, every token sees every token."""

    def __init__(self, c: VLAConfig) -> None:
        super().__init__()
        self.head_dim = c.dit_head_dim
        self.qkv, self.out = nn.Linear(c.dit_hidden, 3 * c.dit_hidden), nn.Linear(c.dit_hidden, c.dit_hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return out


class CrossAttention(nn.Module):
    """[B, T, width] attending to tokens [B, S, text_hidden] where mask, bool [B, 1, 1, S], is True."""

    def __init__(self, c: VLAConfig) -> None:
        super().__init__()
        self.head_dim = c.dit_head_dim
        self.query = nn.Linear(c.dit_hidden, c.dit_hidden)
        self.key_value = nn.Linear(c.text_hidden, 2 * c.dit_hidden)
        self.out = nn.Linear(c.dit_hidden, c.dit_hidden)

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        q = self.query(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        k, v = self.key_value(tokens).view(b, tokens.shape[1], 2, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(b, t, d))
        return out


class DiTBlock(nn.Module):
    """Attention behind a time-modulated norm, then a GELU feed-forward: [B, T, width] to the same.

    ``cross`` blocks are called with the tokens they attend to and a mask, the others without.
    """

    def __init__(self, c: VLAConfig, cross: bool) -> None:
        super().__init__()
        d = c.dit_hidden
        self.modulation = nn.Linear(d, 2 * d)
        self.attention = CrossAttention(c) if cross else SelfAttention(c)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        # diffusers' Attention drops its output and the block drops it again: two independent keeps are one
        self.drop_attention = nn.Dropout(1 - (1 - c.dropout) ** 2)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, time: Tensor, *seen: Tensor) -> Tensor:
        """Args: x [B, T, width], time [B, width] of :class:`TimeEncoder`, seen: tokens and mask."""
        scale, shift = self.modulation(time)[:, None].chunk(2, dim=-1)
        modulated = _normalise(x, 1e-5) * (1 + scale) + shift
        x = x + self.drop_attention(self.attention(modulated, *seen))
        inner = self.drop(F.gelu(self.up(_normalise(x, 1e-5)), approximate="tanh"))
        out: Tensor = x + self.drop(self.down(inner))
        return out


def _normalise(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=eps)


class Context(NamedTuple):
    """What the action head sees of a sample, text and image tokens apart; masks are bool [B, 1, 1, length]."""

    text: Tensor
    text_mask: Tensor
    image: Tensor
    image_mask: Tensor


def split_context(context: Tensor, is_image: Tensor, is_real: Tensor, image_tokens: int) -> Context:
    """Sort the tokens of every row into images (the first ``image_tokens``) and text, each in its order.

    A side without a single real token gets its first place unmasked, so that attention stays finite.

    Args:
        context: [B, T, hidden].
        is_image: bool [B, T]; a row has ``image_tokens`` of them, or none if it is empty.
        is_real: bool [B, T], False on padding.
    """
    number = is_image.sum(1, keepdim=True)
    place = torch.where(is_image, is_image.cumsum(1) - 1, number + (~is_image).cumsum(1) - 1)
    here = torch.arange(context.shape[1], device=context.device).expand_as(place)
    order = torch.zeros_like(place).scatter(1, place, here)
    context = context.gather(1, order[..., None].expand_as(context))
    masks = torch.stack((is_image & is_real, ~is_image & is_real)).gather(2, order.expand(2, -1, -1))
    image_mask, text_mask = masks[0, :, :image_tokens], masks[1, :, image_tokens:]
    return Context(
        context[:, image_tokens:],
        _open_if_closed(text_mask),
        context[:, :image_tokens],
        _open_if_closed(image_mask),
    )


def _open_if_closed(mask: Tensor) -> Tensor:
    first = torch.arange(mask.shape[1], device=mask.device) == 0
    return (mask | (first & ~mask.any(1, keepdim=True)))[:, None, None]


class DiT(nn.Module):
    """The alternating transformer: even blocks attend to the context, odd ones to themselves.

    Of the even blocks every ``text_every``-th sees text, from the first on, and the others see images.
    """

    def __init__(self, c: VLAConfig) -> None:
        super().__init__()
        self.text_every = 2 * c.text_every
        self.time = TimeEncoder(c.dit_hidden)
        self.blocks = nn.ModuleList(DiTBlock(c, cross=i % 2 == 0) for i in range(c.dit_layers))
        self.modulation = nn.Linear(c.dit_hidden, 2 * c.dit_hidden)
        self.out = nn.Linear(c.dit_hidden, c.dit_output)

    def seen_by(self, index: int, context: Context) -> tuple[Tensor, ...]:
        """Tokens and mask for block ``index``; nothing for one that attends to itself."""
        if index % 2:
            return ()
        return context[:2] if index % self.text_every == 0 else context[2:]

    def forward(self, x: Tensor, bucket: Tensor, context: Context) -> Tensor:
        """[B, T, width] at time buckets int64 [B] to [B, T, dit_output]."""
        time = self.time(bucket)
        for index, block in enumerate(self.blocks):
            x = block(x, time, *self.seen_by(index, context))
        shift, scale = self.modulation(time)[:, None].chunk(2, dim=-1)
        out: Tensor = self.out(_normalise(x, 1e-6) * (1 + scale) + shift)
        return out
