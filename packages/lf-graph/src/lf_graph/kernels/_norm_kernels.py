"""RMSNorm and LayerNorm as Triton kernels: one read of x forward, one of x and dy backward.

One family covers all: y = h^ * w + b, where h = x or x + residual, h^ is h normalised with or without its mean, and w
and b are one row for all tokens (weight, bias) or one for each sample (1 + scale, shift of AdaLN). Statistics, products
and sums are fp32. The backward's programs each walk a fixed share of the rows of one sample and leave partial sums of
the gradients of w and b; see ``_partials``.

Sources: RMSNorm arXiv 1910.07467, LayerNorm arXiv 1607.06450, AdaLN arXiv 2212.09748.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# Triton has no types, and its kernels take no annotations but constexpr.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton

from lf_graph.kernels._interpreter import cast, fp32, tl, triton
from lf_graph.kernels._partials import sum_partials
from lf_graph.kernels._rows import dense, row_stride, rows_of, splits_of
from lf_graph.kernels._tiles import places, row_of_sample
from lf_graph.kernels._tunable import Config

# ruff: noqa: N803, constexpr arguments are upper case


@triton.jit(do_not_specialize=["tokens"])
def norm_rows(
    x, x_inner, x_outer_stride, x_inner_stride,
    residual, r_inner, r_outer_stride, r_inner_stride,
    weight, weight_stride, bias, bias_stride, y, summed, statistics, tokens, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr, RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, PER_SAMPLE: tl.constexpr,
):  # fmt: skip
    """Normalises ROWS rows of one sample (of ``tokens`` rows); statistics [1 or 2, rows] = 1/deviation, mean."""
    blocks = tl.cdiv(tokens, ROWS)
    sample = tl.program_id(0) // blocks
    token = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    row = sample * tokens + token
    rows = tl.num_programs(0) // blocks * tokens
    columns = tl.arange(0, BLOCK)
    mask = (token < tokens)[:, None] & (columns < D)[None, :]
    contiguous = row.to(tl.int64)[:, None] * D + columns[None, :]
    h = tl.load(x + places(row, x_inner, x_outer_stride, x_inner_stride, columns), mask=mask, other=0.0)
    h = h.to(tl.float32)
    if RESIDUAL:
        at = places(row, r_inner, r_outer_stride, r_inner_stride, columns)
        stored = cast(
            h + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32), summed.dtype.element_ty
        )
        tl.store(summed + contiguous, stored, mask=mask)
        h = stored.to(tl.float32)  # what the backward will read
    if CENTRED:
        mean = tl.sum(h, axis=1) / D
        tl.store(statistics + rows + row, mean, mask=token < tokens)
        h = tl.where(mask, h - mean[:, None], 0.0)
    inverse = 1 / tl.sqrt(tl.sum(h * h, axis=1) / D + fp32(eps))
    tl.store(statistics + row, inverse, mask=token < tokens)
    h = h * inverse[:, None]
    if WEIGHT:
        w = row_of_sample(weight, sample, weight_stride, columns, D)
        h = h * (w + 1 if PER_SAMPLE else w)
    if BIAS:
        h = h + row_of_sample(bias, sample, bias_stride, columns, D)
    tl.store(y + contiguous, cast(h, y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "splits"])
def norm_rows_backward(
    dy, dy_inner, dy_outer_stride, dy_inner_stride,
    dsummed, ds_inner, ds_outer_stride, ds_inner_stride,
    x, x_inner, x_outer_stride, x_inner_stride,
    weight, weight_stride, statistics, dx, dbranch, partials, tokens, splits,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr, DSUMMED: tl.constexpr,
    WEIGHT: tl.constexpr, PER_SAMPLE: tl.constexpr, BRANCH: tl.constexpr, DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of every splits-th tile of one sample's rows, and their part of dweight and dbias.

    partials fp32 [DWEIGHT + DBIAS, samples, splits, D].
    """
    sample, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    programs = tl.num_programs(0)
    rows = programs // splits * tokens
    columns = tl.arange(0, BLOCK)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    if WEIGHT:
        w = row_of_sample(weight, sample, weight_stride, columns, D)
        if PER_SAMPLE:
            w = w + 1
    for start in tl.range(split * ROWS, tokens, splits * ROWS, num_stages=STAGES):
        token = start + tl.arange(0, ROWS)
        row = sample * tokens + token
        mask = (token < tokens)[:, None] & (columns < D)[None, :]
        at = places(row, dy_inner, dy_outer_stride, dy_inner_stride, columns)
        g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        h = tl.load(x + places(row, x_inner, x_outer_stride, x_inner_stride, columns), mask=mask, other=0.0)
        h = h.to(tl.float32)
        inverse = tl.load(statistics + row, mask=token < tokens, other=0.0)[:, None]
        if CENTRED:
            h = h - tl.load(statistics + rows + row, mask=token < tokens, other=0.0)[:, None]
        h = tl.where(mask, h * inverse, 0.0)
        if DWEIGHT:
            dweight += g * h
        if DBIAS:
            dbias += g
        if WEIGHT:
            g = g * w
        out = g - h * (tl.sum(g * h, axis=1) / D)[:, None]
        if CENTRED:
            out = out - (tl.sum(g, axis=1) / D)[:, None]
        out = out * inverse
        if DSUMMED:
            at = places(row, ds_inner, ds_outer_stride, ds_inner_stride, columns)
            out += tl.load(dsummed + at, mask=mask, other=0.0).to(tl.float32)
        contiguous = row.to(tl.int64)[:, None] * D + columns[None, :]
        tl.store(dx + contiguous, cast(out, dx.dtype.element_ty), mask=mask)
        if BRANCH:
            tl.store(dbranch + contiguous, cast(out, dbranch.dtype.element_ty), mask=mask)
    place = partials + tl.program_id(0).to(tl.int64) * D + columns
    if DWEIGHT:
        tl.store(place, tl.sum(dweight, axis=0), mask=columns < D)
        place += programs.to(tl.int64) * D
    if DBIAS:
        tl.store(place, tl.sum(dbias, axis=0), mask=columns < D)


