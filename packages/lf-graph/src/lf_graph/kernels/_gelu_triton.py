"""Bias, tanh-GELU and dropout as Triton kernels: bound by memory, 4 bytes an element of bf16 forward and 6 backward.

A tile is 8 rows, which share one call of the random generator, by ``BLOCK`` columns. The backward takes ``GROUPS`` such
tiles one below the other and sums the bias's gradient over them; a second stage sums the tiles' sums. No atomics.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# Triton has no types, and its kernels take no annotations but constexpr.
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from lf_graph.kernels._inputs import as_rows
from lf_graph.kernels._interpreter import cast, fp32, operator, tl, triton
from lf_graph.kernels._partials import sum_partials
from lf_graph.kernels._philox import ROUNDS, ROWS, scale_of, threshold_of
from lf_graph.kernels._tunable import Config, Key, Problem, Tunable, config_of, register
from lf_graph.kernels.gelu import CUBIC, SLOPE

_ROUNDS, _ROWS = tl.constexpr(ROUNDS), tl.constexpr(ROWS)
_SLOPE, _CUBIC = tl.constexpr(SLOPE), tl.constexpr(CUBIC)


@triton.jit
def _words(seed, group, column, DROPOUT: tl.constexpr):
    """128 random bits for each column of a group of 8 rows."""
    if DROPOUT:
        offset = tl.load(seed + 1)
        return tl.philox(
            tl.load(seed),
            column.to(tl.uint32),
            (column * 0 + group).to(tl.uint32),
            (column * 0 + (offset & 0xFFFFFFFF)).to(tl.uint32),
            (column * 0 + ((offset >> 32) & 0xFFFFFFFF)).to(tl.uint32),
            _ROUNDS,
        )
    else:  # noqa: RET505, Triton compiles one branch of a constexpr if/else
        return column, column, column, column


@triton.jit
def _kept(value, w0, w1, w2, w3, J: tl.constexpr, threshold, scale, DROPOUT: tl.constexpr):
    """Row J of 8: scaled, or 0 where its 16 bits are below the threshold."""
    if DROPOUT:
        if J < 2:
            word = w0
        elif J < 4:
            word = w1
        elif J < 6:
            word = w2
        else:
            word = w3
        drawn = ((word >> (16 * (J % 2))) & 0xFFFF).to(tl.int32)
        return tl.where(drawn >= threshold, value * fp32(scale), 0.0)
    else:  # noqa: RET505
        return value


@triton.jit
def gelu_forward(
    x, bias, seed, out, rows, columns, stride, threshold, scale,
    BIAS: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """out = dropout(gelu(x + bias)); grid (chunks of GROUPS * 8 rows, blocks of columns)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    shift = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    for i in range(GROUPS):
        group = tl.program_id(0) * GROUPS + i
        w0, w1, w2, w3 = _words(seed, group, column, DROPOUT)
        for j in tl.static_range(_ROWS):
            row = group.to(tl.int64) * _ROWS + j
            mask = column < tl.where(row < rows, columns, 0)
            v = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32) + shift
            v = v * tl.sigmoid(v * (1 + v * v * _CUBIC) * _SLOPE)
            v = _kept(v, w0, w1, w2, w3, j, threshold, scale, DROPOUT)
            tl.store(out + row * columns + column, cast(v, out.dtype.element_ty), mask=mask)


