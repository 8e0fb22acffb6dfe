"""A linear layer whose products run in 8-bit floats: e4m3 for values, e5m2 for gradients, scaled on the device.

Formats: arXiv 2209.05433. A tensor is divided by ``largest magnitude / largest value of the format`` and rounded to
nearest even; the product is multiplied by the scales of both sides. Scales come from the tensor at hand ("dynamic"),
so there is no history to keep and nothing to read back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lf_graph.kernels._checks import allow_tensors, require_tensors
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._inputs import no_autocast, triton_computes

Scaling = Literal["tensor", "row"]
VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # that sizes of an 8-bit product must be of (cuBLASLt, CUTLASS)


# Compiled by torch 2.11 on a GPU, results were zero: neither this call nor what it calls is compiled.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def float8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scaling: Scaling = "tensor",
    implementation: Implementation = "auto",
) -> Tensor:
    """``x @ weight.T + bias`` with operands rounded to 8 bits, forward and backward.

    Sums are in float32; on Hopper the forward's partial sums stay in the tensor cores' shorter registers, as in other
    libraries ("fast accumulation").

    | product | "tensor": one scale a tensor | "row": one scale a row or column of the product |
    |---|---|---|
    | y = x @ weight.T | e4m3 x e4m3 | e4m3 x e4m3 |
    | gradient of x | e5m2 x e4m3 | e5m2 x e4m3 |
    | gradient of weight | e5m2 x e4m3; only 8-bit x is kept for it | bf16: outliers of a token stay exact there |

    Args:
        x: bfloat16 [..., K]; any float under bfloat16 autocast.
        weight: float [N, K], rounded from its own dtype; its gradient has that dtype.
        bias: float [N].
        scaling: see above.
        implementation: "triton" rounds by Triton kernels and multiplies by ``torch._scaled_mm``; "plain" defines the
            numbers: it rounds, and multiplies the rounded values in float32, on any device. "auto" takes the first on
            GPUs with 8-bit products (sm_89 and later).

    Returns:
        bfloat16 [..., N].

    Raises:
        ValueError: shapes that do not fit, K or N no multiple of 16, or an unknown scaling.
        TypeError: x is not bfloat16, and there is no bfloat16 autocast.
        KernelUnavailableError: ``implementation="triton"`` cannot run here.
    """
    require_tensors("float8_linear", x=x, weight=weight)
    allow_tensors("float8_linear", bias=bias)
    x = _in_bfloat16(x)
    _check(x, weight, bias, scaling)
    of = _parts(implementation, x)
    with no_autocast(x.device):
        # Triton 3.6 mixes up the rows of an fp32 tile that it rounds to 8 bits and turns.
        out: Tensor = _Float8Linear.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, x.shape[-1]), weight.to(torch.bfloat16), scaling, of
        )
    out = out.view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias.to(out.dtype)


def _in_bfloat16(x: Tensor) -> Tensor:
    kind = x.device.type
    if (
        kind != "meta"
        and torch.is_autocast_enabled(kind)
        and torch.get_autocast_dtype(kind) == torch.bfloat16
    ):
        return x.to(torch.bfloat16)
    if x.dtype != torch.bfloat16:
        raise TypeError(f"float8_linear: x is {x.dtype}; give bfloat16, or use bfloat16 autocast")
    return x


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: str) -> None:
    if scaling not in ("tensor", "row"):
        raise ValueError(f"float8_linear: scaling={scaling!r}: tensor or row")
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"float8_linear: x {tuple(x.shape)} and weight {tuple(weight.shape)} must be [..., K] and [N, K]"
        )
    if any(n % MULTIPLE for n in weight.shape):
        raise ValueError(
            f"float8_linear: weight {tuple(weight.shape)}: 8-bit products want multiples of {MULTIPLE}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"float8_linear: bias {tuple(bias.shape)} for weight {tuple(weight.shape)}")


@dataclass(frozen=True)
class Rounded:
    """A matrix in 8 bits.

    Attributes:
        values: float8 [R, C].
        scale: float32 [], or [R, 1] with a scale for each row: what values are multiplied by.
        turned: values transposed, float8 [C, R] with R up to a multiple of 16 (zeros behind); None if not asked for.
    """

    values: Tensor
    scale: Tensor
    turned: Tensor | None = None


@dataclass(frozen=True)
class Float8Parts:
    """Rounding and product; both implementations have them.

    Attributes:
        by_tensor: (x [R, C], dtype) -> Rounded with one scale, and turned.
        by_row: (x [R, C] of any strides, dtype) -> Rounded with a scale for each row.
        product: (a [M, K], b [N, K], scale of a [] or [M, 1], scale of b [] or [N, 1], dtype) -> a @ b.T [M, N].
    """

    by_tensor: Callable[[Tensor, torch.dtype], Rounded]
    by_row: Callable[[Tensor, torch.dtype], Rounded]
    product: Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]


def _parts(implementation: Implementation, x: Tensor) -> Float8Parts:
    if implementation == "auto" and x.device.type == "cuda" and not _multiplies_8_bits(x.device.index):
        implementation = "plain"
    if not triton_computes("float8_linear", implementation, x.dtype, x.device):
        return PLAIN
    from lf_graph.kernels import _float8_triton as kernels

    return kernels.PARTS


def _multiplies_8_bits(index: int | None) -> bool:
    return bool(torch.cuda.get_device_capability(index) >= (8, 9))


# All that torch.compiler.assume_constant_result does, but for importing the compiler; see _moe_experts.py.
_multiplies_8_bits._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Scaling, of: Float8Parts) -> Tensor:
        ctx.scaling, ctx.of, ctx.rows, ctx.weight_dtype = scaling, of, x.shape[0], weight.dtype
        if scaling == "row":
            left, right = of.by_row(x, VALUES), of.by_row(weight, VALUES)
            ctx.save_for_backward(x, weight)
        else:
            left, right = of.by_tensor(x, VALUES), of.by_tensor(weight, VALUES)
            ctx.save_for_backward(left.turned, left.scale, right.turned, right.scale)
        return of.product(left.values, right.values, left.scale, right.scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        found = (
            _backward_by_row(ctx, grads[0]) if ctx.scaling == "row" else _backward_by_tensor(ctx, grads[0])
        )
        return *found, None, None


def _backward_by_tensor(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x_turned, x_scale, weight_turned, weight_scale = ctx.saved_tensors
    of: Float8Parts = ctx.of
    rounded, to_x, to_weight = of.by_tensor(grad, GRADIENTS), None, None
    if ctx.needs_input_grad[0]:
        # [K, N] is the weight's transpose, whose columns behind N (none, as N is a multiple of 16) would be zero
        to_x = of.product(rounded.values, weight_turned, rounded.scale, weight_scale, grad.dtype)
    if ctx.needs_input_grad[1]:
        assert rounded.turned is not None
        to_weight = of.product(rounded.turned, x_turned, rounded.scale, x_scale, ctx.weight_dtype)
    return to_x, to_weight


def _backward_by_row(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    of: Float8Parts = ctx.of
    to_x = to_weight = None
    if ctx.needs_input_grad[0]:
        left, right = of.by_row(grad, GRADIENTS), of.by_row(weight.t(), VALUES)
        to_x = of.product(left.values, right.values, left.scale, right.scale, grad.dtype)
    if ctx.needs_input_grad[1]:
        to_weight = (grad.t() @ x).to(weight.dtype)
    return to_x, to_weight


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest magnitudes to scales, float32: 1 where all is zero, and not below 2^-126, whose inverse is finite."""
    # by a tensor: a GPU multiplies by the rounded inverse of a Python number
    scale = largest.float() / torch.full_like(largest, torch.finfo(dtype).max, dtype=torch.float32)
    return torch.where(scale > 0, scale.clamp_min(torch.finfo(torch.float32).tiny), torch.ones_like(scale))


