"""x + gate * y as Triton kernels: bound by memory, one read of x and y forward, one of the gradient and y backward."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# Triton has no types, and its kernels take no annotations but constexpr.
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from lf_graph.kernels._interpreter import cast, operator, tl, triton
from lf_graph.kernels._partials import add_partials, sum_partials
from lf_graph.kernels._rows import dense, row_stride, rows_of, samples_of, splits_of
from lf_graph.kernels._tiles import places, row_of_sample
from lf_graph.kernels._tunable import Config, Key, Problem, Tunable, config_of, register


@triton.jit(do_not_specialize=["tokens"])
def gated_rows(
    x, x_inner, x_outer_stride, x_inner_stride, y, y_inner, y_outer_stride, y_inner_stride, gate, gate_stride,
    out, tokens, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one sample (of ``tokens`` rows) by BLOCK columns."""
    cuts: tl.constexpr = (D + BLOCK - 1) // BLOCK
    columns = tl.program_id(0) % cuts * BLOCK + tl.arange(0, BLOCK)
    tile = tl.program_id(0) // cuts
    sample = tile // tl.cdiv(tokens, ROWS)
    token = tile % tl.cdiv(tokens, ROWS) * ROWS + tl.arange(0, ROWS)
    row = sample * tokens + token
    mask = (token < tokens)[:, None] & (columns < D)[None, :]
    branch = tl.load(y + places(row, y_inner, y_outer_stride, y_inner_stride, columns), mask=mask, other=0.0)
    total = row_of_sample(gate, sample, gate_stride, columns, D) * branch.to(tl.float32)
    stream = tl.load(x + places(row, x_inner, x_outer_stride, x_inner_stride, columns), mask=mask, other=0.0)
    total = cast(total + stream.to(tl.float32), out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * D + columns[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["tokens", "splits"])
def gated_rows_backward(
    grad, g_inner, g_outer_stride, g_inner_stride, y, y_inner, y_outer_stride, y_inner_stride, gate, gate_stride,
    dy, partials, tokens, splits, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DGATE: tl.constexpr,
):  # fmt: skip
    """dy of every splits-th tile of one sample's rows, and their part of dgate: fp32 [samples, splits, D]."""
    cuts: tl.constexpr = (D + BLOCK - 1) // BLOCK
    columns = tl.program_id(0) % cuts * BLOCK + tl.arange(0, BLOCK)
    sample = tl.program_id(0) // cuts // splits
    split = tl.program_id(0) // cuts % splits
    factor = row_of_sample(gate, sample, gate_stride, columns, D)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(split * ROWS, tokens, splits * ROWS):
        token = start + tl.arange(0, ROWS)
        row = sample * tokens + token
        mask = (token < tokens)[:, None] & (columns < D)[None, :]
        g = tl.load(
            grad + places(row, g_inner, g_outer_stride, g_inner_stride, columns), mask=mask, other=0.0
        )
        g = g.to(tl.float32)
        tl.store(
            dy + row.to(tl.int64)[:, None] * D + columns[None, :],
            cast(g * factor, dy.dtype.element_ty),
            mask=mask,
        )
        if DGATE:
            branch = places(row, y_inner, y_outer_stride, y_inner_stride, columns)
            total += g * tl.load(y + branch, mask=mask, other=0.0).to(tl.float32)
    if DGATE:
        part = (sample.to(tl.int64) * splits + split) * D + columns
        tl.store(partials + part, tl.sum(total, axis=0), mask=columns < D)


def launch_forward(config: Config, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + gate * y; gate [D] or [samples, D]."""
    out = _output(x, y)
    if not out.numel():
        return out
    stream, branch, gate, samples, width = (
        rows_of(x),
        rows_of(y),
        dense(gate),
        samples_of(gate),
        int(x.shape[-1]),
    )
    tokens = stream.number // samples
    grid = (samples * triton.cdiv(tokens, config["ROWS"]) * triton.cdiv(width, config["BLOCK"]),)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        wrap_triton(gated_rows)[grid](
            *stream.arguments(), *branch.arguments(), gate, row_stride(gate), out, tokens,
            D=width, **config.keywords(),
        )  # fmt: skip
    return out


def _output(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.promote_types(x.dtype, y.dtype), device=x.device)


def launch_backward(
    config: Config, grad: Tensor, y: Tensor, gate: Tensor, gate_wanted: bool
) -> tuple[Tensor, Tensor]:
    """dy in the dtype of y, dgate in that of gate (empty if not wanted)."""
    dy, dgate = _backward_outputs(y, gate, gate_wanted)
    if not y.numel():
        return dy, dgate.zero_()
    upstream, branch, dense_gate = rows_of(grad), rows_of(y), dense(gate)
    samples, width = samples_of(gate), int(y.shape[-1])
    tokens, cuts = branch.number // samples, triton.cdiv(width, config["BLOCK"])
    splits = splits_of(config["PROGRAMS"], samples * cuts, triton.cdiv(tokens, config["ROWS"]), y.device)
    partials = y.new_empty((samples, splits, width) if gate_wanted else (0,), dtype=torch.float32)
    with torch.cuda.device_of(y):
        wrap_triton(gated_rows_backward)[(samples * splits * cuts,)](
            *upstream.arguments(), *branch.arguments(), dense_gate, row_stride(dense_gate), dy, partials, tokens,
            splits, D=width, BLOCK=config["BLOCK"], ROWS=config["ROWS"], DGATE=gate_wanted,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return dy, sum_partials(partials, gate.dtype).view(gate.shape) if gate_wanted else dgate


def _backward_outputs(y: Tensor, gate: Tensor, gate_wanted: bool) -> tuple[Tensor, Tensor]:
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    return dy, gate.new_empty(gate.shape if gate_wanted else (0,))


def _key(y: Tensor) -> Key:
    return int(y.shape[-1]), str(y.dtype).removeprefix("torch.")


def _columns(key: Key) -> int:
    return 1 << max(0, int(key[0]) - 1).bit_length()


def _default_forward(key: Key) -> Config:
    block = min(1024, _columns(key))
    return Config((("BLOCK", block), ("ROWS", max(1, 1024 // block))), num_warps=4, num_stages=1)


def _default_backward(key: Key) -> Config:
    block = min(256, _columns(key))
    rows = max(1, 1024 // block)
    return Config((("BLOCK", block), ("ROWS", rows), ("PROGRAMS", 8)), num_warps=4, num_stages=1)


def _tiles(key: Key) -> list[tuple[int, int, int]]:
    blocks = sorted({min(_columns(key), b) for b in (128, 256, 512, 1024, 2048)})
    tiles = [(b, r, w) for b in blocks for r in (1, 2, 4, 8, 16, 32) for w in (2, 4, 8)]
    return [(b, r, w) for b, r, w in tiles if 4 <= b * r // (32 * w) <= 32] or [(blocks[-1], 1, 1)]


def _forward_candidates(key: Key) -> Sequence[Config]:
    tried = [Config((("BLOCK", b), ("ROWS", r)), num_warps=w, num_stages=1) for b, r, w in _tiles(key)]
    return list(dict.fromkeys([_default_forward(key), *tried]))


def _backward_candidates(key: Key) -> Sequence[Config]:
    tried = [
        Config((("BLOCK", b), ("ROWS", r), ("PROGRAMS", p)), num_warps=w, num_stages=1)
        for b, r, w in _tiles(key)
        for p in (4, 8, 16)
    ]
    return list(dict.fromkeys([_default_backward(key), *tried]))


def _inputs(key: Key, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random x, y [8, tokens, D] and gate [8, D]; seeded, so that every process tries the same problem."""
    width, dtype = int(key[0]), getattr(torch, str(key[1]))
    generator = torch.Generator(device).manual_seed(0)
    tokens = max(1, (1 << 24 if device.type == "cuda" else 1 << 9) // width // 8)
    shapes = (8, tokens, width), (8, tokens, width), (8, width)
    x, y, gate = (torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes)
    return x, y, gate


_ROUNDING = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def _forward_problem(key: Key, device: torch.device) -> Problem:
    x, y, gate = _inputs(key, device)
    reference = x.double() + gate.double()[:, None] * y.double()
    return Problem(lambda c: (launch_forward(c, x, y, gate),), (reference,), (_ROUNDING[str(key[1])],))


def _backward_problem(key: Key, device: torch.device) -> Problem:
    grad, y, gate = _inputs(key, device)
    reference = grad.double() * gate.double()[:, None], (grad.double() * y.double()).sum(1)
    tolerance = (_ROUNDING[str(key[1])],) * 2
    return Problem(lambda c: launch_backward(c, grad, y, gate, True), reference, tolerance)


GATED_FORWARD = register(
    Tunable("gated_residual_forward", (gated_rows,), _default_forward, _forward_candidates, _forward_problem)
)
GATED_BACKWARD = register(
    Tunable(
        "gated_residual_backward", (gated_rows_backward, add_partials),
        _default_backward, _backward_candidates, _backward_problem,
    )
)  # fmt: skip


@operator("lf_graph::gated_residual")
def gated_residual_op(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """See ``launch_forward``."""
    return launch_forward(config_of(GATED_FORWARD, _key(y)), x, y, gate)


@gated_residual_op.register_fake
def _(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return _output(x, y)


@operator("lf_graph::gated_residual_backward")
def gated_residual_backward_op(
    grad: Tensor, y: Tensor, gate: Tensor, gate_wanted: bool
) -> tuple[Tensor, Tensor]:
    """See ``launch_backward``."""
    return launch_backward(config_of(GATED_BACKWARD, _key(y)), grad, y, gate, gate_wanted)


@gated_residual_backward_op.register_fake
def _(grad: Tensor, y: Tensor, gate: Tensor, gate_wanted: bool) -> tuple[Tensor, Tensor]:
    return _backward_outputs(y, gate, gate_wanted)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])
    ctx.stream_dtype = inputs[0].dtype


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, gate = ctx.saved_tensors
    x_wanted, _, gate_wanted = ctx.needs_input_grad
    dx = grad.to(ctx.stream_dtype) if x_wanted else None
    dy, dgate = gated_residual_backward_op(grad, y, gate, gate_wanted)
    return dx, dy, dgate if gate_wanted else None


gated_residual_op.register_autograd(_gradients, setup_context=_remember)
