"""What the tuner compares attention with."""

from __future__ import annotations

import torch
from torch import Tensor

from lf_graph.kernels._attention_layout import Layout
from lf_graph.kernels._attention_plain import plain


def exact(
    layout: Layout, pairs: list[tuple[int, int]], q: Tensor, k: Tensor, v: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv in float64 for q, k, v [batch, rows, heads, head_dim]; rows of no sequence stay zero.

    ``pairs`` are the lengths of queries and keys of each sequence. One sequence of one key-value head at a time bounds
    the memory.
    """
    results = tuple(torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, q, k, v))
    group = q.shape[2] // k.shape[2]
    at_q, at_k = 0, 0
    for b, (n, m) in enumerate(pairs):
        row, place, place_k = (0, at_q, at_k) if layout.packed else (b, 0, 0)
        for head in range(k.shape[2]):
            queries = row, slice(place, place + n), slice(head * group, (head + 1) * group)
            keys = row, slice(place_k, place_k + m), slice(head, head + 1)
            places = (queries, queries, keys, keys)
            found = _one(layout, q[queries], k[keys], v[keys], gradient[queries])
            for result, where, x in zip(results, places, found, strict=True):
                result[where] = x
        at_q, at_k = at_q + n, at_k + m
    return results


def _one(layout: Layout, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """The formula on one sequence [rows, heads, head_dim] of one key-value head."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    whole = Layout(None, None, 1, False, layout.causal, layout.scale)
    with torch.enable_grad():
        out = plain(q[None], k[None], v[None], whole)[0]
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), gradient.double()))
