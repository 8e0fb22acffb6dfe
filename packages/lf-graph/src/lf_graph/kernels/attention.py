"""Attention over sequences of different lengths, which are read from device memory.

A captured graph replays it with other lengths: nothing but capacities and the number of sequences is in the graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from lf_graph.kernels import _attention_choice as choice
from lf_graph.kernels import _attention_ways as ways
from lf_graph.kernels._attention_layout import Layout
from lf_graph.kernels._attention_plain import plain
from lf_graph.kernels._checks import allow_tensors, require_tensors
from lf_graph.kernels._choice import Implementation, KernelUnavailableError, count
from lf_graph.kernels._inputs import runs_on_triton

AttentionImplementation = Literal["auto", "triton", "plain", "varlen_attn", "flash", "cudnn", "flex"]
_WIDEST_HEAD = 256
Operands = tuple[Tensor, Tensor, Tensor]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Softmax(q @ k^T * scale) @ v within each of the packed sequences.

    Args:
        q: [capacity_q, heads, head_dim], bf16, fp16 or fp32 (fp64 always runs the plain implementation), head_dim up
            to 256. Sequence i owns rows ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]``.
        k, v: [capacity_k, kv_heads, head_dim] of the same dtype; query head h uses head ``h // (heads / kv_heads)``.
        cu_seqlens_q: int32 [sequences + 1] on the device of q: 0, then rising by the lengths, each of which may be 0.
            The last may be below the capacity. The host never reads its values, so none are refused: others give
            numbers without meaning, and no memory outside is touched.
        cu_seqlens_k: the same for k and v; default: that of q.
        causal: query i of n sees the keys up to ``i + keys - n``: the last query sees the last key, as in
            FlashAttention from 2.1 on.
        scale: of the scores, not negative; default ``head_dim ** -0.5``.
        implementation: Triton, the plain twin, or Triton where it runs.

    Returns:
        Like q. Queries that see no key give zeros. Rows of no sequence give zeros, and get gradients of zero, whatever
        they hold, NaN included. The kernels multiply fp32 operands as three products of tf32.

    Raises:
        TypeError: dtypes that differ or are not supported, or offsets that are not int32.
        ValueError: shapes, devices or a scale that do not fit.
        KernelUnavailableError: Triton was asked for and cannot run here.

    Under autocast q, k and v are cast to its dtype. Gradients are bitwise repeatable. The plain implementation takes
    memory for all capacity_q x capacity_k scores.
    """
    operands, layout = _packed("varlen_attention", q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale)
    return _ours("varlen_attention", operands, layout, implementation)


