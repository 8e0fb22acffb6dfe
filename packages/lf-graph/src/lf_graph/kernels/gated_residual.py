"""x + gate * y with one gate for all tokens of a sample: how AdaLN-Zero and LayerScale end a branch.

Sources: AdaLN-Zero arXiv 2212.09748, LayerScale arXiv 2103.17239.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lf_graph.kernels._checks import of_sample, require_floats, require_shape, require_tensors, wide
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._inputs import runs_on_triton


def gated_residual(x: Tensor, y: Tensor, gate: Tensor, *, implementation: Implementation = "auto") -> Tensor:
    """``x + gate * y`` in one pass, and dy and dgate in one pass backward; computed in fp32, rounded once.

    Args:
        x: [B, ..., D], the residual stream.
        y: of the shape of x, what a branch adds; may be narrower than x (bf16 to fp32).
        gate: [B, D] or [B, 1, D], one row for all tokens of a sample; or [D], one for all samples.
        implementation: Triton kernels on a GPU by default; ``plain`` is torch.

    Returns:
        [B, ..., D] in the wider dtype of x and y, contiguous.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        KernelUnavailableError: ``implementation="triton"`` cannot run here.
    """
    name = "gated_residual"
    require_tensors(name, x=x, y=y, gate=gate)
    if x.dim() < 2:
        raise ValueError(f"{name}: x is {list(x.shape)}: [batch, ..., width] is expected")
    require_floats(name, x=x, y=y, gate=gate)
    require_shape(name, "y", y, tuple(x.shape), "the shape of x")
    if gate.dim() == 1:
        require_shape(name, "gate", gate, (x.shape[-1],), "the width of x")
    else:
        gate = of_sample(name, "gate", gate, x)
    if not runs_on_triton(name, implementation, x if y.dtype != torch.float64 else y):
        return _plain(x, y, gate)
    from lf_graph.kernels._gated_residual_triton import gated_residual_op

    out: Tensor = gated_residual_op(x, y, gate)
    return out


def _plain(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """The same by torch's operators."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    if gate.dim() == 2:
        gate = gate.view(gate.shape[0], *(1,) * (x.dim() - 2), gate.shape[1])
    x, y, gate = (t.to(wide(dtype)) for t in (x, y, gate))
    return torch.addcmul(x, gate, y).to(dtype)
