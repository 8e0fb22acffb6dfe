"""RMSNorm and LayerNorm, alone, behind a residual sum, and modulated by a sample's scale and shift (AdaLN).

Statistics, products and sums are fp32, whatever the dtype of the tensors; every output is rounded once. (transformers'
RMSNorm rounds the normalised row before it multiplies by the weight, and so differs by that rounding.) Gradients repeat
bit for bit. float64 is computed by the plain twin.

The output has ``dtype`` if that is given, else the dtype of autocast where it is on, else that of x. torch's own norms
return fp32 under autocast, which the matrix product behind them then rounds to the same numbers in a pass of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lf_graph.kernels._checks import (
    allow_tensors,
    of_sample,
    output_dtype,
    require_floats,
    require_shape,
    require_tensors,
    wide,
)
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._inputs import runs_on_triton
from lf_graph.kernels._rows import MAX_WIDTH


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    Args:
        x: [..., D]; one or two levels of strides are read in place, so a slice of a fused qkv costs no copy.
        weight: [D]; None is 1.
        eps: added to the mean square.
        dtype: of the result; see the module.
        implementation: Triton kernels on a GPU by default; ``plain`` is torch.

    Returns:
        [..., D], contiguous.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; D above 32768 for Triton.
        KernelUnavailableError: ``implementation="triton"`` cannot run here.
    """
    return _norm("rms_norm", x, None, weight, None, eps, False, dtype, implementation)[0]


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (arXiv 1607.06450).

    Args and errors are those of :func:`rms_norm`; ``bias`` is [D] in the dtype of ``weight``, or None.

    Returns:
        [..., D], contiguous.
    """
    return _norm("layer_norm", x, None, weight, bias, eps, True, dtype, implementation)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """``rms_norm(x + residual)`` and the sum, in one pass; backward in one pass too.

    Args:
        x: [..., D], what a branch adds to the residual stream; may be narrower than it (bf16 to fp32).
        residual: the stream, of the shape of x.

    Other arguments and errors are those of :func:`rms_norm`.

    Returns:
        The normalised sum, and the sum in the wider dtype of the two, which is the one normalised.
    """
    return _norm("add_rms_norm", x, residual, weight, None, eps, False, dtype, implementation)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """``layer_norm(x + residual)`` and the sum, as :func:`add_rms_norm`."""
    return _norm("add_layer_norm", x, residual, weight, bias, eps, True, dtype, implementation)


def layer_norm_modulate(
    x: Tensor,
    shift: Tensor,
    scale: Tensor,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """``layer_norm(x) * (1 + scale) + shift``: the AdaLN of DiT (arXiv 2212.09748).

    Args:
        x: [B, ..., D], B samples.
        shift: [B, D] or [B, 1, D], one row for all tokens of a sample; halves of one projection need no copy.
        scale: likewise, in the dtype of ``shift``.

    Other arguments and errors are those of :func:`rms_norm`.

    Returns:
        [B, ..., D], contiguous.
    """
    return _modulate("layer_norm_modulate", x, None, shift, scale, eps, dtype, implementation)[0]


def add_layer_norm_modulate(
    x: Tensor,
    residual: Tensor,
    shift: Tensor,
    scale: Tensor,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """``layer_norm_modulate(x + residual, shift, scale)`` and the sum, as :func:`add_rms_norm`."""
    return _modulate("add_layer_norm_modulate", x, residual, shift, scale, eps, dtype, implementation)


def _modulate(
    operator: str,
    x: Tensor,
    residual: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float,
    dtype: torch.dtype | None,
    implementation: Implementation,
) -> tuple[Tensor, Tensor]:
    require_tensors(operator, x=x, shift=shift, scale=scale)
    if x.dim() < 2:
        raise ValueError(f"{operator}: x is {list(x.shape)}: [batch, ..., width] is expected")
    shift, scale = (of_sample(operator, label, t, x) for label, t in (("shift", shift), ("scale", scale)))
    return _norm(operator, x, residual, scale, shift, eps, True, dtype, implementation)


def _norm(
    operator: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype | None,
    implementation: Implementation,
) -> tuple[Tensor, Tensor]:
    _check(operator, x, residual, weight, bias)
    dtype = output_dtype(x, dtype)
    widest = residual if residual is not None and residual.dtype == torch.float64 else x
    if not runs_on_triton(operator, implementation, widest):
        return _plain(x, residual, weight, bias, eps, centred, dtype)
    if x.shape[-1] > MAX_WIDTH:
        raise ValueError(
            f"{operator}: rows of {x.shape[-1]} do not fit the registers of a program ({MAX_WIDTH}): "
            "use implementation='plain'"
        )
    from lf_graph.kernels._norm_triton import norm_op

    y, summed, _ = norm_op(x, residual, weight, bias, eps, centred, dtype)
    return y, summed


def _check(
    operator: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> None:
    require_tensors(operator, x=x)
    allow_tensors(operator, residual=residual, weight=weight, bias=bias)
    if operator.startswith("add_"):
        require_tensors(operator, residual=residual)
    if x.dim() == 0:
        raise ValueError(f"{operator}: x has no dimension to normalise over: [..., width] is expected")
    require_floats(operator, x=x, residual=residual, weight=weight, bias=bias)
    require_shape(operator, "residual", residual, tuple(x.shape), "the shape of x")
    for name, w in (("weight", weight), ("bias", bias)):
        if w is not None and (w.dim() != 2 or not operator.endswith("modulate")):
            require_shape(operator, name, w, (x.shape[-1],), "the width of x")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise ValueError(f"{operator}: weight is {weight.dtype} and bias {bias.dtype}: give both one dtype")


def _plain(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The same by torch's operators; the sum is x without a residual."""
    summed = x if residual is None else _sum(x, residual)
    h = summed.to(wide(summed.dtype))
    h = F.layer_norm(h, h.shape[-1:], eps=eps) if centred else F.rms_norm(h, h.shape[-1:], eps=eps)
    if weight is not None:
        w = _beside(weight, x).to(h.dtype)
        h = h * (w + 1 if weight.dim() == 2 else w)
    if bias is not None:
        h = h + _beside(bias, x).to(h.dtype)
    return h.to(dtype), summed


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    common = torch.promote_types(x.dtype, residual.dtype)
    return (x.to(wide(common)) + residual.to(wide(common))).to(common)


def _beside(w: Tensor, x: Tensor) -> Tensor:
    """[D] as it is, [B, D] as [B, 1, ..., D] with the dimensions of x."""
    return w if w.dim() == 1 else w.view(w.shape[0], *(1,) * (x.dim() - 2), w.shape[-1])
