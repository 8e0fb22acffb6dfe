"""SwiGLU as Triton kernels: bound by memory, 6 bytes an element of bf16 forward and 10 backward.

A program strides over the columns of one row. With a weight for each row it takes the whole row, so that the weight's
gradient is one sum in fixed order; without, programs share a row.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# Triton has no types, and its kernels take no annotations but constexpr.
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, wrap_triton

from lf_graph.kernels._inputs import as_rows
from lf_graph.kernels._interpreter import cast, operator, tl, triton
from lf_graph.kernels._tunable import Config, Key, Problem, Tunable, config_of, register


@triton.jit
def swiglu_forward(
    gate, up, weight, out, columns, gate_stride, up_stride,
    PACKED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[r] = silu(gate[r]) * up[r] * weight[r]; grid (rows, programs of a row), strides in elements.

    PACKED: up lies behind gate in the same rows. It is not given as a view: compilers would copy what is written to.
    """
    row = tl.program_id(0).to(tl.int64)
    if PACKED:
        up = gate + columns
    factor = 1.0
    if WEIGHTED:
        factor = tl.load(weight + row)
    for start in range(tl.program_id(1) * BLOCK, columns, tl.num_programs(1) * BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
        value = g * tl.sigmoid(g) * u
        if WEIGHTED:
            value = value * factor
        tl.store(out + row * columns + column, cast(value, out.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward(
    grad, gate, up, weight, grad_gate, grad_up, grad_weight, columns, grad_stride, gate_stride, up_stride,
    grad_gate_stride, grad_up_stride, PACKED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of one row; those of gate and up may be written over gate and up."""
    row = tl.program_id(0).to(tl.int64)
    if PACKED:
        up = gate + columns
        grad_up = grad_gate + columns
    factor = 1.0
    total = tl.zeros([BLOCK], tl.float32)
    if WEIGHTED:
        factor = tl.load(weight + row)
    for start in range(tl.program_id(1) * BLOCK, columns, tl.num_programs(1) * BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        d = tl.load(grad + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(g)
        silu = g * sigmoid
        if WEIGHTED:
            total += d * silu * u
            d = d * factor
        to_gate = d * u * (sigmoid + silu * (1 - sigmoid))
        dtype = grad_gate.dtype.element_ty
        tl.store(grad_gate + row * grad_gate_stride + column, cast(to_gate, dtype), mask=mask)
        tl.store(grad_up + row * grad_up_stride + column, cast(d * silu, dtype), mask=mask)
    if WEIGHTED:
        tl.store(grad_weight + row, tl.sum(total))


TUNED_ROWS = 8192


def _candidates(key: Key) -> list[Config]:
    return [Config((("BLOCK", b),), w) for b in (512, 1024, 2048, 4096) for w in (4, 8) if b >= 128 * w]


def _default(key: Key) -> Config:
    return Config((("BLOCK", 1024),), 4)


def _columns(gate: Tensor, up: Tensor | None) -> int:
    """F; a number under dynamic shapes too, as configurations depend on it."""
    return int(gate.shape[-1]) // (2 if up is None else 1)


def _key(gate: Tensor, up: Tensor | None, weight: Tensor | None) -> Key:
    """Dtype, whether rows have weights, and the columns up to the next power of two."""
    bucket = triton.next_power_of_2(max(_columns(gate, up), 1))
    return str(gate.dtype).removeprefix("torch."), weight is not None, bucket


def _problem(key: Key, device: torch.device) -> Problem:
    """Forward and backward."""
    dtype, columns = getattr(torch, str(key[0])), int(key[2])
    gate, up, grad = (torch.randn(TUNED_ROWS, columns, device=device).to(dtype) for _ in range(3))
    weight = torch.rand(TUNED_ROWS, device=device) if key[1] else None

    def run(config: Config) -> tuple[Tensor, ...]:
        out, to_gate, to_up = (torch.empty_like(gate) for _ in range(3))
        to_weight = torch.empty(TUNED_ROWS if key[1] else 0, device=device)
        _launch_forward(gate, up, weight, out, config)
        _launch_backward(grad, gate, up, weight, to_gate, to_up, to_weight, config)
        return (out, to_gate, to_up, to_weight) if key[1] else (out, to_gate, to_up)

    from lf_graph.kernels.swiglu import swiglu_plain

    exact = [t.detach().double().requires_grad_() for t in (gate, up)]
    factor = None if weight is None else weight.double().requires_grad_()
    out = swiglu_plain(exact[0], exact[1], factor)
    leaves = exact if factor is None else [*exact, factor]
    reference = (out.detach(), *torch.autograd.grad(out, leaves, grad.double()))
    tolerance = 1e-2 if dtype != torch.float32 else 1e-5
    return Problem(run, reference, (tolerance,) * len(reference))


TUNABLE = register(Tunable("swiglu", (swiglu_forward, swiglu_backward), _default, _candidates, _problem))


def _grid(rows: int, columns: int, weighted: bool, block: int) -> tuple[int, int]:
    return rows, 1 if weighted else min(triton.cdiv(columns, block), 65535)


def _launch_forward(
    gate: Tensor, up: Tensor | None, weight: Tensor | None, out: Tensor, config: Config
) -> None:
    """gate [rows, F] (without up [rows, 2 F]) and up with any row stride, out [rows, F] contiguous."""
    if not out.numel():
        return
    columns, other = _columns(gate, up), gate if up is None else up
    with torch.cuda.device_of(gate):  # Triton launches on the current device
        wrap_triton(swiglu_forward)[_grid(gate.shape[0], columns, weight is not None, config["BLOCK"])](
            gate, other, gate if weight is None else weight, out, columns, gate.stride(0), other.stride(0),
            PACKED=up is None, WEIGHTED=weight is not None, **config.keywords(),
        )  # fmt: skip


def _launch_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor | None,
    to_gate: Tensor, to_up: Tensor | None, to_weight: Tensor, config: Config,
) -> None:  # fmt: skip
    """Gradients: of gate and up in their shapes with any row stride, of weight [rows] (unused without one)."""
    if not gate.numel():
        return
    columns, other = _columns(gate, up), gate if up is None else up
    to_other = to_gate if to_up is None else to_up
    with torch.cuda.device_of(gate):
        wrap_triton(swiglu_backward)[_grid(gate.shape[0], columns, weight is not None, config["BLOCK"])](
            grad, gate, other, grad if weight is None else weight, to_gate, to_other, to_weight, columns,
            grad.stride(0), gate.stride(0), other.stride(0), to_gate.stride(0), to_other.stride(0),
            PACKED=up is None, WEIGHTED=weight is not None, **config.keywords(),
        )  # fmt: skip


def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else as_rows(x)


def _run_forward(gate: Tensor, up: Tensor | None, weight: Tensor | None) -> Tensor:
    columns = _columns(gate, up)
    out = gate.new_empty(*gate.shape[:-1], columns)
    config = config_of(TUNABLE, _key(gate, up, weight))
    flat_weight = None if weight is None else weight.reshape(-1).contiguous()  # as the kernel reads it
    _launch_forward(as_rows(gate), _rows(up), flat_weight, as_rows(out), config)
    return out


def _fake_forward(gate: Tensor, up: Tensor | None, weight: Tensor | None) -> Tensor:
    return gate.new_empty(*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1))


@operator("lf_graph::swiglu")
def forward(gate: Tensor, up: Tensor | None, weight: Tensor | None) -> Tensor:
    """See :func:`lf_graph.kernels.swiglu`."""
    return _run_forward(gate, up, weight)


@operator("lf_graph::swiglu_overwriting")
def overwriting(gate: Tensor, up: Tensor | None, weight: Tensor | None) -> Tensor:
    """The same, with a backward that writes over gate and up."""
    return _run_forward(gate, up, weight)


def _run_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor | None,
    to_gate: Tensor,
    to_up: Tensor | None,
) -> Tensor:
    """Writes gradients to ``to_gate`` and ``to_up``, which are rows; returns that of the weight."""
    to_weight = gate.new_empty(0 if weight is None else weight.numel(), dtype=torch.float32)
    flat_weight = None if weight is None else weight.reshape(-1).contiguous()  # as the kernel reads it
    given = (as_rows(grad), as_rows(gate), _rows(up), flat_weight, as_rows(to_gate), _rows(to_up), to_weight)
    _launch_backward(*given, config_of(TUNABLE, _key(gate, up, weight)))
    if weight is None:
        return to_weight
    return to_weight.view(weight.shape) if gate.shape[-1] else to_weight.zero_().view(weight.shape)


@operator("lf_graph::swiglu_backward")
def backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh gradients of gate, up (empty when packed) and weight (empty without one)."""
    to_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    to_up = None if up is None else torch.empty_like(up, memory_format=torch.contiguous_format)
    grad_weight = _run_backward(grad, gate, up, weight, to_gate, to_up)
    return to_gate, gate.new_empty(0) if to_up is None else to_up, grad_weight


@custom_op("lf_graph::swiglu_backward_", mutates_args=("gate", "up"))
def backward_(grad: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor | None) -> Tensor:
    """Gradients of gate and up over them; both are views of rows. Returns that of the weight."""
    return _run_backward(grad, gate, up, weight, gate, up)


def _fake_weight(gate: Tensor, weight: Tensor | None) -> Tensor:
    return gate.new_empty(0 if weight is None else weight.shape, dtype=torch.float32)


def _fake_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    to_up = gate.new_empty(0) if up is None else up.new_empty(up.shape)
    return gate.new_empty(gate.shape), to_up, _fake_weight(gate, weight)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    gate, up, weight = ctx.saved_tensors
    to_gate, to_up, to_weight = backward(grad, gate, up, weight)
    return to_gate, None if up is None else to_up, None if weight is None else to_weight


def _overwriting_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    gate, up, weight = ctx.saved_tensors
    if not _writable(gate, up):
        return _backward(ctx, grad)
    to_weight = backward_(grad, gate, up, weight)
    return gate.detach(), None if up is None else up.detach(), None if weight is None else to_weight


def _writable(gate: Tensor, up: Tensor | None) -> bool:
    """Whether gate and up are rows in memory, not copied to make rows, none of them twice."""
    given = [t for t in (gate, up) if t is not None]
    rows = [as_rows(t) for t in given]
    apart = len({t.data_ptr() for t in given}) == len(given)
    return apart and all(
        r.data_ptr() == t.data_ptr() and (r.stride(0) >= r.shape[1] or r.shape[0] == 1)
        for r, t in zip(rows, given, strict=True)
    )


forward.register_fake(_fake_forward)
overwriting.register_fake(_fake_forward)
backward.register_fake(_fake_backward)
backward_.register_fake(lambda grad, gate, up, weight: _fake_weight(gate, weight))
forward.register_autograd(_backward, setup_context=_save)
overwriting.register_autograd(_overwriting_backward, setup_context=_save)
