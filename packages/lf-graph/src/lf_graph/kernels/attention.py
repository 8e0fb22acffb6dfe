"""Attention over sequences of different lengths, which are read from device memory.

A captured graph replays it with other lengths: nothing but capacities and the number of sequences is in the graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._inputs import runs_on_triton

_WIDEST_HEAD = 256


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
            The last may be below the capacity. The host never reads its values.
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
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    q, k, v = _autocast(q, k, v)
    _check_operands("varlen_attention", q, k, v, 3)
    _check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    _check_offsets("cu_seqlens_k", cu_seqlens_k, q)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q has {len(cu_seqlens_q)} entries, cu_seqlens_k has {len(cu_seqlens_k)}"
        )
    if len(cu_seqlens_q) == 0:
        raise ValueError("cu_seqlens_q is empty: it holds a first 0 and the end of each sequence")
    scale = _scale(scale, q.shape[2])
    if not runs_on_triton("varlen_attention", implementation, q):
        visible = _packed_mask(len(q), len(k), cu_seqlens_q, cu_seqlens_k, causal)
        return _plain(q[None], k[None], v[None], visible[None], scale)[0]
    return _triton(q, k, v, cu_seqlens_q, cu_seqlens_k, len(cu_seqlens_q) - 1, True, causal, scale)


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
        q: [batch, rows_q, heads, head_dim]. A view in which batch and rows cannot be merged is copied.
        k, v: [batch, rows_k, kv_heads, head_dim].
        lengths_q: int32 [batch] on the device of q: how many first rows of each sequence are used; default: all. Values
            are clamped to 0 and rows_q, and never read by the host.
        lengths_k: the same for k and v; default: all, or ``lengths_q`` if rows_k is rows_q.
        causal, scale, implementation: as in :func:`varlen_attention`.

    Returns:
        Like q; see :func:`varlen_attention`, also for errors.
    """
    if lengths_k is None and q.shape[1:2] == k.shape[1:2]:
        lengths_k = lengths_q
    q, k, v = _autocast(q, k, v)
    _check_operands("attention_lengths", q, k, v, 4)
    for name, lengths in (("lengths_q", lengths_q), ("lengths_k", lengths_k)):
        if lengths is not None:
            _check_offsets(name, lengths, q)
            if len(lengths) != len(q):
                raise ValueError(f"{name} has {len(lengths)} entries for a batch of {len(q)}")
    scale = _scale(scale, q.shape[3])
    if not runs_on_triton("attention_lengths", implementation, q):
        return _plain(q, k, v, _padded_mask(q, k, lengths_q, lengths_k, causal), scale)
    rows = (x.flatten(0, 1) for x in (q, k, v))
    return _triton(*rows, lengths_q, lengths_k, len(q), False, causal, scale).view(q.shape)


def _triton(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | int | bool | float | None) -> Tensor:
    from lf_graph.kernels import _attention_triton as kernels

    out: Tensor = kernels.forward(q, k, v, *rest)[0]
    return out


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As torch's own attention does: everything in the dtype of autocast."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


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


def _packed_mask(capacity_q: int, capacity_k: int, cu_q: Tensor, cu_k: Tensor, causal: bool) -> Tensor:
    """bool [capacity_q, capacity_k]: which query sees which key."""
    row_q, row_k = (torch.arange(n, dtype=torch.int32, device=cu_q.device) for n in (capacity_q, capacity_k))
    sequence_q, sequence_k = _owners(row_q, cu_q), _owners(row_k, cu_k)
    visible = (sequence_q[:, None] == sequence_k) & _owned(row_q, cu_q)[:, None] & _owned(row_k, cu_k)
    if causal:  # by the distance to the end of the sequence
        to_end_q = _ends(sequence_q, cu_q) - row_q
        to_end_k = _ends(sequence_k, cu_k) - row_k
        visible &= to_end_k >= to_end_q[:, None]
    return visible


def _owners(rows: Tensor, cu: Tensor) -> Tensor:
    """How many sequences end at or before each row, which is the sequence of the row."""
    return (rows[:, None] >= cu[1:]).sum(1)


def _owned(rows: Tensor, cu: Tensor) -> Tensor:
    return (rows >= cu[0]) & (rows < cu[-1])


def _ends(sequences: Tensor, cu: Tensor) -> Tensor:
    return cu[(sequences + 1).clamp(max=len(cu) - 1)]


def _padded_mask(
    q: Tensor, k: Tensor, lengths_q: Tensor | None, lengths_k: Tensor | None, causal: bool
) -> Tensor:
    """bool [batch, rows_q, rows_k]: which query sees which key."""
    row_q, row_k = (torch.arange(x.shape[1], dtype=torch.int32, device=q.device) for x in (q, k))
    n_q, n_k = (_clamped(n, x) for n, x in ((lengths_q, q), (lengths_k, k)))
    visible = (row_q < n_q[:, None])[:, :, None] & (row_k < n_k[:, None])[:, None, :]
    if causal:
        visible &= row_k <= row_q[:, None] + (n_k - n_q)[:, None, None]
    return visible


def _clamped(lengths: Tensor | None, x: Tensor) -> Tensor:
    if lengths is None:
        return torch.full((len(x),), x.shape[1], dtype=torch.int32, device=x.device)
    return lengths.clamp(0, x.shape[1])


def _plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention [batch, rows, heads, head_dim] under a mask [batch, rows_q, rows_k], in fp32 or fp64."""
    with torch.autocast(q.device.type, enabled=False):
        return _formula(q, k, v, visible, scale)


def _formula(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    dtype = q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    used_q, used_k = visible.any(2)[:, :, None, None], visible.any(1)[:, :, None, None]
    q = torch.where(used_q, q, 0).to(wide)  # rows that nothing uses may hold NaN
    k, v = (torch.where(used_k, x, 0).to(wide) for x in (k, v))
    groups = q.unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bmhgd,bnhd->bhgmn", groups, k) * scale
    hidden = ~visible[:, None, None]
    scores = scores.masked_fill(hidden, torch.finfo(wide).min)
    weights = scores.softmax(-1).masked_fill(hidden, 0)
    out = torch.einsum("bhgmn,bnhd->bmhgd", weights, v).flatten(2, 3).to(dtype)
    return torch.where(used_q, out, 0)  # so may their gradients
