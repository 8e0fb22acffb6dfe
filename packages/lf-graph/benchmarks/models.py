"""The models that the benchmarks train, in plain PyTorch.

The arithmetic, the shapes and the parameter names are those of the baselines that the bars of DESIGN.md section 4 were
measured on, operation by operation; ``same_as_baseline.py`` proves it bit by bit. The single-letter attributes are
the baseline's parameter names, so a state dict of one loads into the other.

Dimensions are arguments, so that a tiny copy of everything runs on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_POSITIONS = 2048
TIME_FREQUENCIES = 128


@dataclass(frozen=True)
class LMDims:
    """A dense or mixture-of-experts language model; ``ffn`` is the width of one expert when there are experts."""

    layers: int
    width: int
    heads: int
    ffn: int
    vocab: int = 50257
    kv_heads: int | None = None
    head_dim: int | None = None
    experts: int = 0
    top_k: int = 2


@dataclass(frozen=True)
class VLADims:
    """Vision tower, language backbone (its last ``tuned`` layers are trained) and diffusion transformer."""

    language: LMDims
    image: int = 224
    patch: int = 14
    vision_layers: int = 27
    vision_width: int = 1152
    vision_heads: int = 16
    vision_ffn: int = 4304
    tuned: int = 4
    action_layers: int = 32
    action_width: int = 1536
    action_heads: int = 32
    action_dim: int = 128
    horizon: int = 50
    text_tokens: int = 92
    text_vocab: int = 50257


class RMSNorm(nn.Module):
    """Root mean square norm in float32, scaled in the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        v = x.float()
        normed = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed.to(x.dtype) * self.w.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, half-split layout; x [B, H, T, D], tables [T, D / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Self attention, or cross attention when ``context`` is given; ``context_width`` is that context's width."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        context_width: int | None = None,
        causal: bool = True,
        rotary: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.head_dim = head_dim or width // heads
        self.causal, self.rotary = causal, rotary
        self.q = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k = nn.Linear(context_width or width, self.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(context_width or width, self.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(heads * self.head_dim, width, bias=False)

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor] | None = None, context: Tensor | None = None
    ) -> Tensor:
        c = x if context is None else context
        batch, length, _ = x.shape
        seen = c.shape[1]
        q = self.q(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(c).view(batch, seen, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(c).view(batch, seen, self.kv_heads, self.head_dim).transpose(1, 2)
        if self.rotary:
            assert tables is not None
            q, k = rotate(q, *tables), rotate(k, *tables)
        q, k = q.to(v.dtype), k.to(v.dtype)
        grouped = self.kv_heads != self.heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class SwiGLU(nn.Module):
    """Gate, up and down projections without biases."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.g = nn.Linear(width, ffn, bias=False)
        self.u = nn.Linear(width, ffn, bias=False)
        self.d = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.silu(self.g(x)) * self.u(x))


class ExpertLoop(nn.Module):
    """Mixture of experts as reference code writes it: one expert after the other, each asking which tokens are its own.

    Two read-backs an expert (``torch.where``), so it cannot be captured; the plain row of the MoE workload.
    """

    def __init__(self, width: int, ffn: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.r = nn.Linear(width, experts, bias=False)
        self.e = nn.ModuleList(SwiGLU(width, ffn) for _ in range(experts))
        self.top_k, self.experts = top_k, experts

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        chance = F.softmax(self.r(x).float(), -1)
        weight, index = chance.topk(self.top_k, -1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        mask = F.one_hot(index, self.experts).permute(2, 1, 0)
        for e in range(self.experts):
            choice, token = torch.where(mask[e])
            y = self.e[e](x[token]) * weight[token, choice, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out.view(shape)


class GroupedMoE(nn.Module):
    """The same experts by torch's grouped matrix product on tokens sorted by expert; nothing is read back.

    Weights are [experts, in, out], the transposes of the loop's.
    """

    def __init__(self, width: int, ffn: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.r = nn.Linear(width, experts, bias=False)
        self.top_k, self.experts = top_k, experts
        self.g = nn.Parameter(torch.randn(experts, width, ffn) * 0.02)
        self.u = nn.Parameter(torch.randn(experts, width, ffn) * 0.02)
        self.d = nn.Parameter(torch.randn(experts, ffn, width) * 0.02)

    @classmethod
    def from_loop(cls, loop: ExpertLoop) -> GroupedMoE:
        """The same function as ``loop``, with copies of its weights, on its device."""
        width, ffn = loop.e[0].g.in_features, loop.e[0].g.out_features
        with torch.device("meta"):
            made = cls(width, ffn, loop.experts, loop.top_k)
        made.r = loop.r
        for name in ("g", "u", "d"):
            stacked = torch.stack([getattr(e, name).weight.detach().t() for e in loop.e])
            setattr(made, name, nn.Parameter(stacked.contiguous()))
        return made

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows in the order of their experts: weights [R, 1], places among tokens x top_k [R]; ends [E]."""
        chance = F.softmax(self.r(x).float(), -1)
        weight, index = chance.topk(self.top_k, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        expert = index.flatten()
        order = torch.argsort(expert, stable=True)
        ones = torch.ones_like(expert, dtype=torch.int32)
        counts = torch.zeros(self.experts, device=x.device, dtype=torch.int32).index_add_(0, expert, ones)
        return weight.flatten()[order, None], order, torch.cumsum(counts, 0).to(torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weight, order, ends = self.route(x)
        token = order // self.top_k
        h = x[token].bfloat16()
        gate = torch._grouped_mm(h, self.g.bfloat16(), offs=ends)
        inner = F.silu(gate) * torch._grouped_mm(h, self.u.bfloat16(), offs=ends)
        y = torch._grouped_mm(inner, self.d.bfloat16(), offs=ends)
        out = torch.zeros_like(x, dtype=torch.float32)
        out.index_add_(0, token, y.float() * weight)
        return out.to(x.dtype).view(shape)


class Block(nn.Module):
    """Pre-norm attention and a feed-forward half, dense or of experts."""

    def __init__(self, dims: LMDims) -> None:
        super().__init__()
        self.n1, self.n2 = RMSNorm(dims.width), RMSNorm(dims.width)
        self.a = Attention(dims.width, dims.heads, dims.kv_heads, dims.head_dim)
        if dims.experts:
            self.m: nn.Module = ExpertLoop(dims.width, dims.ffn, dims.experts, dims.top_k)
        else:
            self.m = SwiGLU(dims.width, dims.ffn)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.a(self.n1(x), tables)
        return x + self.m(self.n2(x))


class LM(nn.Module):
    """Causal language model; forward takes ids and labels int64 [B, T] and returns the mean cross entropy."""

    def __init__(self, dims: LMDims, head: bool = True) -> None:
        super().__init__()
        head_dim = dims.head_dim or dims.width // dims.heads
        self.e = nn.Embedding(dims.vocab, dims.width)
        self.b = nn.ModuleList(Block(dims) for _ in range(dims.layers))
        self.n = RMSNorm(dims.width)
        self.head = nn.Linear(dims.width, dims.vocab, bias=False) if head else None
        inverse = 1 / 10000 ** (torch.arange(0, head_dim, 2).float() / head_dim)
        angle = torch.outer(torch.arange(ROPE_POSITIONS).float(), inverse)
        self.register_buffer("c", angle.cos())
        self.register_buffer("s_", angle.sin())
        for m in self.modules():
            if isinstance(m, nn.Linear | nn.Embedding):
                nn.init.normal_(m.weight, std=0.02)

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the first ``length`` positions."""
        return self.c[:length], self.s_[:length]

    def hidden(self, ids: Tensor) -> Tensor:
        """What the head reads, [B, T, width]."""
        x = self.e(ids)
        tables = self.tables(x.shape[1])
        for block in self.b:
            x = block(x, tables)
        return self.n(x)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        assert self.head is not None
        return F.cross_entropy(self.head(self.hidden(ids)).float().flatten(0, 1), labels.flatten())


class VisionBlock(nn.Module):
    """SigLIP2's pre-norm block."""

    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.a = Attention(width, heads, causal=False, rotary=False)
        self.f1, self.f2 = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(self.n1(x))
        return x + self.f2(F.gelu(self.f1(self.n2(x)), approximate="tanh"))


class ActionBlock(nn.Module):
    """Diffusion transformer block: AdaLN before attention, dropout 0.2, cross attention where ``context_width``."""

    def __init__(self, width: int, heads: int, context_width: int | None) -> None:
        super().__init__()
        self.ada = nn.Linear(width, 2 * width)
        self.n1 = nn.LayerNorm(width, elementwise_affine=False)
        self.n2 = nn.LayerNorm(width, elementwise_affine=False)
        self.a = Attention(width, heads, context_width=context_width, causal=False, rotary=False)
        self.f1, self.f2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, time: Tensor, context: Tensor | None) -> Tensor:
        scale, shift = self.ada(F.silu(time)).chunk(2, -1)
        y = self.a(self.n1(x) * (1 + scale[:, None]) + shift[:, None], context=context)
        x = x + F.dropout(y, 0.2, self.training)
        y = self.f2(F.gelu(self.f1(self.n2(x)), approximate="tanh"))
        return x + F.dropout(y, 0.2, self.training)


def time_features(tau: Tensor) -> Tensor:
    """Sines and cosines of the flow time; float32 [B, 256]."""
    angle = tau[:, None] * torch.arange(TIME_FREQUENCIES, device=tau.device)
    return torch.cat([torch.sin(angle), torch.cos(angle)], -1)


class VLA(nn.Module):
    """GR00T N1.6's shape: frozen SigLIP2-so400m, 16 language layers (top 4 tuned), 32-layer diffusion transformer.

    Two images a sample. Forward takes images [2B, 3, S, S], ids int64 [B, T], state [B, A], action and noise
    [B, H, A] and flow time tau [B], all float32, and returns the flow matching loss.
    """

    def __init__(self, dims: VLADims) -> None:
        super().__init__()
        width, vision = dims.language.width, dims.vision_width
        action, dim = dims.action_width, dims.action_dim
        self.tuned = dims.tuned
        self.patch = nn.Conv2d(3, vision, dims.patch, dims.patch)
        self.vit = nn.ModuleList(
            VisionBlock(vision, dims.vision_heads, dims.vision_ffn) for _ in range(dims.vision_layers)
        )
        self.proj = nn.Sequential(nn.Linear(4 * vision, width), nn.GELU(), nn.Linear(width, width))
        self.lm = LM(dims.language, head=False)
        self.vlln = nn.LayerNorm(width)
        self.dit = nn.ModuleList(
            ActionBlock(action, dims.action_heads, width if i % 2 == 0 else None)
            for i in range(dims.action_layers)
        )
        self.t = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, action), nn.SiLU(), nn.Linear(action, action))
        self.act, self.st = nn.Linear(dim, action), nn.Linear(dim, action)
        self.out = nn.Linear(action, dim)
        self.requires_grad_(False)
        for part in (self.vlln, self.dit, self.t, self.act, self.st, self.out, self.lm.b[-dims.tuned :]):
            part.requires_grad_(True)

    @torch.no_grad()
    def encode_frozen(self, images: Tensor, ids: Tensor) -> Tensor:
        """Vision tower, projector and the language layers that are not tuned; [B, T, width]."""
        v = self.patch(images).flatten(2).transpose(1, 2)
        for block in self.vit:
            v = block(v)
        v = self.proj(v.reshape(ids.shape[0], -1, self.proj[0].in_features))
        x = torch.cat([v, self.lm.e(ids)], 1)
        tables = self.lm.tables(x.shape[1])
        for block in self.lm.b[: -self.tuned]:
            x = block(x, tables)
        return x

    def encode_tuned(self, x: Tensor) -> Tensor:
        """The tuned language layers and the norm before the action head; the context [B, T, width]."""
        tables = self.lm.tables(x.shape[1])
        for block in self.lm.b[-self.tuned :]:
            x = block(x, tables)
        return self.vlln(x)

    def head_loss(self, context: Tensor, state: Tensor, action: Tensor, tau: Tensor, noise: Tensor) -> Tensor:
        """The diffusion transformer on noisy actions; mean squared error of the predicted flow."""
        time = self.t(time_features(tau))
        noisy = (1 - tau[:, None, None]) * noise + tau[:, None, None] * action
        h = torch.cat([self.st(state)[:, None], self.act(noisy)], 1)
        for i, block in enumerate(self.dit):
            h = block(h, time, context if i % 2 == 0 else None)
        return F.mse_loss(self.out(h[:, 1:]).float(), action - noise)

    def forward(
        self, images: Tensor, ids: Tensor, state: Tensor, action: Tensor, tau: Tensor, noise: Tensor
    ) -> Tensor:
        context = self.encode_tuned(self.encode_frozen(images, ids))
        return self.head_loss(context, state, action, tau, noise)


def group_experts(model: LM) -> LM:
    """Replace every expert loop of ``model`` by the grouped product with the same weights, in place."""
    for block in model.b:
        if isinstance(block.m, ExpertLoop):
            block.m = GroupedMoE.from_loop(block.m)
    return model