def attention_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_q: Tensor | None = None,
    lengths_k: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Softmax(q @ k^T * scale) @ v of sequences padded to the same number of rows.

    Args:
        q: [batch, rows_q, heads, head_dim], with any strides of batch, rows and heads.
        k, v: [batch, rows_k, kv_heads, head_dim].
        lengths_q: int32 [batch] on the device of q: how many first rows of each sequence are used; default: all. Values
            are clamped to 0 and rows_q, and never read by the host.
        lengths_k: the same for k and v; default: all, or ``lengths_q`` if rows_k is rows_q.
        causal, scale, implementation: as in :func:`varlen_attention`.

    Returns:
        Like q; see :func:`varlen_attention`, also for errors.
    """
    operands, layout = _padded("attention_lengths", q, k, v, lengths_q, lengths_k, causal, scale)
    return _ours("attention_lengths", operands, layout, implementation)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    lengths_q: Tensor | None = None,
    lengths_k: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    implementation: AttentionImplementation = "auto",
) -> Tensor:
    """Attention by the fastest way for this card and these shapes; the contract of ours, whichever it is.

    The tables of ``lf_graph.tune`` say which way that is, among those that repeat to the bit: a backward that adds by
    atomics is never taken by itself. Where nothing was measured, it is ours. ``choices`` counts what was taken and why.

    Args:
        q, k, v: packed rows [rows, heads, head_dim] as :func:`varlen_attention` takes them, or padded ones
            [batch, rows, heads, head_dim] as :func:`attention_lengths` takes them.
        cu_seqlens_q, cu_seqlens_k: of packed rows.
        lengths_q, lengths_k: of padded rows.
        causal, scale: as there.
        implementation: ``triton`` (ours), ``plain``, ``varlen_attn`` (FlashAttention-2 in torch, packed rows),
            ``flash`` or ``cudnn`` (torch's scaled_dot_product_attention, padded rows), ``flex`` (FlexAttention,
            compiled at first use), or ``auto``.

    Returns:
        Like q.

    Raises:
        TypeError, ValueError: as there; or lengths of the other kind of rows.
        KernelUnavailableError: the implementation asked for cannot compute this call; the message says why.
    """
    require_tensors("attention", q=q)
    if q.dim() == 3:
        if cu_seqlens_q is None or lengths_q is not None or lengths_k is not None:
            raise ValueError(
                "attention: q has 3 dimensions, so its rows are packed: give cu_seqlens_q, no lengths"
            )
        operands, layout = _packed("attention", q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale)
    else:
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise ValueError(
                "attention: cu_seqlens are for packed rows, and q does not have their 3 dimensions"
            )
        operands, layout = _padded("attention", q, k, v, lengths_q, lengths_k, causal, scale)
    way = _way_of(operands, layout, implementation)
    if way in ("auto", "triton", "plain") or way not in choice.NAMES:
        return _ours("attention", operands, layout, way)  # type: ignore[arg-type]
    return _batched(functools.partial(ways.run, way), operands, layout)


def _packed(
    operator: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Operands, Layout]:
    """Checked arguments on packed rows."""
    require_tensors(operator, q=q, k=k, v=v, cu_seqlens_q=cu_q)
    allow_tensors(operator, cu_seqlens_k=cu_k)
    cu_k = cu_q if cu_k is None else cu_k
    operands = _autocast(q, k, v)
    _check_operands(operator, *operands, 3)
    _check_offsets("cu_seqlens_q", cu_q, q)
    _check_offsets("cu_seqlens_k", cu_k, q)
    if cu_q.shape != cu_k.shape:
        raise ValueError(f"cu_seqlens_q has {len(cu_q)} entries, cu_seqlens_k has {len(cu_k)}")
    if len(cu_q) == 0:
        raise ValueError("cu_seqlens_q is empty: it holds a first 0 and the end of each sequence")
    return operands, Layout(cu_q, cu_k, len(cu_q) - 1, True, causal, _scale(scale, q.shape[2]))


def _padded(
    operator: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_q: Tensor | None,
    lengths_k: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Operands, Layout]:
    """Checked arguments on padded rows."""
    require_tensors(operator, q=q, k=k, v=v)
    allow_tensors(operator, lengths_q=lengths_q, lengths_k=lengths_k)
    operands = _autocast(q, k, v)
    _check_operands(operator, *operands, 4)
    if lengths_k is None and q.shape[1] == k.shape[1]:
        lengths_k = lengths_q
    for name, lengths in (("lengths_q", lengths_q), ("lengths_k", lengths_k)):
        if lengths is not None:
            _check_offsets(name, lengths, q)
            if len(lengths) != len(q):
                raise ValueError(f"{name} has {len(lengths)} entries for a batch of {len(q)}")
    return operands, Layout(lengths_q, lengths_k, len(q), False, causal, _scale(scale, q.shape[3]))


def _ours(operator: str, operands: Operands, layout: Layout, implementation: Implementation) -> Tensor:
    """The kernels or their plain twin."""
    if not runs_on_triton(operator, implementation, operands[0]):
        return _batched(plain, operands, layout)
    from lf_graph.kernels import _attention_triton as kernels

    return _batched(kernels.batched, operands, layout)


def _batched(
    fn: Callable[[Tensor, Tensor, Tensor, Layout], Tensor], operands: Operands, layout: Layout
) -> Tensor:
    """``fn`` over [batch, rows, heads, head_dim]; packed rows are a batch of one."""
    if not layout.packed:
        return fn(*operands, layout)
    q, k, v = operands
    return fn(q[None], k[None], v[None], layout).squeeze(0)  # [0] would copy in the backward


def _way_of(operands: Operands, layout: Layout, implementation: str) -> str:
    """The name of an implementation that can compute this call.

    Raises:
        KernelUnavailableError: the one that was asked for cannot.
    """
    q, k, v = (x[None] if layout.packed else x for x in operands)
    if implementation in choice.NAMES[1:]:
        if obstacle := ways.obstacle(implementation, q, k, layout):
            raise KernelUnavailableError(f"attention: implementation={implementation!r}: {obstacle}")
        return implementation
    if implementation != "auto" or not choice.is_measured(q):
        return implementation
    way, reason = choice.fastest(choice.key_of(q, k, v, layout))
    obstacle = None if way == "triton" else ways.obstacle(way, q, k, layout)
    if obstacle:
        way, reason = "triton", f"{way} would be faster, but {obstacle}"
    count("attention", way, reason)
    return str(way)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> Operands:
    """As torch's own attention does: everything in the dtype of autocast."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if not 0 <= scale < math.inf:
        raise ValueError(f"scale={scale}: it must be finite and not negative; negate q instead")
    return float(scale)


def _check_operands(operator: str, q: Tensor, k: Tensor, v: Tensor, dim: int) -> None:
    """Raises for shapes, dtypes or devices that do not belong together."""
    if not q.dim() == k.dim() == v.dim() == dim:
        raise ValueError(f"{operator}: q, k, v need {dim} dimensions, got {q.dim()}, {k.dim()}, {v.dim()}")
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise TypeError(
            f"{operator}: q, k, v must be of one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"{operator}: q, k, v are on {q.device}, {k.device}, {v.device}")
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if k.shape != v.shape or k.shape[-1] != q.shape[-1] or (dim == 4 and len(q) != len(k)):
        raise ValueError(f"{operator}: k and v need one shape, with the head (and batch) size of q; {shapes}")
    if not 0 < q.shape[-1] <= _WIDEST_HEAD:
        raise ValueError(f"{operator}: the head size must be 1 to {_WIDEST_HEAD}; {shapes}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] or q.shape[-2] == 0:
        raise ValueError(f"{operator}: the heads of q must be a multiple of those of k; {shapes}")


def _check_offsets(name: str, offsets: Tensor, q: Tensor) -> None:
    if offsets.dtype != torch.int32 or offsets.dim() != 1:
        raise TypeError(
            f"{name} must be int32 [n], got {offsets.dtype} {tuple(offsets.shape)}: use .to(torch.int32)"
        )
    if offsets.device != q.device:
        raise ValueError(f"{name} is on {offsets.device}, q is on {q.device}")
    if not offsets.is_contiguous():
        raise ValueError(f"{name} must be contiguous: use .contiguous()")
