"""One AdamW step as torch, inductor and lf-graph make it, on equal weights and gradients, and their parity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from adamw_rows import ODD, Shape, shapes_of
from torch import Tensor, nn
from torch.optim.adamw import adamw  # torch.optim deletes the name of its module

from lf_graph._adamw import FusedAdamW, Launch
from lf_graph._flat import FlatParameters

OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
CLIP = 1.0


def parameters(shapes: Sequence[Shape], device: torch.device) -> list[nn.Parameter]:
    """Seeded weights."""
    made = torch.Generator(device).manual_seed(1)
    return [nn.Parameter(torch.empty(s, device=device).normal_(0, 0.02, generator=made)) for s in shapes]


def gradients(shapes: Sequence[Shape], device: torch.device) -> list[Tensor]:
    """Seeded gradients: bf16 of matrices, fp32 of the rest."""
    made = torch.Generator(device).manual_seed(2)
    fresh = [torch.empty(s, device=device).normal_(0, 1e-3, generator=made) for s in shapes]
    return [g.bfloat16() if g.dim() > 1 else g for g in fresh]


class Stock:
    """torch.optim.AdamW with the two casts that bf16 compute on fp32 masters needs."""

    def __init__(
        self, shapes: Sequence[Shape], device: torch.device, clip: float = 0.0, **options: Any
    ) -> None:
        self.clip, self.parameters = clip, parameters(shapes, device)
        self.given = gradients(shapes, device)
        for p in self.parameters:
            p.grad = torch.empty_like(p)
        self.wide = [p.grad for p in self.parameters if p.grad is not None]
        self.masters = [p.detach() for p in self.parameters if p.dim() > 1]
        self.weights = [m.bfloat16() for m in self.masters]
        self.optimizer = torch.optim.AdamW(self.parameters, **OPTIONS, **options)

    @torch.no_grad()
    def step(self) -> None:
        """Casts, clipping, update, casts."""
        torch._foreach_copy_(self.wide, self.given)
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip, foreach=True)
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)


class Compiled:
    """torch's functional foreach AdamW with both casts in one compiled function, so that inductor may fuse them."""

    def __init__(self, shapes: Sequence[Shape], device: torch.device) -> None:
        self.masters = [p.detach() for p in parameters(shapes, device)]
        self.given = gradients(shapes, device)
        self.first = [torch.zeros_like(m) for m in self.masters]
        self.second = [torch.zeros_like(m) for m in self.masters]
        self.steps = [torch.zeros((), device=device) for _ in self.masters]
        self.weights = [m.bfloat16() for m in self.masters if m.dim() > 1]
        self._compiled = torch.compile(self._body, fullgraph=True)

    def _body(self) -> None:
        adamw(
            self.masters,
            [g.float() for g in self.given],
            self.first,
            self.second,
            [],
            self.steps,
            foreach=True,
            capturable=True,
            amsgrad=False,
            maximize=False,
            beta1=OPTIONS["betas"][0],
            beta2=OPTIONS["betas"][1],
            lr=OPTIONS["lr"],
            weight_decay=OPTIONS["weight_decay"],
            eps=OPTIONS["eps"],
        )
        torch._foreach_copy_(self.weights, [m for m in self.masters if m.dim() > 1])

    @torch.no_grad()
    def step(self) -> None:
        """One compiled step."""
        self._compiled()


@dataclass
class Flat:
    """Flat buffers with the same weights and gradients; one set serves every row of ours."""

    flat: FlatParameters
    gradients: list[Tensor]

    def fused(self, clip: float, launch: Launch | None = None, implementation: str = "triton") -> FusedAdamW:
        """A step on them; without clipping also without the gate, as torch's rows have none."""
        made = FusedAdamW(self.flat, clip=clip, gate=bool(clip), launch=launch, implementation=implementation)
        made.set_gradients(self.gradients)
        return made


def flat_of(shapes: Sequence[Shape], device: torch.device) -> Flat:
    """Flat buffers over seeded weights; matrices have shadows."""
    ps = parameters(shapes, device)
    flat = FlatParameters(torch.optim.AdamW(ps, **OPTIONS), [p for p in ps if p.dim() > 1])
    return Flat(flat, gradients(shapes, device))


def parity(device: torch.device, implementation: str, clip: float, launch: Launch | None = None) -> float:
    """Largest relative difference from torch's fused AdamW after five steps on odd shapes; raises beyond 2e-6."""
    shapes = shapes_of(ODD)
    stock, flat = Stock(shapes, device, clip, foreach=True), flat_of(shapes, device)
    fused = flat.fused(clip, launch, implementation)
    for _ in range(5):
        stock.step()
        fused.step()
    worst = 0.0
    for p, q in zip(flat.flat.parameters, stock.parameters, strict=True):
        worst = max(worst, float((p - q).detach().abs().max() / q.detach().abs().max()))
        if flat.flat.has_shadow(p) and not torch.equal(flat.flat.shadow_of(p), p.detach().bfloat16()):
            raise SystemExit(f"parity: the shadow of a {tuple(p.shape)} is not its rounded master")
    if not worst <= 2e-6:
        raise SystemExit(f"parity: {implementation}, clip {clip}: {worst:.1e} from torch.optim.AdamW")
    return worst
