"""Other ways to compute attention that torch has, and which way is fastest where it was measured.

Every way keeps the contract of ours: rows of no sequence may hold NaN, and give zeros and gradients of zero; lengths
are never read by the host, so where a way wants the longest, it gets what there is room for.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lf_graph.kernels._attention_layout import Layout, Rows, cleaned, rows_of

Way = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]
_HALF = (torch.bfloat16, torch.float16)


def obstacle(way: str, q: Tensor, k: Tensor, layout: Layout) -> str | None:
    """Why a way cannot compute this call; None if it can. q and k are [batch, rows, heads, head_dim]."""
    if q.device.type != "cuda" or q.dtype not in _HALF or q.shape[3] % 8:
        return "it takes bf16 or fp16 on a CUDA device, and head sizes that are multiples of 8"
    if 0 in q.shape or 0 in k.shape or not layout.sequences:
        return "it takes no empty tensors"
    return _OBSTACLES[way](q, k, layout)


def _varlen_obstacle(q: Tensor, k: Tensor, layout: Layout) -> str | None:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has none"
    return None if layout.packed else "rows are padded, not packed"


def _sdpa_obstacle(q: Tensor, k: Tensor, layout: Layout) -> str | None:
    if layout.packed:
        return "rows are packed, not padded"
    if layout.causal and q.shape[1] != k.shape[1]:
        return "it counts causal positions from the first row, not from the last"
    if layout.offsets_q is None and layout.offsets_k is None:
        return None
    if not layout.causal or layout.offsets_q is not layout.offsets_k:
        return "it knows no lengths; only a causal mask keeps queries from the padding behind them"
    return None


def _flex_obstacle(q: Tensor, k: Tensor, layout: Layout) -> str | None:
    return "it takes head sizes from 16 on" if q.shape[3] < 16 else None


_OBSTACLES = {
    "varlen_attn": _varlen_obstacle,
    "flash": _sdpa_obstacle,
    "cudnn": _sdpa_obstacle,
    "flex": _flex_obstacle,
}


def run(way: str, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Attention by a way that has no obstacle; [batch, rows, heads, head_dim], packed rows as a batch of one."""
    side_q = rows_of(q, layout.offsets_q, layout.packed)
    side_k = rows_of(k, layout.offsets_k, layout.packed)
    q, k, v = cleaned(q, side_q.used), cleaned(k, side_k.used), cleaned(v, side_k.used)
    if way == "flex":
        return cleaned(_flex(q, k, v, layout, side_q, side_k), side_q.used)
    return cleaned(_WAYS[way](q, k, v, layout), side_q.used)


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """FlashAttention-2 over packed rows; the room there is stands in for the greatest length."""
    from torch.nn.attention.varlen import varlen_attn

    options = _varlen_options(layout.causal, q.shape[2] != k.shape[2])
    call: Callable[..., Any] = varlen_attn
    out: Tensor = call(
        q.squeeze(0),
        k.squeeze(0),
        v.squeeze(0),
        layout.offsets_q,
        layout.offsets_k,
        q.shape[1],
        k.shape[1],
        scale=layout.scale,
        **options,
    )
    return out.unsqueeze(0)


@functools.cache
def _varlen_options(causal: bool, grouped: bool) -> dict[str, Any]:
    """Its arguments change from release to release."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if causal:
        options = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if grouped and "enable_gqa" in known:
        options["enable_gqa"] = True
    return options


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """torch's fused attention over padded rows, padding included."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=layout.causal, scale=layout.scale, enable_gqa=grouped
        )
    return out.transpose(1, 2)


_WAYS: dict[str, Way] = {
    "varlen_attn": _varlen,
    "flash": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "cudnn": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
}


@functools.cache
def _flex_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """FlexAttention and the maker of its masks, compiled at their first call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)


def _flex(q: Tensor, k: Tensor, v: Tensor, layout: Layout, side_q: Rows, side_k: Rows) -> Tensor:
    """FlexAttention under a block mask made of the lengths of this call."""
    attend, create = _flex_functions()
    mask = None
    if layout.causal or side_q.used is not None or side_k.used is not None:
        rule = _rule(layout, side_q, side_k)
        mask = create(rule, len(q), None, q.shape[1], k.shape[1], device=str(q.device))
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = attend(
        *heads_first, block_mask=mask, scale=layout.scale, enable_gqa=q.shape[2] != k.shape[2]
    )
    return out.transpose(1, 2)


def _rule(layout: Layout, a: Rows, b: Rows) -> Callable[..., Tensor]:
    """Whether query i sees key j; as ``visible``, one pair at a time."""

    def see(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j >= 0
        if a.sequence is not None and b.sequence is not None:
            seen = seen & (a.sequence[batch, i] == b.sequence[batch, j])
        if a.used is not None:
            seen = seen & a.used[batch, i]
        if b.used is not None:
            seen = seen & b.used[batch, j]
        return seen & (b.to_end[batch, j] >= a.to_end[batch, i]) if layout.causal else seen

    return see
