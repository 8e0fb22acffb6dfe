"""Modules that take the place of others: the same parameters and children, and a forward of fused operators.

One is made with the dictionaries of the module it replaces (parameters, children, hooks), not with copies. So a
parameter that is replaced in one is replaced in both, and putting the old module back loses nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from lf_graph.kernels._choice import Implementation
from lf_graph.kernels.gelu import gelu_tanh
from lf_graph.kernels.norm import layer_norm, rms_norm
from lf_graph.kernels.swiglu import swiglu

NormOutputs = Literal["same", "autocast"]
Result = Literal["torch", "input", "promoted"]
_Module = TypeVar("_Module", bound=nn.Module)


def in_place_of(module: nn.Module, kind: type[_Module], attributes: dict[str, Any]) -> _Module:
    """A ``kind`` with everything ``module`` has, and ``attributes``."""
    made = kind.__new__(kind)
    vars(made).update({**vars(module), **attributes})
    return made


def _widened(operator: str, device: str) -> bool:
    """Whether autocast computes an operator in float32 on a GPU: torch 2.11 leaves rms_norm alone, 2.13 does not."""
    return device == "cuda" and torch._C._dispatch_has_kernel_for_dispatch_key(operator, "AutocastCUDA")


# All that torch.compiler.assume_constant_result does, but for importing the compiler; see _moe_experts.py.
_widened._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Norm(nn.Module):
    """What both norms share.

    Attributes:
        operator: of torch, that it stands for.
        epsilon: None is that of torch, which depends on the dtype of the input.
        result: dtype of what the replaced module returned: that of the input ("input"; "torch" is the same, but
            float32 where autocast widens the operator), or of input and weight promoted.
        outputs: "same" keeps it; "autocast" gives autocast's where that is on.
        implementation: of the operator.
    """

    operator: ClassVar[str]
    epsilon: float | None
    result: Result
    outputs: NormOutputs
    implementation: Implementation

    def dtype_for(self, x: Tensor) -> torch.dtype:
        """Of the result."""
        device = x.device.type
        autocast = device != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(device)
        if autocast and self.outputs == "autocast":
            return torch.get_autocast_dtype(device)
        if self.result == "torch":
            return torch.float32 if autocast and _widened(self.operator, device) else x.dtype
        weight = getattr(self, "weight", None)
        if self.result == "input" or weight is None:
            return x.dtype
        return torch.promote_types(x.dtype, weight.dtype)

    def epsilon_for(self, x: Tensor) -> float:
        """torch takes the epsilon of the dtype it computes in, where none is given."""
        if self.epsilon is not None:
            return self.epsilon
        return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps

    def extra_repr(self) -> str:
        """Width, epsilon and where it runs."""
        weight = getattr(self, "weight", None)
        width = "no weight" if weight is None else str(len(weight))
        return f"{width}, eps={self.epsilon}, implementation={self.implementation!r}"


# Subclasses of torch's own, for code that looks for those: weight decay, transformers' list of norms.
class FusedRMSNorm(_Norm, nn.RMSNorm):
    """An RMSNorm through :func:`lf_graph.kernels.rms_norm`; input [..., D]."""

    operator = "aten::rms_norm"

    def forward(self, x: Tensor) -> Tensor:
        """The normalised rows, [..., D]."""
        return rms_norm(
            x, self.weight, self.epsilon_for(x), dtype=self.dtype_for(x), implementation=self.implementation
        )


class FusedLayerNorm(_Norm, nn.LayerNorm):
    """A LayerNorm through :func:`lf_graph.kernels.layer_norm`; input [..., D]."""

    operator = "aten::layer_norm"

    def forward(self, x: Tensor) -> Tensor:
        """The normalised rows, [..., D]."""
        return layer_norm(
            x,
            self.weight,
            getattr(self, "bias", None),
            self.epsilon_for(x),
            dtype=self.dtype_for(x),
            implementation=self.implementation,
        )


class FusedSwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` through :func:`lf_graph.kernels.swiglu`; input [..., D].

    Attributes:
        projections: names of the children gate, up and down; without up, gate gives both halves, gate first.
        implementation: of the operator.
    """

    projections: tuple[str, str | None, str]
    implementation: Implementation

    def forward(self, x: Tensor) -> Tensor:
        """[..., D]."""
        gate, up, down = self.projections
        halves = (getattr(self, gate)(x), None if up is None else getattr(self, up)(x))
        out: Tensor = getattr(self, down)(swiglu(*halves, implementation=self.implementation))
        return out


class FusedGELUTanh(nn.Module):
    """GELU by tanh through :func:`lf_graph.kernels.gelu_tanh`; any input with a dimension."""

    implementation: Implementation

    def forward(self, x: Tensor) -> Tensor:
        """Like ``x``."""
        return gelu_tanh(x, implementation=self.implementation)


FUSED = (FusedRMSNorm, FusedLayerNorm, FusedSwiGLU, FusedGELUTanh)