class Norm(NamedTuple):
    """What a norm computes, of x [..., D] and of ``residual``, its equal in shape, if there is one.

    Attributes:
        weight: [D], one row for all; or [samples, D], AdaLN's scale, to which 1 is added; None is 1.
        bias: [D] or [samples, D] likewise; None is 0.
        centred: subtract the mean (LayerNorm) or not (RMSNorm).
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool

    @property
    def samples(self) -> int:
        """Rows of weight and bias; tokens of x divide evenly among them."""
        return max(
            (w.shape[0] for w in (self.weight, self.bias) if w is not None and w.dim() == 2), default=1
        )

    @property
    def per_sample(self) -> bool:
        """Whether ``weight`` is AdaLN's scale."""
        return self.weight is not None and self.weight.dim() == 2


def norm_forward(
    config: Config, x: Tensor, residual: Tensor | None, norm: Norm, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """y in ``dtype``, x + residual (empty without one) in their common dtype, statistics fp32 [1 or 2, rows]."""
    rows, width = rows_of(x), int(x.shape[-1])
    others = rows if residual is None else rows_of(residual)
    weight, bias = (w if w is None else dense(w) for w in (norm.weight, norm.bias))
    y, summed, statistics = norm_outputs(x, residual, norm.centred, dtype)
    if rows.number == 0 or width == 0:
        return y, summed, statistics
    tokens = rows.number // norm.samples
    with torch.cuda.device_of(x):  # Triton launches on the current device
        wrap_triton(norm_rows)[(norm.samples * triton.cdiv(tokens, config["ROWS"]),)](
            *rows.arguments(), *others.arguments(), x if weight is None else weight, row_stride(weight),
            x if bias is None else bias, row_stride(bias), y, summed, statistics, tokens, norm.eps,
            D=width, BLOCK=triton.next_power_of_2(width), ROWS=config["ROWS"], CENTRED=norm.centred,
            RESIDUAL=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None,
            PER_SAMPLE=norm.per_sample, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return y, summed, statistics


def norm_outputs(
    x: Tensor, residual: Tensor | None, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of ``norm_forward``."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    common = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    summed = x.new_empty((0,) if residual is None else x.shape, dtype=common)
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    return y, summed, x.new_empty((2 if centred else 1, rows), dtype=torch.float32)


class Wanted(NamedTuple):
    """Which gradients a backward computes beside dx.

    Attributes:
        weight: sum of dy * h^.
        bias: sum of dy.
        dtype: of both.
        branch: dtype of a second copy of dx, for the narrower of x and residual; None for no copy.
    """

    weight: bool
    bias: bool
    dtype: torch.dtype
    branch: torch.dtype | None


def norm_backward(
    config: Config,
    dy: Tensor,
    dsummed: Tensor | None,
    x: Tensor,
    norm: Norm,
    statistics: Tensor,
    wanted: Wanted,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (with ``dsummed`` added), its copy (or empty), and sums [weight + bias, samples, D]."""
    rows, width, samples = rows_of(x), int(x.shape[-1]), norm.samples
    grads, adds = rows_of(dy), rows if dsummed is None else rows_of(dsummed)
    weight = None if norm.weight is None else dense(norm.weight)
    dx, branch, _ = backward_outputs(x, samples, wanted)
    number = wanted.weight + wanted.bias
    tokens = rows.number // samples if samples else 0
    splits = splits_of(config["PROGRAMS"], samples, -(-tokens // config["ROWS"]), x.device)
    partials = x.new_empty((number, samples, splits, width), dtype=torch.float32)
    if samples and width:
        with torch.cuda.device_of(x):
            wrap_triton(norm_rows_backward)[(samples * splits,)](
                *grads.arguments(), *adds.arguments(), *rows.arguments(),
                x if weight is None else weight, row_stride(weight), statistics, dx, branch, partials, tokens, splits,
                D=width, BLOCK=triton.next_power_of_2(width), ROWS=config["ROWS"], CENTRED=norm.centred,
                DSUMMED=dsummed is not None, WEIGHT=weight is not None, PER_SAMPLE=norm.per_sample,
                BRANCH=wanted.branch is not None, DWEIGHT=wanted.weight, DBIAS=wanted.bias,
                STAGES=config.num_stages, num_warps=config.num_warps, num_stages=config.num_stages,
            )  # fmt: skip
            return dx, branch, sum_partials(partials, wanted.dtype)
    return dx, branch, partials.sum(2).to(wanted.dtype)


def backward_outputs(x: Tensor, samples: int, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of ``norm_backward``."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    branch = x.new_empty((0,) if wanted.branch is None else x.shape, dtype=wanted.branch or x.dtype)
    sums = x.new_empty((wanted.weight + wanted.bias, samples, x.shape[-1]), dtype=wanted.dtype)
    return dx, branch, sums
