"""Activations and grouped products as :mod:`traced` traces operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OFFSETS = torch.tensor([3, 5], dtype=torch.int32)
SEED = torch.tensor([1, 2])


def operators() -> dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]]:
    """Each with the shapes of its inputs."""
    from lf_graph import kernels as k

    def experts(x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor) -> Tensor:
        tokens = torch.arange(8) // 2
        places = (OFFSETS, tokens, torch.arange(8).view(4, 2))
        return k.grouped_experts(x, gate_up, down, weight.float(), *places)

    stream = (2, 3, 64)
    return {
        "swiglu": (k.swiglu, [stream, stream]),
        "swiglu packed": (lambda g: k.swiglu(g, overwrite=True), [stream]),
        "swiglu weighted": (lambda g, w: k.swiglu(g, weight=w.float()), [stream, stream[:2]]),
        "gelu_tanh": (lambda x, b: k.gelu_tanh(x, b, dropout_p=0.1, seed=SEED), [stream, stream[2:]]),
        "grouped_gemm": (lambda x, w: k.grouped_gemm(x, w, OFFSETS), [(6, 32), (2, 32, 48)]),
        "grouped_experts": (experts, [(4, 32), (2, 32, 96), (2, 48, 32), (8,)]),
    }
