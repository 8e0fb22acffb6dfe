"""A transformer block as five parts: qkv, attention, o, gate, up and down.

The cut that pays is the one around attention: with it eager or in a graph of its own, its kernel may be chosen by
length. Known layouts: the blocks of ``gr00t_n16_lm`` in lf-meta, and the decoder layers of Hugging Face's Llama,
Qwen2, Qwen3 and Mistral models. What they compute, and so every bit of it, stays the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf_graph._errors import GraphError
from lf_graph._specs import Spec, merge

__all__ = ["PARTS", "merge", "shard_block"]

PARTS = ("qkv", "attention", "o", "gate", "up_down")

_GR00T = (
    "attention_norm",
    "attention.qkv",
    "attention.out",
    "ffn_norm",
    "ffn.gate",
    "ffn.up",
    "ffn.down",
    "dropout",
)
_HUGGING_FACE = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def shard_block(
    block: nn.Module,
    *,
    name: str = "block",
    x: str = "x",
    cos: str = "cos",
    sin: str = "sin",
    mask: str = "",
    eager: Collection[str] = (),
) -> tuple[Spec, ...]:
    """Cut a block into its five parts.

    Args:
        block: a block of a known layout.
        name: begins the names of the values between its parts; different for each block of a chain.
        x: name of the block's input, [B, T, hidden].
        cos, sin: names of the rotary tables, as the block takes them.
        mask: name of the attention mask; "" for causal attention without one.
        eager: which of :data:`PARTS` stay ordinary code.

    Returns:
        The parts ``qkv``, ``attention``, ``o``, ``gate`` and ``up_down``; the last gives ``{name}.out``. Gradients
        reach the parameters of the block.

    Raises:
        GraphError: the block is no module, or has another layout, or ``eager`` names no part.
    """
    if not isinstance(block, nn.Module):
        raise GraphError(f"the block is a {type(block).__name__}, not a torch.nn.Module")
    unknown = sorted(set(eager) - set(PARTS))
    if unknown:
        raise GraphError(f"no parts {unknown}; a block has {', '.join(PARTS)}")
    modules = _modules(block)
    q, k, v, y, h, n, g, out = (f"{name}.{value}" for value in ("q", "k", "v", "y", "h", "n", "g", "out"))
    masked = (mask,) if mask else ()
    edges = (
        ((x, cos, sin), (q, k, v)),
        ((q, k, v, *masked), (y,)),
        ((x, y), (h,)),
        ((h,), (n, g)),
        ((h, n, g), (out,)),
    )
    return tuple(
        Spec("eager" if part in eager else "piece", module, takes, gives, f"{name}.{part}", (block,))
        for part, module, (takes, gives) in zip(PARTS, modules, edges, strict=True)
    )


def _modules(block: nn.Module) -> tuple[nn.Module, ...]:
    missing = {layout: _missing(block, layout) for layout in (_GR00T, _HUGGING_FACE)}
    if not missing[_GR00T]:
        return (
            _Gr00tQKV(block),
            _Gr00tAttention(block),
            _Gr00tOut(block),
            _Gr00tGate(block),
            _Gr00tUpDown(block),
        )
    if not missing[_HUGGING_FACE]:
        return _HFQKV(block), _HFAttention(block), _HFOut(block), _HFGate(block), _HFUpDown(block)
    nearest = min(missing.values(), key=len)
    raise GraphError(
        f"{type(block).__name__} is no block of a known layout (gr00t_n16_lm; Hugging Face Llama, Qwen3): it lacks "
        f"{', '.join(nearest)}. Cut it by hand into Piece and Eager elements of a Chain, or use partition()"
    )


def _missing(block: nn.Module, layout: tuple[str, ...]) -> list[str]:
    present = {name for name, _ in block.named_modules(remove_duplicate=False)}
    return [name for name in layout if name not in present]


def _function(module: nn.Module, name: str) -> Any:
    """A function of the file that a module's class is in, so that the parts compute with the very same."""
    found = vars(sys.modules[type(module).__module__]).get(name)
    if found is None:
        raise GraphError(
            f"{type(module).__module__} has no {name}, which {type(module).__name__} is expected to use: cut the block "
            "by hand into Piece and Eager elements of a Chain"
        )
    return found


