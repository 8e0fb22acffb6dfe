"""linear_cross_entropy at the head of the 1.65 B language model, B=8 x 2048 tokens: bound by its matrix products.

Beside time, ``extra MiB`` is the point: gradients of hidden states and weight are part of it for every way. Liger reads
the number of tokens back to the host, so a graph cannot hold it.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_rows import REFERENCE, Group, KernelRow, as_float64, compiled, forward, forward_backward
from lf_graph.kernels import linear_cross_entropy

IGNORE = -100


def inputs(
    tokens: int, dim: int, vocab: int, weight_dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and logits have a variance of 1; a tenth of the targets has no loss."""
    hidden = torch.randn(tokens, dim, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(vocab, dim, device=device) * dim**-0.5).bfloat16().to(weight_dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens,), device=device)
    targets[torch.rand(tokens, device=device) < 0.1] = IGNORE
    return hidden, weight, targets


def eager(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As the models of lf-meta write it."""
    logits = F.linear(hidden, weight)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """By default: the weight's gradient summed in float32."""
    return linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORE)[0]


def ours_narrow(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The weight's gradient summed in its dtype."""
    return linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORE, accumulate_fp32=False)[0]


def ours_of_rows(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """By default, in chunks of a given size: what the default gives away for memory."""
    return linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORE, chunk=chunk)[0]


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, accumulate: torch.dtype | None = None) -> Tensor:
    """Liger-Kernel's operator."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    out: Tensor = liger_fused_linear_cross_entropy(
        hidden, weight, targets, ignore_index=IGNORE, reduction="sum", accum_dtype=accumulate
    )
    return out


def autocast_eager(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As the models of lf-meta train: float32 weight, products in bf16."""
    with torch.autocast(hidden.device.type, torch.bfloat16, cache_enabled=False):
        return eager(hidden, weight, targets)


def autocast_ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same, fused."""
    with torch.autocast(hidden.device.type, torch.bfloat16, cache_enabled=False):
        return ours(hidden, weight, targets)


def rows(small: bool) -> list[KernelRow]:
    """Training with a bf16 and with a float32 weight, and evaluation."""
    tokens, dim, vocab = (37, 16, 333) if small else (8 * 2047, 2048, 50257)
    return [
        *_bf16_rows(tokens, dim, vocab, small),
        *_autocast_rows(tokens, dim, vocab),
        *_forward_rows(tokens, dim, vocab),
    ]


def _group(op: str, tokens: int, dim: int, vocab: int, weight_bytes: int, products: int) -> Group:
    """Inputs are read and, with gradients, as much written."""
    moved = (2 if products == 3 else 1) * (tokens * dim * 2 + vocab * dim * weight_bytes)
    label = f"{tokens}x{dim}, vocabulary {vocab}, bf16" + (" autocast" if weight_bytes == 4 else "")
    return Group(op, label, bytes=moved, flops=products * 2 * tokens * dim * vocab, tolerance=2e-2)


def _bf16_rows(tokens: int, dim: int, vocab: int, small: bool) -> list[KernelRow]:
    make = functools.partial(inputs, tokens, dim, vocab, torch.bfloat16)
    group = _group("linear_cross_entropy fwd+bwd", tokens, dim, vocab, 2, 3)
    peer = {"needs": ("liger_kernel",), "cuda_only": True}
    wide = functools.partial(liger, accumulate=torch.float32)
    return [
        group.row(REFERENCE, lambda d: forward_backward(eager, *as_float64(make(d)))),
        group.row("lf-graph", lambda d: forward_backward(ours, *make(d)), ours=True),
        group.row("lf-graph, bf16 sums", lambda d: forward_backward(ours_narrow, *make(d)), ours=True),
        *(
            group.row(
                f"lf-graph, chunk {chunk}",
                lambda d, c=chunk: forward_backward(functools.partial(ours_of_rows, chunk=c), *make(d)),
                ours=True,
            )
            for chunk in ((16,) if small else (1024, 2048, 4096))
        ),
        group.row("eager", lambda d: forward_backward(eager, *make(d))),
        group.row("compiled", lambda d: forward_backward(compiled(eager), *make(d))),
        group.row("liger", lambda d: forward_backward(liger, *make(d)), **peer),
        group.row("liger, float32 sums", lambda d: forward_backward(wide, *make(d)), **peer),
    ]


def _autocast_rows(tokens: int, dim: int, vocab: int) -> list[KernelRow]:
    make = functools.partial(inputs, tokens, dim, vocab, torch.float32)
    group = _group("linear_cross_entropy fwd+bwd", tokens, dim, vocab, 4, 3)
    return [
        group.row(REFERENCE, lambda d: forward_backward(eager, *as_float64(make(d)))),
        group.row("lf-graph", lambda d: forward_backward(autocast_ours, *make(d)), ours=True),
        group.row("eager", lambda d: forward_backward(autocast_eager, *make(d))),
        group.row("compiled", lambda d: forward_backward(compiled(autocast_eager), *make(d))),
    ]


def _forward_rows(tokens: int, dim: int, vocab: int) -> list[KernelRow]:
    make = functools.partial(inputs, tokens, dim, vocab, torch.bfloat16)
    group = _group("linear_cross_entropy fwd", tokens, dim, vocab, 2, 1)
    return [
        group.row(REFERENCE, lambda d: forward(eager, *as_float64(make(d)))),
        group.row("lf-graph", lambda d: forward(ours, *make(d)), ours=True),
        group.row("eager", lambda d: forward(eager, *make(d))),
        group.row("compiled", lambda d: forward(compiled(eager), *make(d))),
    ]