def rounded_plain(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in 8 bits; what lies beyond the largest value by rounding of the scale becomes the largest."""
    largest = torch.finfo(dtype).max
    return (x.float() * (1 / scale)).clamp(-largest, largest).to(dtype)


def _magnitudes(x: Tensor) -> Tensor:
    """|x|, 0 for what is not a number: it stays so in 8 bits, and must not decide the scale of the others."""
    return torch.where(x.isnan(), torch.zeros((), dtype=x.dtype, device=x.device), x.abs())


def _by_tensor_plain(x: Tensor, dtype: torch.dtype) -> Rounded:
    scale = scale_of(_magnitudes(x).amax() if x.numel() else x.new_zeros(()), dtype)
    values = rounded_plain(x, scale, dtype)
    turned = values.new_zeros(x.shape[1], -(-x.shape[0] // MULTIPLE) * MULTIPLE)
    turned[:, : x.shape[0]] = values.t()
    return Rounded(values, scale, turned)


def _by_row_plain(x: Tensor, dtype: torch.dtype) -> Rounded:
    scale = scale_of(_magnitudes(x).amax(dim=1, keepdim=True), dtype)
    return Rounded(rounded_plain(x, scale, dtype).contiguous(), scale)


def _product_plain(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return ((a.float() @ b.float().t()) * (a_scale * b_scale.reshape(1, -1))).to(dtype)


PLAIN = Float8Parts(_by_tensor_plain, _by_row_plain, _product_plain)