class _Part(nn.Module):
    """A part holds the submodules it calls, and reads options of the block when it runs."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class _Gr00tQKV(_Part):
    """x, cos, sin to rotated q, k and v, each [B, heads, T, head_dim]."""

    norm: nn.Module
    qkv: nn.Module

    def __init__(self, block: Any) -> None:
        super().__init__(norm=block.attention_norm, qkv=block.attention.qkv)
        self._heads: int = block.attention.heads
        self._rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = _function(block.attention, "rotate")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self._heads, d // self._heads).permute(2, 0, 3, 1, 4)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin), v


class _Gr00tAttention(_Part):
    """q, k, v to the attended values [B, T, hidden]."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self._dropout: float = block.attention.dropout
        self._modes = (block.attention,)  # not a child: it holds the projections of other parts

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        p = self._dropout if self._modes[0].training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=p)
        return y.transpose(1, 2).flatten(2)


class _Gr00tOut(_Part):
    """x and the attended values to the residual sum."""

    out: nn.Module
    dropout: nn.Module

    def __init__(self, block: Any) -> None:
        super().__init__(out=block.attention.out, dropout=block.dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = x + self.dropout(self.out(y))
        return result


class _Gr00tGate(_Part):
    """h to its norm and the activated gate."""

    norm: nn.Module
    gate: nn.Module

    def __init__(self, block: Any) -> None:
        super().__init__(norm=block.ffn_norm, gate=block.ffn.gate)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        n = self.norm(h)
        return n, F.silu(self.gate(n))


class _Gr00tUpDown(_Part):
    """h, its norm and the gate to the block's output."""

    up: nn.Module
    down: nn.Module
    dropout: nn.Module

    def __init__(self, block: Any) -> None:
        super().__init__(up=block.ffn.up, down=block.ffn.down, dropout=block.dropout)

    def forward(self, h: Tensor, n: Tensor, g: Tensor) -> Tensor:
        result: Tensor = h + self.dropout(self.down(g * self.up(n)))
        return result


class _HFQKV(_Part):
    """hidden_states, cos, sin to rotated q, k and v, each [B, heads, T, head_dim]."""

    norm: nn.Module
    q: nn.Module
    k: nn.Module
    v: nn.Module

    def __init__(self, layer: Any) -> None:
        a = layer.self_attn
        super().__init__(norm=layer.input_layernorm, q=a.q_proj, k=a.k_proj, v=a.v_proj)
        self.q_norm: nn.Module = getattr(a, "q_norm", nn.Identity())
        self.k_norm: nn.Module = getattr(a, "k_norm", nn.Identity())
        self._head_dim: int = a.head_dim
        self._rotate: Callable[..., tuple[Tensor, Tensor]] = _function(a, "apply_rotary_pos_emb")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = (*x.shape[:-1], -1, self._head_dim)
        x = self.norm(x)
        q = self.q_norm(self.q(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(heads)).transpose(1, 2)
        v = self.v(x).view(heads).transpose(1, 2)
        q, k = self._rotate(q, k, cos, sin)
        return q, k, v


class _HFAttention(_Part):
    """q, k, v to the attended values [B, T, heads * head_dim], by the implementation the model is set to."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention = layer.self_attn
        self._attention = (attention,)  # not a child: it holds the projections of other parts
        self._interfaces = _function(attention, "ALL_ATTENTION_FUNCTIONS")
        self._plain = _function(attention, "eager_attention_forward")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        (a,) = self._attention
        options = {"sliding_window": a.sliding_window} if hasattr(a, "sliding_window") else {}
        attend = self._interfaces.get_interface(a.config._attn_implementation, self._plain)
        dropout = a.attention_dropout if a.training else 0.0
        y, _ = attend(a, q, k, v, mask, dropout=dropout, scaling=a.scaling, **options)
        return torch.flatten(y, 2).contiguous()


class _HFOut(_Part):
    """hidden_states and the attended values to the residual sum."""

    o: nn.Module

    def __init__(self, layer: Any) -> None:
        super().__init__(o=layer.self_attn.o_proj)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = x + self.o(y)
        return result


class _HFGate(_Part):
    """h to its norm and the activated gate."""

    norm: nn.Module
    gate: nn.Module

    def __init__(self, layer: Any) -> None:
        super().__init__(norm=layer.post_attention_layernorm, gate=layer.mlp.gate_proj)
        self._act: Callable[[Tensor], Tensor] = layer.mlp.act_fn

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        n = self.norm(h)
        return n, self._act(self.gate(n))


class _HFUpDown(_Part):
    """h, its norm and the gate to the layer's output."""

    up: nn.Module
    down: nn.Module

    def __init__(self, layer: Any) -> None:
        super().__init__(up=layer.mlp.up_proj, down=layer.mlp.down_proj)

    def forward(self, h: Tensor, n: Tensor, g: Tensor) -> Tensor:
        result: Tensor = h + self.down(g * self.up(n))
        return result
