"""The language model of models.py on packed rows, with the attention of torch, FlexAttention or lf-graph.

Weights, names and arithmetic stay those of ``models.LM``; what a packed row needs beside them is where its documents
lie: cu_seqlens, or the block mask that FlexAttention makes of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import LM, Attention, RMSNorm, SwiGLU, rotate
from torch import Tensor, nn

from lf_graph.kernels import (
    linear_cross_entropy,
    packed_positions,
    rms_norm,
    rope,
    swiglu,
    varlen_attention,
)

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]  # q, k, v [T, heads, D] and where documents lie


def attend_ours(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """lf-graph's; q [T, heads, D]."""
    return varlen_attention(q, k, v, cu_seqlens, causal=True)


def torch_varlen(longest: int) -> Attend:
    """torch's ``varlen_attn`` (FlashAttention), which wants the longest length from the host."""
    from torch.nn.attention.varlen import varlen_attn

    call: Any = varlen_attn
    known = inspect.signature(varlen_attn).parameters  # torch 2.11 and 2.13 name causality differently
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return lambda q, k, v, cu: call(q, k, v, cu, cu, longest, longest, **causal)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
    """FlexAttention, which needs to be compiled; q [T, heads, D]."""
    from torch.nn.attention.flex_attention import flex_attention

    call: Any = flex_attention
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out: Tensor = call(*heads_first, block_mask=block_mask)[0].transpose(0, 1)
    return out


def document_mask(capacity: int, device: torch.device) -> Callable[[Tensor], Any]:
    """cu_seqlens to the block mask of its documents, compiled once."""
    from torch.nn.attention.flex_attention import create_block_mask

    make: Any = torch.compile(create_block_mask)
    index = torch.arange(capacity, dtype=torch.int32, device=device)

    def made(cu_seqlens: Tensor) -> Any:
        document = torch.searchsorted(cu_seqlens, index, right=True)

        def see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (document[i] == document[j])

        return make(see, None, None, capacity, capacity, device=str(device))

    return made


class PackedAttention(nn.Module):
    """``models.Attention`` on one packed row [1, T, width]; ``tables`` are (cos, sin, where documents lie)."""

    def __init__(self, plain: Attention, attend: Attend, fused_rope: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = plain.q, plain.k, plain.v, plain.o
        self.head_dim, self.attend, self.fused_rope = plain.head_dim, attend, fused_rope

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor, Any]) -> Tensor:
        cos, sin, where = tables
        q, k, v = (p(x).view(x.shape[1], -1, self.head_dim) for p in (self.q, self.k, self.v))
        if self.fused_rope:
            q, k = rope(q, k, cos, sin)
        else:
            q, k = (rotate(y, cos[:, None], sin[:, None]) for y in (q, k))
        y = self.attend(q.to(v.dtype), k.to(v.dtype), v, where)
        out: Tensor = self.o(y.reshape(1, x.shape[1], -1))
        return out


class FusedNorm(nn.Module):
    """``models.RMSNorm`` as one kernel."""

    def __init__(self, plain: RMSNorm) -> None:
        super().__init__()
        self.w = plain.w

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.w, 1e-6)


class FusedSwiGLU(nn.Module):
    """``models.SwiGLU`` with one kernel between its products."""

    def __init__(self, plain: SwiGLU) -> None:
        super().__init__()
        self.g, self.u, self.d = plain.g, plain.u, plain.d

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.d(swiglu(self.g(x), self.u(x)))
        return out


def take_packed(model: LM, attend: Attend, fused: bool = False) -> LM:
    """Exchange the attention of every block, in place; ``fused`` also norms, gates and rotary positions."""
    for block in model.b:
        block.a = PackedAttention(block.a, attend, fused)
        if fused:
            block.n1, block.n2 = FusedNorm(block.n1), FusedNorm(block.n2)
            block.m = FusedSwiGLU(block.m)
    if fused:
        model.n = FusedNorm(model.n)  # type: ignore[assignment]
    return model


def packed_hidden(model: LM, ids: Tensor, cu_seqlens: Tensor, where: Any) -> Tensor:
    """What the head reads, [1, capacity, width], for ids [capacity]."""
    at = packed_positions(cu_seqlens, len(ids))
    tables = (model.c[at], model.s_[at], where)
    x = model.e(ids)[None]
    for block in model.b:
        x = block(x, tables)
    out: Tensor = model.n(x)
    return out


def packed_loss(
    model: LM, fused: bool, ids: Tensor, labels: Tensor, cu_seqlens: Tensor, where: Any = None
) -> Tensor:
    """Mean cross entropy of a packed row; ``fused`` never holds its logits."""
    hidden = packed_hidden(model, ids, cu_seqlens, cu_seqlens if where is None else where)
    assert model.head is not None
    if fused:
        return linear_cross_entropy(hidden, model.head.weight, labels[None], reduction="mean")[0]
    return F.cross_entropy(model.head(hidden).float().flatten(0, 1), labels)


def as_gr00t(model: LM, **args: Any) -> nn.Module:
    """``gr00t_n16_lm`` of lf-meta with the weights of ``model``."""
    from lf_meta.models.gr00t_lm import GR00TLM, LMConfig

    attention, ffn = model.b[0].a, model.b[0].m
    dims = {"vocab_size": model.e.num_embeddings, "hidden": model.e.embedding_dim, "layers": len(model.b)}
    config = LMConfig(**dims, heads=attention.heads, ffn=ffn.g.out_features, **args)
    with torch.device("meta"):
        made = GR00TLM(config)
    made.load_state_dict(dict(_renamed(model)), assign=True)
    return made


def _renamed(model: LM) -> Any:
    """(name in lf-meta, tensor of its own) for every parameter."""
    assert model.head is not None
    copies = functools.partial(torch.clone, memory_format=torch.contiguous_format)
    whole = {"embed": model.e.weight, "norm": model.n.w, "head": model.head.weight}
    yield from ((f"{name}.weight", nn.Parameter(copies(w.detach()))) for name, w in whole.items())
    for i, block in enumerate(model.b):
        parts = {
            "attention_norm": block.n1.w,
            "ffn_norm": block.n2.w,
            "attention.qkv": torch.cat([p.weight for p in (block.a.q, block.a.k, block.a.v)]),
            "attention.out": block.a.o.weight,
            "ffn.gate": block.m.g.weight,
            "ffn.up": block.m.u.weight,
            "ffn.down": block.m.d.weight,
        }
        for name, weight in parts.items():
            yield f"blocks.{i}.{name}.weight", nn.Parameter(copies(weight.detach()))
