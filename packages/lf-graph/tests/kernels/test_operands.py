"""What is no tensor, or no module, is refused by name, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lf_graph import GraphError, shard_block
from lf_graph import kernels as k

X = torch.randn(4, 2, 16)  # [tokens, heads, width], or [batch, tokens, width]
ROWS, WIDTH = torch.randn(4, 16), torch.ones(16)
CU, ENDS = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([2, 4], dtype=torch.int32)
EXPERTS, TOKENS = torch.randn(2, 16, 8), torch.arange(4)
HALF = torch.ones(4, 8)  # cos and sin

Call = Callable[[], Any]
REFUSED: dict[str, tuple[str, Call]] = {
    "varlen_attention": ("k", lambda: k.varlen_attention(X, None, X, CU)),
    "varlen_attention: offsets": ("cu_seqlens_q", lambda: k.varlen_attention(X, X, X, [0, 4])),
    "varlen_attention: of keys": ("cu_seqlens_k", lambda: k.varlen_attention(X, X, X, CU, [0, 4])),
    "attention_lengths": ("v", lambda: k.attention_lengths(X[None], X[None], 1.0)),
    "attention_lengths: lengths": ("lengths_q", lambda: k.attention_lengths(X[None], X[None], X[None], [4])),
    "attention": ("q", lambda: k.attention(None, X, X, CU)),
    "rms_norm": ("x", lambda: k.rms_norm(None)),
    "rms_norm: weight": ("weight", lambda: k.rms_norm(X, 3.0)),
    "add_rms_norm": ("residual", lambda: k.add_rms_norm(X, None)),
    "layer_norm": ("bias", lambda: k.layer_norm(X, WIDTH, 0)),
    "add_layer_norm": ("residual", lambda: k.add_layer_norm(X, None)),
    "layer_norm_modulate": ("shift", lambda: k.layer_norm_modulate(X, 1, ROWS)),
    "add_layer_norm_modulate": ("residual", lambda: k.add_layer_norm_modulate(X, None, ROWS, ROWS)),
    "gated_residual": ("gate", lambda: k.gated_residual(X, X, 0.5)),
    "gelu_tanh": ("x", lambda: k.gelu_tanh([1.0])),
    "gelu_tanh: seed": ("seed", lambda: k.gelu_tanh(X, dropout_p=0.1, seed=3)),
    "swiglu": ("gate", lambda: k.swiglu(None)),
    "swiglu: up": ("up", lambda: k.swiglu(X, 2)),
    "rope": ("cos", lambda: k.rope(X, X, None, None)),
    "rope: positions": ("positions", lambda: k.rope(X, X, HALF, HALF, [0, 1, 2, 3])),
    "packed_positions": ("cu_seqlens", lambda: k.packed_positions([0, 4], 4)),
    "qk_norm_rope": ("k_weight", lambda: k.qk_norm_rope(X, X, WIDTH, None, HALF, HALF)),
    "grouped_gemm": ("offsets", lambda: k.grouped_gemm(ROWS, EXPERTS, [2, 4])),
    "grouped_gemm: tokens": ("tokens", lambda: k.grouped_gemm(ROWS, EXPERTS, ENDS, tokens=[0, 1, 2, 3])),
    "grouped_experts": ("down", lambda: k.grouped_experts(ROWS, EXPERTS, None, WIDTH, ENDS, TOKENS, TOKENS)),
    "linear_cross_entropy": ("targets", lambda: k.linear_cross_entropy(ROWS, ROWS, [1, 2, 3, 0])),
    "linear_cross_entropy: bias": ("bias", lambda: k.linear_cross_entropy(ROWS, ROWS, TOKENS, bias=0)),
    "float8_linear": ("x", lambda: k.float8_linear(None, ROWS)),
    "float8_linear: bias": ("bias", lambda: k.float8_linear(ROWS.bfloat16(), ROWS, 0)),
    "Float8Linear": ("linear", lambda: k.Float8Linear.of(nn.Identity())),
    "to_float8": ("model", lambda: k.to_float8("model")),
    "use": ("model", lambda: k.use(None)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_operand_of_another_kind_is_named(case: str) -> None:
    name, call = REFUSED[case]
    with pytest.raises(k.OperandError, match=rf"^{case.split(':')[0]}: {name} is a ") as refused:
        call()
    assert refused.value.name == name
    assert isinstance(refused.value, GraphError)
    assert isinstance(refused.value, TypeError)


def test_every_operator_refuses_by_that_error() -> None:
    """A new operator is added above; these take no tensors and no modules, or say more about what they need."""
    others = {"CausalLMLoss", "Implementation", "UseReport", "loss_of", "register_attention"}
    operators = {name for name in k.__all__ if not name.endswith("Error")} - others
    assert operators == {case.split(":")[0] for case in REFUSED}


def test_a_block_that_is_no_module_is_refused() -> None:
    with pytest.raises(GraphError, match=r"the block is a NoneType, not a torch\.nn\.Module"):
        shard_block(None)  # type: ignore[arg-type]
