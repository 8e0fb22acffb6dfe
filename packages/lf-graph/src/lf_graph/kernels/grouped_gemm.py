"""Matrix products of rows sorted by expert with each expert's own weight; offsets stay on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lf_graph.kernels._checks import allow_tensors, require_tensors
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._inputs import no_autocast, runs_on_triton, widened


def grouped_gemm(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    *,
    tokens: Tensor | None = None,
    rows: Tensor | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """``y[r] = x[r] @ weights[e]`` for the rows ``offsets[e - 1] <= r < offsets[e]`` of each expert e.

    Every shape is a function of the inputs' shapes, and nothing is read back: it can be part of a CUDA graph. Rows from
    ``offsets[-1]`` on belong to no expert; they are exactly zero in the output and bring no gradient, whatever x holds
    there. Sums are in float32 and in fixed order: outputs and gradients repeat bit for bit. Under autocast x and
    weights are cast to its dtype.

    Args:
        x: float [R, K]; or [T, K] with ``tokens``, whose rows are then read where they are.
        weights: [E, K, N] of the dtype of x; for weights stored [E, N, K], give ``weights.transpose(1, 2)``. The
            gradient has the same memory layout.
        offsets: int32 [E], the end row of each expert, not decreasing; on the device of x.
        tokens: int32 or int64 [R]: row r of the product is ``x[tokens[r]]``.
        rows: int64 [T, top_k], the rows of each token; needed for the gradient of x when ``tokens`` is given, which
            adds them in float32.
        implementation: Triton, the plain twin (every expert on every row: exact, and E times the work), or Triton
            where it runs.

    Returns:
        [R, N] of the dtype of x.

    Raises:
        ValueError: shapes that do not fit, or a gradient for x without ``rows``.
        TypeError: dtypes that do not fit.
        KernelUnavailableError: ``implementation="triton"`` cannot run here.
    """
    require_tensors("grouped_gemm", x=x, weights=weights, offsets=offsets)
    allow_tensors("grouped_gemm", tokens=tokens, rows=rows)
    x, weights = autocast(x, weights)
    check_product(x, weights, offsets, tokens, rows)
    if tokens is not None and rows is None and x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "grouped_gemm: x wants a gradient; give rows [T, top_k], the rows of each of its tokens"
        )
    triton = runs_on_triton("grouped_gemm", implementation, x)
    with no_autocast(x.device):
        out: Tensor = _GroupedGemm.apply(x, weights, offsets, tokens, rows, triton)  # type: ignore[no-untyped-call]
    return out


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the autocast dtype of their device, where autocast is on."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors)


def check_product(
    x: Tensor, weights: Tensor, offsets: Tensor, tokens: Tensor | None, rows: Tensor | None
) -> None:
    """Refuses what does not fit; see :func:`grouped_gemm`."""
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[1]:
        raise ValueError(
            f"grouped_gemm: x {tuple(x.shape)} and weights {tuple(weights.shape)} must be [R, K] and [E, K, N]"
        )
    if x.dtype != weights.dtype:
        raise TypeError(f"grouped_gemm: x is {x.dtype}, weights {weights.dtype}; cast one, or use autocast")
    if offsets.dtype != torch.int32:
        raise TypeError(f"grouped_gemm: offsets are {offsets.dtype}; they must be int32 end rows")
    if offsets.shape != weights.shape[:1]:
        raise ValueError(f"grouped_gemm: {tuple(offsets.shape)} offsets for {weights.shape[0]} experts")
    given = {"weights": weights, "offsets": offsets, "tokens": tokens, "rows": rows}
    for name, t in given.items():
        if t is not None and t.device != x.device:
            raise ValueError(f"grouped_gemm: {name} on {t.device}, x on {x.device}; move it there")
    if tokens is not None and (tokens.ndim != 1 or tokens.dtype not in (torch.int32, torch.int64)):
        raise TypeError(f"grouped_gemm: tokens are {tokens.dtype} {tuple(tokens.shape)}; give int64 [R]")
    if rows is not None and (rows.ndim != 2 or rows.dtype != torch.int64 or rows.shape[0] != x.shape[0]):
        raise ValueError(
            f"grouped_gemm: rows are {rows.dtype} {tuple(rows.shape)}; give int64 [{x.shape[0]}, top_k]"
        )


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        offsets: Tensor,
        tokens: Tensor | None,
        rows: Tensor | None,
        triton: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, w, offsets, tokens, rows)
        ctx.triton = triton
        return parts(triton).product(x, w, offsets, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w, offsets, tokens, rows = ctx.saved_tensors
        of, grad_x, grad_w = parts(ctx.triton), None, None
        if ctx.needs_input_grad[0]:
            grad_x = of.product(grads[0], w.transpose(1, 2), offsets, None)
            grad_x = grad_x if tokens is None else of.sum_rows(grad_x, rows)
        if ctx.needs_input_grad[1]:
            grad_w = of.weight_gradient(x, grads[0], offsets, tokens, None, w.stride(2) != 1)
        return grad_x, grad_w, None, None, None, None


@dataclass(frozen=True)
class Parts:
    """What products of groups and their gradients are made of; both implementations have them.

    Attributes:
        product: (x, w [E, K, N], offsets, tokens) -> [R, N]; row r reads ``x[tokens[r]]``.
        weight_gradient: (x, grad, offsets, tokens of x, tokens of grad, transposed) -> [E, K, N], for each expert
            ``x[its rows].T @ grad[its rows]``, in memory [E, N, K] if transposed.
        sum_rows: (y [R, C], rows [T, top_k]) -> [T, C], the sum of each token's rows.
    """

    product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool], Tensor]
    sum_rows: Callable[[Tensor, Tensor], Tensor]


def parts(triton: bool) -> Parts:
    """Kernels, or their plain twins."""
    if not triton:
        return Parts(product_plain, weight_gradient_plain, sum_rows_plain)
    from lf_graph.kernels import _grouped_gemm_launch as kernels

    return Parts(kernels.product, kernels.weight_gradient, kernels.sum_rows)


def _members(offsets: Tensor, rows: int) -> list[Tensor]:
    """For each expert, bool [rows, 1]: whether a row is one of its."""
    row = torch.arange(rows, device=offsets.device)
    starts = offsets - torch.diff(offsets, prepend=offsets.new_zeros(1))
    return [((row >= starts[e]) & (row < offsets[e]))[:, None] for e in range(offsets.shape[0])]


def _picked(x: Tensor, tokens: Tensor | None) -> Tensor:
    return x if tokens is None else x.index_select(0, tokens)


def product_plain(x: Tensor, w: Tensor, offsets: Tensor, tokens: Tensor | None) -> Tensor:
    """Every expert on every row, then a choice: static shapes on any device, float64 too."""
    picked = widened(_picked(x, tokens))
    out = picked.new_zeros(picked.shape[0], w.shape[2])
    for member, weight in zip(_members(offsets, picked.shape[0]), w, strict=True):
        out = torch.where(member, picked @ widened(weight), out)
    return out.to(x.dtype)


def weight_gradient_plain(
    x: Tensor,
    grad: Tensor,
    offsets: Tensor,
    x_tokens: Tensor | None,
    grad_tokens: Tensor | None,
    transposed: bool,
) -> Tensor:
    """The twin of the kernel's; see :class:`Parts`."""
    picked, upstream = widened(_picked(x, x_tokens)), widened(_picked(grad, grad_tokens))
    zero = picked.new_zeros(())
    found = []
    for member in _members(offsets, picked.shape[0]):
        own, to_own = torch.where(member, picked, zero), torch.where(member, upstream, zero)
        found.append(to_own.t() @ own if transposed else own.t() @ to_own)
    stacked = torch.stack(found).to(x.dtype)
    return stacked.transpose(1, 2) if transposed else stacked


def sum_rows_plain(y: Tensor, rows: Tensor) -> Tensor:
    """The twin of the kernel's; see :class:`Parts`."""
    picked = widened(y).index_select(0, rows.flatten()).view(*rows.shape, y.shape[1])
    return picked.sum(dim=1).to(y.dtype)
