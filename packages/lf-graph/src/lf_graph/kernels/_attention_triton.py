"""Operators and launches of the attention kernels, and what the tuner may change about them.

``lf_graph::attention_forward(q, k, v, offsets_q, offsets_k, sequences, packed, causal, scale) -> (out, lse)``, and
``attention_dq`` and ``attention_dkv``, its gradients. ``packed`` offsets are cu_seqlens; else they are the lengths of
sequences padded to capacity / sequences rows, or None when every row is used.

They are opaque to compilers, which could fuse nothing with them: of a ``triton_op``, torch 2.13 takes the offsets for
written, because a function that reads them tells where to write, and its partitioner then fails.
"""

# mypy: disable-error-code="untyped-decorator"
# torch.library's decorators have no types.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from lf_graph.kernels import _attention_kernels as kernels
from lf_graph.kernels._attention_layout import Layout
from lf_graph.kernels._attention_tiles import FULL, PACKED, PADDED
from lf_graph.kernels._attention_tuning import DKV, DQ, FORWARD, head_parts, key_of, power_of_two
from lf_graph.kernels._tunable import Config, Tunable, config_of

_WIDE = 8  # elements; 16 bytes of bf16, the widest access
_LANES = 1024  # offsets read at once at most


def _arguments(layout: Layout, q: Tensor, k: Tensor) -> dict[str, Any]:
    """Keyword arguments shared by the kernels."""
    return {
        "offsets_q": q if layout.offsets_q is None else layout.offsets_q,
        "offsets_k": q if layout.offsets_k is None else layout.offsets_k,
        "sequences": layout.sequences,
        "pitch_q": q.shape[1],
        "pitch_k": k.shape[1],
        "capacity_q": q.shape[0] * q.shape[1],
        "capacity_k": k.shape[0] * k.shape[1],
        "scale2": layout.scale * math.log2(math.e),
        "LAYOUT_Q": _kind(layout, layout.offsets_q),
        "LAYOUT_K": _kind(layout, layout.offsets_k),
        "CAUSAL": layout.causal,
        "GROUP": q.shape[2] // k.shape[2],
        "HEAD_DIM": q.shape[3],
        "LANES": min(_LANES, max(16, power_of_two(layout.sequences))) if layout.packed else 16,
    }


def _kind(layout: Layout, offsets: Tensor | None) -> int:
    kind = PACKED if layout.packed else FULL if offsets is None else PADDED
    return int(kind.value)


