"""RMSNorm, LayerNorm, their residual sums, AdaLN and the gated branch: bound by memory, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_rows import REFERENCE, Group, KernelRow, as_float64, compiled, forward_backward
from lf_graph.kernels import (
    add_layer_norm,
    add_layer_norm_modulate,
    add_rms_norm,
    gated_residual,
    layer_norm,
    layer_norm_modulate,
    rms_norm,
)

EPS = 1e-6
Fn = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One operator in all ways.

    Attributes:
        inputs: what it takes, in order: x, r (both [B, T, D]), w, b ([D]), s, c ([B, D]).
        passes: tensors of the size of x that forward and backward must read or write.
        shapes: [B, T, D] of our models.
        liger: Liger-Kernel's way, if it has one.
    """

    name: str
    inputs: str
    passes: int
    ours: Fn
    eager: Fn
    shapes: tuple[tuple[int, int, int], ...]
    liger: Fn | None = None


def eager_add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """As the models of lf-meta write it."""
    total = x + r
    return F.rms_norm(total, total.shape[-1:], w, EPS), total


def eager_add_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """As the models of lf-meta write it."""
    total = x + r
    return F.layer_norm(total, total.shape[-1:], w, b, EPS), total


def eager_modulate(x: Tensor, s: Tensor, c: Tensor) -> Tensor:
    """As the diffusion transformer of lf-meta writes it."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + c[:, None]) + s[:, None]


def eager_add_modulate(x: Tensor, r: Tensor, s: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The end of one block and the beginning of the next."""
    total = x + r
    return eager_modulate(total, s, c), total


def liger_rms_norm(x: Tensor, w: Tensor) -> Any:
    """Liger-Kernel's operator; not in place, for that would spoil the gradient of the next call."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)


def liger_add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> Any:
    """Liger-Kernel's operator, not in place."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "llama", False)


def liger_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Any:
    """Liger-Kernel's operator."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, w, b, EPS)


# [B, T, D]: the 1.65 B language model; q heads of the VLA's language model; its vision tower (3 cameras), its action
# head, a large diffusion transformer
LANGUAGE, HEADS = (8, 2048, 2048), (16, 300 * 16, 128)
VISION, ACTION, DIFFUSION = (48, 256, 1152), (16, 51, 1536), (32, 1024, 1152)
CASES = (
    Case(
        "rms_norm", "xw", 5, lambda x, w: rms_norm(x, w, EPS), lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS),
        (LANGUAGE, HEADS), liger_rms_norm,
    ),
    Case(
        "add_rms_norm", "xrw", 8, lambda x, r, w: add_rms_norm(x, r, w, EPS), eager_add_rms_norm,
        (LANGUAGE, (16, 300, 2048)), liger_add_rms_norm,
    ),
    Case(
        "layer_norm", "xwb", 5, lambda x, w, b: layer_norm(x, w, b, EPS),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, EPS), (VISION, (48, 64, 4608)), liger_layer_norm,
    ),
    Case(
        "add_layer_norm", "xrwb", 8, lambda x, r, w, b: add_layer_norm(x, r, w, b, EPS), eager_add_layer_norm,
        (VISION,),
    ),
    Case(
        "layer_norm_modulate", "xsc", 5, lambda x, s, c: layer_norm_modulate(x, s, c, EPS), eager_modulate,
        (ACTION, DIFFUSION),
    ),
    Case(
        "add_layer_norm_modulate", "xrsc", 8, lambda x, r, s, c: add_layer_norm_modulate(x, r, s, c, EPS),
        eager_add_modulate, (ACTION, DIFFUSION),
    ),
    Case("gated_residual", "xrs", 6, gated_residual, lambda x, r, s: x + s[:, None] * r, (ACTION, DIFFUSION)),
)  # fmt: skip


def inputs(letters: str, shape: tuple[int, int, int], device: torch.device) -> list[Tensor]:
    """bf16 leaves."""
    batch, _, width = shape
    shapes = {"x": shape, "r": shape, "w": (width,), "b": (width,), "s": (batch, width), "c": (batch, width)}
    return [torch.randn(shapes[n], device=device).bfloat16().requires_grad_() for n in letters]


def rows(small: bool) -> list[KernelRow]:
    """Every case at the shapes of our models."""
    return [
        row
        for case in CASES
        for shape in ([(2, 9, 48)] if small else case.shapes)
        for row in group(case, shape)
    ]


def group(case: Case, shape: tuple[int, int, int]) -> list[KernelRow]:
    """All ways of one case at one shape."""
    moved = case.passes * 2 * shape[0] * shape[1] * shape[2]
    label = "x".join(map(str, shape)) + " bf16"
    g = Group(f"{case.name} fwd+bwd", label, bytes=moved, tolerance=2e-2)

    def way(name: str, fn: Callable[[], Fn], exact: bool = False, **fields: Any) -> KernelRow:
        def build(device: torch.device) -> Any:
            leaves = inputs(case.inputs, shape, device)
            return forward_backward(fn(), *(as_float64(leaves) if exact else leaves))

        return g.row(name, build, **fields)

    found = [
        way(REFERENCE, lambda: case.eager, exact=True),
        way("lf-graph", lambda: case.ours, ours=True),
        way("eager", lambda: case.eager),
        way("compiled", lambda: compiled(case.eager)),
    ]
    if case.liger:
        liger = case.liger
        found.append(way("liger", lambda: liger, needs=("liger_kernel",), cuda_only=True))
    return found
