"""SwiGLU experts on tokens: products that read and add tokens' rows where they are, so that no sorted copy is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lf_graph.kernels._checks import require_tensors
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._inputs import no_autocast, runs_on_triton
from lf_graph.kernels.grouped_gemm import (
    Parts,
    autocast,
    check_product,
    parts,
    product_plain,
)
from lf_graph.kernels.swiglu import swiglu_gradients, swiglu_value


def grouped_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weight: Tensor,
    offsets: Tensor,
    tokens: Tensor,
    rows: Tensor,
    *,
    implementation: Implementation = "auto",
) -> Tensor:
    """``y[t]``: sum over t's rows r of ``weight[r] * (silu(x[t] @ gate[e]) * (x[t] @ up[e])) @ down[e]``, e as of r.

    Three kernels forward: gate and up with SwiGLU behind them, down, and the sum over each token's rows. No copy of the
    tokens in the experts' order is made, forward or backward. Kept for the backward: x, gate and up [R, 2 F], whose
    memory then takes their gradients unless the graph is kept, and the hidden rows [R, F].

    Nothing is read back, every shape is a function of the inputs' shapes, and all results repeat bit for bit. A token
    whose rows all lie from ``offsets[-1]`` on gives zero and gets no gradient, whatever it holds. Under autocast the
    products run in its dtype.

    Args:
        x: float [T, H].
        gate_up: [E, H, 2 F] of the dtype of x, gate first.
        down: [E, F, H] of that dtype.
        weight: float32 (float64 beside float64) [R], of each row.
        offsets: int32 [E], the end row of each expert.
        tokens: int32 or int64 [R], the token of each row.
        rows: int64 [T, top_k], the rows of each token; each row once.
        implementation: Triton, the plain twins, or Triton where it runs.

    Returns:
        [T, H] of the dtype of x.

    Raises:
        ValueError, TypeError, KernelUnavailableError: as :func:`grouped_gemm`.
    """
    require_tensors(
        "grouped_experts",
        x=x,
        gate_up=gate_up,
        down=down,
        weight=weight,
        offsets=offsets,
        tokens=tokens,
        rows=rows,
    )
    x, gate_up, down = autocast(x, gate_up, down)
    _check(x, gate_up, down, weight, offsets, tokens, rows)
    triton = runs_on_triton("grouped_experts", implementation, x)
    given = (x, gate_up, down, weight, offsets, tokens, rows)
    with no_autocast(x.device):
        out: Tensor = _GroupedExperts.apply(*given, triton)  # type: ignore[no-untyped-call]
    return out


def _check(
    x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor, offsets: Tensor, tokens: Tensor, rows: Tensor
) -> None:
    check_product(x, gate_up, offsets, tokens, rows)
    experts, hidden, width = gate_up.shape
    if width % 2 or down.shape != (experts, width // 2, hidden):
        raise ValueError(
            f"grouped_experts: gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} must be "
            "[E, H, 2 F] and [E, F, H]"
        )
    if down.dtype != x.dtype:
        raise TypeError(f"grouped_experts: x is {x.dtype}, down {down.dtype}; cast one, or use autocast")
    wide = torch.promote_types(x.dtype, torch.float32)
    if weight.shape != tokens.shape or weight.dtype != wide:
        raise ValueError(
            f"grouped_experts: weight is {weight.dtype} {tuple(weight.shape)}; it must be {wide} "
            f"{tuple(tokens.shape)}"
        )


def _gate_up(
    x: Tensor, w: Tensor, weight: Tensor, offsets: Tensor, tokens: Tensor, triton: bool
) -> tuple[Tensor, Tensor]:
    """gate_up [R, 2 F] and hidden [R, F]."""
    if triton:
        from lf_graph.kernels._grouped_gemm_launch import product_swiglu

        found: tuple[Tensor, Tensor] = product_swiglu(x, w, weight, offsets, tokens)
        return found
    product = product_plain(x, w, offsets, tokens)
    own = torch.arange(tokens.shape[0], device=x.device) < offsets[-1]
    gate, up = product.chunk(2, dim=-1)
    return product, swiglu_value(gate, up, torch.where(own, weight, weight.new_zeros(())))


def _gate_up_gradients(grad: Tensor, gate_up: Tensor, weight: Tensor, triton: bool) -> tuple[Tensor, Tensor]:
    """Gradients of gate_up, in its memory where nothing else can need it, and of the weight."""
    if not triton:
        gate, up = gate_up.chunk(2, dim=-1)
        to_gate, to_up, to_weight = swiglu_gradients(grad, gate, up, weight)
        assert to_weight is not None
        return torch.cat((to_gate, to_up), dim=-1), to_weight
    from lf_graph.kernels import _swiglu_triton as kernels

    # A compiler places buffers itself; a graph that is kept will ask for gate_up again.
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        to_gate_up, _, to_weight = kernels.backward(grad, gate_up, None, weight)
        return to_gate_up, to_weight
    to_weight = kernels.backward_(grad, gate_up, None, weight)
    return gate_up, to_weight


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor, offsets: Tensor, tokens: Tensor,
        rows: Tensor, triton: bool,
    ) -> Tensor:  # fmt: skip
        of = parts(triton)
        product, hidden = _gate_up(x, gate_up, weight, offsets, tokens, triton)
        ctx.save_for_backward(x, gate_up, down, weight, offsets, tokens, rows, product, hidden)
        ctx.triton = triton
        return of.sum_rows(of.product(hidden, down, offsets, None), rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, weight, offsets, tokens, rows, product, hidden = ctx.saved_tensors
        of: Parts = parts(ctx.triton)
        (grad,) = grads
        to_x = to_gate_up = to_down = None
        if ctx.needs_input_grad[2]:
            to_down = of.weight_gradient(hidden, grad, offsets, None, tokens, down.stride(2) != 1)
        to_hidden = of.product(grad, down.transpose(1, 2), offsets, tokens)
        to_product, to_weight = _gate_up_gradients(to_hidden, product, weight, ctx.triton)
        if ctx.needs_input_grad[1]:
            to_gate_up = of.weight_gradient(x, to_product, offsets, tokens, None, gate_up.stride(2) != 1)
        if ctx.needs_input_grad[0]:
            to_x = of.sum_rows(of.product(to_product, gate_up.transpose(1, 2), offsets, None), rows)
        return to_x, to_gate_up, to_down, to_weight, None, None, None, None