def _tiles(layout: Layout, rows: int, block: int) -> int:
    """Programs that cover all rows of a head, whatever the lengths; ``rows`` of one of the batch."""
    if layout.packed:
        return rows // block + layout.sequences
    return layout.sequences * -(-rows // block)


def _config(layout: Layout, tunable: Tunable, q: Tensor) -> Config:
    """The configuration of this problem."""
    return config_of(tunable, key_of(q, layout))


def _strides(**tensors: Tensor) -> dict[str, int]:
    """Strides of batch, rows and heads in units of ALIGN elements; those of a dimension of one are never used."""
    found = {
        f"{part}_{n}": x.stride(i) if x.shape[i] > 1 else 0
        for n, x in tensors.items()
        for i, part in enumerate(("batch", "row", "head"))
    }
    align = _WIDE if all(stride % _WIDE == 0 for stride in found.values()) else 1
    return {**{name: stride // align for name, stride in found.items()}, "ALIGN": align}


def dense_heads(x: Tensor) -> Tensor:
    """x itself if its head elements are neighbours (in a part of a fused projection they are), else a copy."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _constants(config: Config, head_dim: int) -> dict[str, int]:
    low, high = head_parts(head_dim, bool(config["SPLIT"]))
    chosen = {name: value for name, value in config.keywords().items() if name != "SPLIT"}
    return {**chosen, "LOW": low, "HIGH": high}


def terms_width(config: Config) -> int:
    """Columns in which ``backward_keys`` loads two numbers a query: at least one element a thread; see there."""
    return max(2, 32 * config.num_warps // config["BLOCK_M"])


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """out like q, and the base-2 log-sum-exp fp32 [heads, capacity_q]."""
    batch, rows, heads, head_dim = q.shape
    lse = q.new_empty((heads, batch * rows), dtype=torch.float32)
    if rows == 0 or layout.sequences == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format), lse.fill_(math.inf)
    q, k, v = map(dense_heads, (q, k, v))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    config = config or _config(layout, FORWARD, q)
    grid = (_tiles(layout, rows, config["BLOCK_M"]) * heads,)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernels.forward[grid](
            q=q, k=k, v=v, out=out, lse=lse, heads=heads,
            **_arguments(layout, q, k), **_strides(q=q, k=k, v=v), **_constants(config, head_dim),
        )  # fmt: skip
    return out, lse


def launch_dq(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """dq like q, and for ``launch_dkv`` -lse and sum(out * gradient), fp32 [heads, capacity_q, 2]."""
    _, rows, heads, head_dim = q.shape
    terms = lse.new_empty((*lse.shape, 2))
    if rows == 0 or layout.sequences == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format), terms.zero_()
    q, k, v, gradient = map(dense_heads, (q, k, v, gradient))
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    config = config or _config(layout, DQ, q)
    grid = (_tiles(layout, rows, config["BLOCK_M"]) * heads,)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernels.backward_queries[grid](
            q=q, k=k, v=v, out=out, gradient=gradient, lse=lse, terms=terms, dq=dq, heads=heads, scale=layout.scale,
            **_arguments(layout, q, k), **_strides(q=q, k=k, v=v, g=gradient), **_constants(config, head_dim),
        )  # fmt: skip
    return dq, terms


def launch_dkv(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Tensor,
    layout: Layout,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """dk and dv, like k and v."""
    _, rows, kv_heads, head_dim = k.shape
    if rows == 0 or layout.sequences == 0:
        return tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v))  # type: ignore[return-value]
    q, k, v, gradient = map(dense_heads, (q, k, v, gradient))
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    config = config or _config(layout, DKV, q)
    grid = (_tiles(layout, rows, config["BLOCK_N"]) * kv_heads,)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernels.backward_keys[grid](
            q=q, k=k, v=v, gradient=gradient, terms=terms, dk=dk, dv=dv, kv_heads=kv_heads, scale=layout.scale,
            TERMS=terms_width(config), **_arguments(layout, q, k), **_strides(q=q, k=k, v=v, g=gradient),
            **_constants(config, head_dim),
        )  # fmt: skip
    return dk, dv


@custom_op("lf_graph::attention_forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor | None,
    sequences: int,
    packed: bool,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See :func:`launch_forward`."""
    return launch_forward(q, k, v, Layout(offsets_q, offsets_k, sequences, packed, causal, scale))


@custom_op("lf_graph::attention_dq", mutates_args=())
def backward_queries(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor | None,
    sequences: int,
    packed: bool,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See :func:`launch_dq`."""
    layout = Layout(offsets_q, offsets_k, sequences, packed, causal, scale)
    return launch_dq(gradient, q, k, v, out, lse, layout)


@custom_op("lf_graph::attention_dkv", mutates_args=())
def backward_keys(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor | None,
    sequences: int,
    packed: bool,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See :func:`launch_dkv`."""
    layout = Layout(offsets_q, offsets_k, sequences, packed, causal, scale)
    return launch_dkv(gradient, q, k, v, terms, layout)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty((q.shape[2], q.shape[0] * q.shape[1]), dtype=torch.float32)


@backward_queries.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return _like(q), lse.new_empty((*lse.shape, 2))


@backward_keys.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(k), _like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets_q, offsets_k, *ctx.constants = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, offsets_q, offsets_k, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, offsets_q, offsets_k, out, lse = ctx.saved_tensors
    rest = (offsets_q, offsets_k, *ctx.constants)
    dq, terms = backward_queries(gradient, q, k, v, out, lse, *rest)
    dk, dv = None, None
    if any(ctx.needs_input_grad[1:3]):
        dk, dv = backward_keys(gradient, q, k, v, terms, *rest)
    return dq, dk, dv, *(None for _ in rest)


forward.register_autograd(_differentiate, setup_context=_keep)


def batched(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Attention over [batch, rows, heads, head_dim]; packed rows are a batch of one."""
    out: Tensor = forward(
        q,
        k,
        v,
        layout.offsets_q,
        layout.offsets_k,
        layout.sequences,
        layout.packed,
        layout.causal,
        layout.scale,
    )[0]
    return out
