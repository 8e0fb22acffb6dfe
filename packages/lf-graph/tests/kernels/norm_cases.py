"""The norms by name, each as a function of the same inputs, for tests of every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kernel_cases import DEVICE
from torch import Tensor

from lf_graph.kernels import (
    Implementation,
    add_layer_norm,
    add_layer_norm_modulate,
    add_rms_norm,
    layer_norm,
    layer_norm_modulate,
    rms_norm,
)

Outputs = tuple[Tensor, ...]
CASES: dict[str, tuple[str, Callable[..., Any]]] = {
    "rms_norm": ("xw", lambda x, w, **k: rms_norm(x, w, 1e-6, **k)),
    "rms_norm_bare": ("x", lambda x, **k: rms_norm(x, None, 1e-6, **k)),
    "layer_norm": ("xwb", lambda x, w, b, **k: layer_norm(x, w, b, **k)),
    "layer_norm_weight": ("xw", lambda x, w, **k: layer_norm(x, w, **k)),
    "layer_norm_bare": ("x", lambda x, **k: layer_norm(x, **k)),
    "add_rms_norm": ("xrw", lambda x, r, w, **k: add_rms_norm(x, r, w, **k)),
    "add_layer_norm": ("xrwb", lambda x, r, w, b, **k: add_layer_norm(x, r, w, b, **k)),
    "add_modulate": ("xrsc", lambda x, r, s, c, **k: add_layer_norm_modulate(x, r, s, c, **k)),
    "modulate": ("xsc", lambda x, s, c, **k: layer_norm_modulate(x, s, c, **k)),
}


def inputs(
    case: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Tensor]:
    """Leaves of a case: x, residual r [shape], weight w and bias b [D], shift s and scale c [B, D]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": shape, "r": shape, "w": shape[-1:], "b": shape[-1:]}
    shapes |= {"s": (shape[0], shape[-1]), "c": (shape[0], shape[-1])}
    drawn = {n: torch.randn(shapes[n], generator=generator).to(DEVICE, dtype) for n in CASES[case][0]}
    return {n: t.requires_grad_() for n, t in drawn.items()}


def run(case: str, leaves: dict[str, Tensor], implementation: Implementation, **options: Any) -> Outputs:
    """Outputs of a case."""
    out = CASES[case][1](*leaves.values(), implementation=implementation, **options)
    return out if isinstance(out, tuple) else (out,)


def gradients(outputs: Outputs, leaves: dict[str, Tensor], seed: int = 1) -> Outputs:
    """Gradients of all leaves from random ones of the outputs, which are the same for every dtype."""
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(o.shape, generator=generator).bfloat16().to(o.device, o.dtype) for o in outputs]
    return torch.autograd.grad(outputs, list(leaves.values()), grads)


def in_float64(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers as float64 leaves."""
    return {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
