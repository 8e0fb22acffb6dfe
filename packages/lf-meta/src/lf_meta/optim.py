"""Gradients of one optimizer step: exact over any split into micro-batches and ranks, without a host wait.

The loss of a step is sum(loss) / sum(count) over everything in the global batch. Averaging means instead
weighs a 2-token micro-batch like a 128-token one (transformers#34191); here each micro-batch contributes its
sum, and the division happens once, by the count of the whole global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lf_meta.config import OptimSection

MicroBatch = tuple[Tensor, Tensor, Tensor | None]


def make_optimizer(model: nn.Module, section: OptimSection) -> torch.optim.AdamW:
    """Fused AdamW; weight decay on parameters with two or more dimensions only."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decayed = [p for _, p in named if p.ndim >= 2]
    plain = [p for _, p in named if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": section.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def apply_hyperparameters(optimizer: torch.optim.Optimizer, section: OptimSection) -> None:
    """Let the configuration decide after a checkpoint brought its own hyper-parameters back."""
    for group in optimizer.param_groups:
        group["betas"], group["eps"] = section.betas, section.eps
        group["weight_decay"] = section.weight_decay if group["params"][0].ndim >= 2 else 0.0


def accumulate(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    no_sync: Callable[[nn.Module, bool], AbstractContextManager[None]],
    autocast: Callable[[], AbstractContextManager[object]],
) -> Tensor:
    """Run forward and backward over the micro-batches; ``.grad`` then holds this rank's share of sums.

    Returns:
        Tensor [2] in the loss's dtype: (loss sum in nats, number of predicted tokens).
    """
    totals: Tensor | None = None
    for i, (tokens, lengths, mask) in enumerate(micro_batches):
        with no_sync(model, i + 1 < len(micro_batches)):
            with autocast():
                loss_sum, count = model(tokens, lengths, mask)
            loss_sum.backward()
        pair = torch.stack((loss_sum.detach(), count.to(loss_sum.dtype)))
        totals = pair if totals is None else totals + pair
    if totals is None:
        raise ValueError("a step needs at least one micro-batch")
    return totals


def normalise_and_clip(
    parameters: Iterable[nn.Parameter], count: Tensor, world_size: int, clip: float
) -> Tensor:
    """Turn summed gradients into the gradient of the mean loss, then clip its global norm.

    DistributedDataParallel leaves sum / world_size in ``.grad``, so the factor is world_size / count.

    Args:
        count: number of predicted tokens in the global batch, [] on the device.
        clip: largest global norm; 0 leaves the gradient as it is.

    Returns:
        The global norm before clipping, [] on the device.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    scale = world_size / count.clamp(min=1)
    norm = torch.nn.utils.get_total_norm(grads) * scale
    if clip:
        scale = scale * (clip / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, scale.to(grads[0].dtype))
    return norm
