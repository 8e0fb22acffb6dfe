"""Triton kernels for training, each beside a plain PyTorch twin that computes the same."""

from typing import TYPE_CHECKING, Any

from lf_graph._errors import OperandError
from lf_graph.kernels._choice import Implementation, KernelUnavailableError
from lf_graph.kernels._transformers import UnsupportedAttentionError, register_attention
from lf_graph.kernels.attention import attention, attention_lengths, varlen_attention
from lf_graph.kernels.causal_lm import CausalLMLoss, loss_of
from lf_graph.kernels.gated_residual import gated_residual
from lf_graph.kernels.gelu import gelu_tanh
from lf_graph.kernels.grouped_experts import grouped_experts
from lf_graph.kernels.grouped_gemm import grouped_gemm
from lf_graph.kernels.linear_cross_entropy import linear_cross_entropy
from lf_graph.kernels.norm import (
    add_layer_norm,
    add_layer_norm_modulate,
    add_rms_norm,
    layer_norm,
    layer_norm_modulate,
    rms_norm,
)
from lf_graph.kernels.qk_norm_rope import qk_norm_rope
from lf_graph.kernels.rope import packed_positions, rope
from lf_graph.kernels.swiglu import swiglu
from lf_graph.kernels.use import UseReport, use

if TYPE_CHECKING:
    from lf_graph.kernels._float8 import float8_linear
    from lf_graph.kernels._float8_module import Float8Linear, to_float8

__all__ = [
    "CausalLMLoss",
    "Float8Linear",
    "Implementation",
    "KernelUnavailableError",
    "OperandError",
    "UnsupportedAttentionError",
    "UseReport",
    "add_layer_norm",
    "add_layer_norm_modulate",
    "add_rms_norm",
    "attention",
    "attention_lengths",
    "float8_linear",
    "gated_residual",
    "gelu_tanh",
    "grouped_experts",
    "grouped_gemm",
    "layer_norm",
    "layer_norm_modulate",
    "linear_cross_entropy",
    "loss_of",
    "packed_positions",
    "qk_norm_rope",
    "register_attention",
    "rms_norm",
    "rope",
    "swiglu",
    "to_float8",
    "use",
    "varlen_attention",
]


def __getattr__(name: str) -> Any:
    """8-bit products on first use: what keeps them out of compiled code imports the compiler, for over a second."""
    if name not in ("Float8Linear", "float8_linear", "to_float8"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lf_graph.kernels import _float8, _float8_module

    globals().update(
        Float8Linear=_float8_module.Float8Linear,
        float8_linear=_float8.float8_linear,
        to_float8=_float8_module.to_float8,
    )
    return globals()[name]


def __dir__() -> list[str]:
    return __all__