@triton.jit
def gelu_backward(
    grad, x, bias, seed, grad_x, partials, rows, columns, grad_stride, stride, threshold, scale,
    BIAS: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """grad_x, and partials[chunk] = its sum over the rows of a chunk."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    shift = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    for i in range(GROUPS):
        group = tl.program_id(0) * GROUPS + i
        w0, w1, w2, w3 = _words(seed, group, column, DROPOUT)
        for j in tl.static_range(_ROWS):
            row = group.to(tl.int64) * _ROWS + j
            mask = column < tl.where(row < rows, columns, 0)
            v = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32) + shift
            d = tl.load(grad + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
            d = _kept(d, w0, w1, w2, w3, j, threshold, scale, DROPOUT)
            s = tl.sigmoid(v * (1 + v * v * _CUBIC) * _SLOPE)
            d = d * (s + v * s * (1 - s) * (1 + v * v * (3 * _CUBIC)) * _SLOPE)
            tl.store(grad_x + row * columns + column, cast(d, grad_x.dtype.element_ty), mask=mask)
            if BIAS:
                total += tl.where(mask, d, 0.0)
    if BIAS:
        tl.store(partials + tl.program_id(0).to(tl.int64) * columns + column, total, mask=inside)


_HEIGHTS = (1024, 4096, 16384)
"""Buckets of rows: many rows take more groups a program, or sums of programs would be much of the memory moved."""


def _candidates(key: Key) -> list[Config]:
    groups = {1024: (1, 2), 4096: (1, 2, 4), 16384: (4, 8, 16)}[int(key[4])]
    return [
        Config((("BLOCK", b), ("GROUPS", g)), w)
        for b in (256, 512, 1024)
        for g in groups
        for w in (1, 2, 4)
        if 128 * w <= b <= 256 * w
    ]


def _default(key: Key) -> Config:
    groups = {1024: 1, 4096: 2, 16384: 8}[int(key[4])]
    return Config((("BLOCK", 512), ("GROUPS", groups)), 2)  # 16 bytes of bf16 a thread and row


def _key(x: Tensor, bias: bool, dropout: bool) -> Key:
    """Dtype, whether with bias and dropout, the columns up to the next power of two, and a bucket of rows."""
    columns = triton.next_power_of_2(max(int(x.shape[1]), 1))
    height = next((h for h in _HEIGHTS if x.shape[0] <= h), _HEIGHTS[-1])
    return str(x.dtype).removeprefix("torch."), bias, dropout, columns, height


def _problem(key: Key, device: torch.device) -> Problem:
    """Forward and backward."""
    from lf_graph.kernels.gelu import gelu_tanh_plain

    dtype, p, columns, rows = getattr(torch, str(key[0])), 0.2 if key[2] else 0.0, int(key[3]), int(key[4])
    x, grad = (torch.randn(rows, columns, device=device).to(dtype) for _ in range(2))
    bias = torch.randn(columns, device=device) if key[1] else None
    seed = torch.tensor([1, 2], device=device) if key[2] else None

    def run(config: Config) -> tuple[Tensor, ...]:
        out = torch.empty_like(x)
        _launch_forward(x, bias, seed, p, out, config)
        grad_x, grad_bias = _launch_backward(grad, x, bias, seed, p, config)
        return (out, grad_x) if grad_bias is None else (out, grad_x, grad_bias)

    leaves = [t.detach().double().requires_grad_() for t in (x, bias) if t is not None]
    out = gelu_tanh_plain(leaves[0], None if bias is None else leaves[1], p, seed)
    reference = (out.detach(), *torch.autograd.grad(out, leaves, grad.double()))
    tolerance = 1e-2 if dtype != torch.float32 else 1e-5
    return Problem(run, reference, (tolerance,) * len(reference))


TUNABLE = register(Tunable("gelu_tanh", (gelu_forward, gelu_backward), _default, _candidates, _problem))


def _grid(x: Tensor, config: Config) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], ROWS * config["GROUPS"]), triton.cdiv(x.shape[1], config["BLOCK"])


def _launch_forward(
    x: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, out: Tensor, config: Config
) -> None:
    """x [rows, C] with any row stride, out contiguous."""
    if not x.numel():
        return
    with torch.cuda.device_of(x):  # Triton launches on the current device
        wrap_triton(gelu_forward)[_grid(x, config)](
            x, x if bias is None else bias, x if seed is None else seed, out, *x.shape, x.stride(0),
            threshold_of(p), scale_of(p), BIAS=bias is not None, DROPOUT=seed is not None, **config.keywords(),
        )  # fmt: skip


def _launch_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, config: Config
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x, contiguous, and of the bias."""
    grad_x = x.new_empty(x.shape)
    chunks = _grid(x, config)[0] if bias is not None else 0
    partials = x.new_empty(chunks, x.shape[1], dtype=torch.float32)
    if x.numel():
        with torch.cuda.device_of(x):
            wrap_triton(gelu_backward)[_grid(x, config)](
                grad, x, x if bias is None else bias, x if seed is None else seed, grad_x, partials, *x.shape,
                grad.stride(0), x.stride(0), threshold_of(p), scale_of(p),
                BIAS=bias is not None, DROPOUT=seed is not None, **config.keywords(),
            )  # fmt: skip
    return grad_x, None if bias is None else sum_partials(partials, bias.dtype)


@operator("lf_graph::gelu_tanh")
def forward(x: Tensor, bias: Tensor | None, seed: Tensor | None, p: float) -> Tensor:
    """See :func:`lf_graph.kernels.gelu_tanh`."""
    out = x.new_empty(x.shape)
    rows = as_rows(x)
    config = config_of(TUNABLE, _key(rows, bias is not None, seed is not None))
    _launch_forward(rows, None if bias is None else bias.contiguous(), seed, p, out, config)
    return out


@operator("lf_graph::gelu_tanh_backward")
def backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, seed: Tensor | None, p: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x and bias (empty without one)."""
    rows = as_rows(x)
    config = config_of(TUNABLE, _key(rows, bias is not None, seed is not None))
    flat_bias = None if bias is None else bias.contiguous()
    grad_x, grad_bias = _launch_backward(as_rows(grad), rows, flat_bias, seed, p, config)
    return grad_x.view(x.shape), x.new_empty(0) if grad_bias is None else grad_bias


def _fake_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, seed: Tensor | None, p: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if bias is None else bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor | None, float], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.p = inputs[3]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
    x, bias, seed = ctx.saved_tensors
    grad_x, grad_bias = backward(grad, x, bias, seed, ctx.p)
    return grad_x, None if bias is None else grad_bias, None, None


forward.register_fake(lambda x, bias, seed, p: x.new_empty(x.shape))
backward.register_fake(_fake_backward)
forward.register_autograd(_backward, setup_context=_save)
