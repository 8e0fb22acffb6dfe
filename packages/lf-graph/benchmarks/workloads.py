"""What is trained and measured: a model of models.py, its batches, and the parts one would compile one by one.

Every workload has a tiny copy that runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from models import LM, VLA, LMDims, VLADims, group_experts
from torch import Tensor, nn

LM_DIMS = LMDims(layers=28, width=2048, heads=32, ffn=5632)
MOE_DIMS = LMDims(layers=12, width=2048, heads=32, ffn=1024, experts=32)
VLA_DIMS = VLADims(LMDims(16, 2048, 16, 6144, vocab=151680, kv_heads=8, head_dim=128))

TINY_LM = LMDims(layers=2, width=32, heads=4, ffn=48, vocab=97)
TINY_MOE = LMDims(layers=2, width=32, heads=4, ffn=16, vocab=97, experts=4)
TINY_VLA = VLADims(
    LMDims(3, 32, 4, 48, vocab=97, kv_heads=2, head_dim=8),
    image=56,
    vision_layers=2,
    vision_width=32,
    vision_heads=4,
    vision_ffn=48,
    tuned=1,
    action_layers=4,
    action_width=32,
    action_heads=4,
    action_dim=8,
    horizon=6,
    text_tokens=5,
    text_vocab=97,
)


def lm_batch(vocab: int, batch: int, length: int, device: torch.device) -> list[Tensor]:
    """Random ids and labels int64 [B, T]."""
    return [torch.randint(0, vocab, (batch, length), device=device) for _ in range(2)]


def vla_batch(dims: VLADims, batch: int, device: torch.device) -> list[Tensor]:
    """Random inputs of :class:`VLA` in the order of its arguments."""
    action = (batch, dims.horizon, dims.action_dim)
    return [
        torch.randn(batch * 2, 3, dims.image, dims.image, device=device),
        torch.randint(0, dims.text_vocab, (batch, dims.text_tokens), device=device),
        torch.randn(batch, dims.action_dim, device=device),
        torch.randn(*action, device=device),
        torch.rand(batch, device=device),
        torch.randn(*action, device=device),
    ]


def freeze_bfloat16(model: nn.Module) -> None:
    """Store parameters that are not trained in bfloat16, so that autocast need not cast them at every use."""
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.bfloat16()


@dataclass(frozen=True)
class Workload:
    """One model, how its batches are made and which parts a user would compile one by one.

    ``loss(model, batch)`` is what one micro-batch computes; a batch is any nesting of tensors. ``unit`` is what
    ``units(batch size)`` counts. ``accelerate`` changes the model into the form that accelerated rows use (grouped
    experts); plain rows keep it as built. ``freeze`` casts what is not trained to bfloat16.
    """

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.device], Any]
    blocks: Callable[[nn.Module], Sequence[nn.Module]]
    batches: tuple[int, ...]
    length: int = 0
    unit: str = "samples"
    accelerate: Callable[[nn.Module], nn.Module] = lambda model: model
    freeze: Callable[[nn.Module], object] = freeze_bfloat16
    loss: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(*batch)

    def model(self, device: torch.device, seed: int = 0) -> nn.Module:
        """A model in training mode; its values depend on ``seed`` and the kind of device only."""
        torch.manual_seed(seed)
        with device:  # initialised where it lives: 3 B random numbers on a CPU take half a minute
            return self.build().train()

    def batch(self, size: int, device: torch.device, seed: int = 1) -> Any:
        """A batch of ``size``, the same for every row."""
        torch.manual_seed(seed)
        return self.make_batch(size, device)

    def units(self, size: int) -> int:
        """Tokens or samples in one batch."""
        return size * self.length if self.unit == "tokens" else size


def language(
    name: str, dims: LMDims, batches: tuple[int, ...], length: int, layers: int | None = None
) -> Workload:
    """A language model workload; experts are a loop in plain rows and grouped in the others."""
    dims = replace(dims, layers=layers or dims.layers)
    return Workload(
        name=name,
        build=lambda: LM(dims),
        make_batch=lambda size, device: lm_batch(dims.vocab, size, length, device),
        blocks=lambda model: list(model.b),
        batches=batches,
        length=length,
        unit="tokens",
        accelerate=group_experts if dims.experts else (lambda model: model),
    )


def vision_language_action(name: str, dims: VLADims, batches: tuple[int, ...]) -> Workload:
    """The VLA class of the baselines."""
    return Workload(
        name=name,
        build=lambda: VLA(dims),
        make_batch=lambda size, device: vla_batch(dims, size, device),
        blocks=lambda model: [*model.vit, *model.lm.b, *model.dit],
        batches=batches,
    )


def workloads(tiny: bool = False) -> dict[str, tuple[Workload, ...]]:
    """Workloads by the name on the command line; an LM of another length is a workload of its own."""
    if tiny:
        return {
            "vla": (vision_language_action("vla", TINY_VLA, (2, 1)),),
            "lm": (language("lm-8", TINY_LM, (1,), 8), language("lm-16", TINY_LM, (2,), 16)),
            "moe": (language("moe", TINY_MOE, (2, 1), 16),),
        }
    return {
        "vla": (vision_language_action("vla", VLA_DIMS, (16, 4)),),
        "lm": (language("lm-512", LM_DIMS, (1,), 512), language("lm-2048", LM_DIMS, (8,), 2048)),
        "moe": (language("moe", MOE_DIMS, (8, 1), 2048),),
    }
