"""Problems for attention, with NaN in every row that no sequence owns, and a float64 reference sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kernel_cases import DEVICE, EPSILON
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Results = tuple[Tensor, Tensor, Tensor, Tensor]  # out, dq, dk, dv


@dataclass(frozen=True)
class Case:
    """Lengths and shapes of one call on packed rows; ``unused`` rows follow the last sequence."""

    lengths: tuple[int, ...]
    lengths_k: tuple[int, ...] | None = None
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    causal: bool = False
    dtype: torch.dtype = torch.float32
    unused: int = 5
    scale: float | None = None

    @property
    def keys(self) -> tuple[int, ...]:
        return self.lengths if self.lengths_k is None else self.lengths_k

    @property
    def cu_q(self) -> Tensor:
        return cumulative(self.lengths)

    @property
    def cu_k(self) -> Tensor:
        return cumulative(self.keys)

    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "scale": self.scale}


def cumulative(lengths: Sequence[int]) -> Tensor:
    """cu_seqlens, int32 on the device."""
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def rows(case: Case, lengths: Sequence[int], heads: int, generator: torch.Generator) -> Tensor:
    used = sum(lengths)
    x = torch.randn(used + case.unused, heads, case.head_dim, generator=generator)
    x[used:] = float("nan")
    return x.to(DEVICE, case.dtype)


def inputs(case: Case, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    q = rows(case, case.lengths, case.heads, generator)
    k, v = (rows(case, case.keys, case.kv_heads, generator) for _ in range(2))
    return q, k, v, rows(case, case.lengths, case.heads, generator)


def gradients(attention: Attention, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> Results:
    """out, dq, dk and dv of ``attention(q, k, v)``."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, gradient))  # type: ignore[return-value]


def one_sequence(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Attention of [n, heads, d] on [m, kv_heads, d] as the formula says it; zeros where no key is seen."""
    n, m, groups = len(q), len(k), q.shape[1] // k.shape[1]
    if 0 in (n, m):
        return q * 0 + k.sum() * 0 + v.sum() * 0
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    seen = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n if causal else m)
    weights = scores.masked_fill(~seen, float("-inf"))[:, seen.any(1)].softmax(-1)
    out = torch.zeros_like(q)
    out[seen.any(1)] = torch.einsum("hnm,mhd->nhd", weights, v)
    return out


def reference(case: Case, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> Results:
    """What ``gradients`` must return, in float64: zeros for unused rows."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pieces = (x[: sum(n)].split(n) for x, n in ((q, case.lengths), (k, case.keys), (v, case.keys)))
        found = [one_sequence(*one, case.causal, case.scale) for one in zip(*pieces, strict=True)]
        tail = torch.zeros(len(q) - sum(case.lengths), *q.shape[1:], dtype=q.dtype, device=q.device)
        return torch.cat([*found, tail]) + (q.sum() + k.sum() + v.sum()) * 0  # a graph, also of no sequence

    used = [torch.nan_to_num(x.double()) for x in (q, k, v, gradient)]
    return gradients(attention, *used)


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], slack: float = 2.0) -> None:
    """Within ``slack`` roundings of the largest number, or of 1: dq of a single key is a difference of equals."""
    assert len(actual) == len(expected)
    for name, a, r in zip(("out", "dq", "dk", "dv"), actual, expected, strict=False):
        assert a.shape == r.shape
        if a.numel():
            away = float((a.double() - r).abs().max() / r.abs().max().clamp_min(1))
            assert away <= slack * EPSILON[a.dtype], f"{name} is {away:.3g} away"
