"""A small language model, its batches, and the eager loop that TrainStep must equal; on the CPU and on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lf_graph import TrainStep

VOCABULARY, WIDTH = 13, 16
Batch = tuple[Tensor, Tensor]
Build = Callable[[nn.Module], torch.optim.Optimizer]
TOLERANCE = 1e-6  # AdamW's lr is 1e-2: a rounding of the gradient changes a weight by 1e-9 to 1e-7


class Block(nn.Module):
    """A residual pair of linear layers, with dropout and BatchNorm where asked."""

    def __init__(self, dropout: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.batch_norm = nn.BatchNorm1d(2 * WIDTH) if batch_norm else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        if self.batch_norm is not None:
            hidden = self.batch_norm(hidden.flatten(0, 1)).view_as(hidden)
        return x + self.dropout(self.down(F.gelu(hidden)))


class LanguageModel(nn.Module):
    """Next-token loss as (sum, tokens that count); id 0 does not count."""

    def __init__(self, blocks: int = 2, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        losses = F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten(), reduction="none")
        counted = (targets.flatten() != 0).float()
        return (losses * counted).sum(), counted.sum()


class Towers(nn.Module):
    """A frozen encoder before a trained head; ``functional`` puts a trained weight between them, used in the root."""

    def __init__(self, functional: str = "") -> None:
        super().__init__()
        self.functional = functional
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.ones(6 if functional == "before" else 8))
        self.head = nn.Linear(8, 1)
        self.encoder.requires_grad_(False)
        self.scale.requires_grad_(bool(functional))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.functional == "before":
            x = x * self.scale
        hidden = self.encoder(x)
        if self.functional == "after":
            hidden = hidden * self.scale
        error = self.head(hidden).squeeze(1) - y
        return error.square().sum(), torch.full((), float(len(y)), device=x.device)


def pairs(count: int, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    made = [(torch.randn(4, 6, generator=draw), torch.randn(4, generator=draw)) for _ in range(count)]
    return [(x.to(device), y.to(device)) for x, y in made]


def model_of(seed: int = 0, device: str = "cpu", **options: Any) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(**options).to(device)


def batches(count: int, length: int = 6, rows: int = 3, device: str = "cpu", seed: int = 1) -> list[Batch]:
    """Micro-batches whose number of counted tokens differs."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(0, VOCABULARY, (2, rows, length), generator=draw)
        ids[1, :, int(torch.randint(2, length, (), generator=draw)) :] = 0
        made.append((ids[0].to(device), ids[1].to(device)))
    return made


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, **{"lr": 1e-2, "weight_decay": 0.1, **options})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not and learn faster."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "lr": 3e-2, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.8, 0.95),
    )


def cosine(optimizer: torch.optim.Optimizer, steps: int = 20) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def grouped(micros: Sequence[Batch], accumulate: int) -> Iterable[Sequence[Batch]]:
    return (micros[i : i + accumulate] for i in range(0, len(micros), accumulate))


def eager_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micros: Sequence[Batch],
    clip: float = 0.0,
    autocast: torch.dtype | None = None,
    loss: Callable[..., Any] | None = None,
) -> float:
    """One update by the book: summed losses, gradients divided once by the number of tokens. Returns the mean loss."""
    total, count = 0.0, 0.0
    for micro in micros:
        cast = (
            torch.autocast(micro[0].device.type, autocast, cache_enabled=False) if autocast else nullcontext()
        )
        with cast:
            part, tokens = (loss or model)(*micro)
        part.backward()
        total, count = total + float(part.detach()), count + float(tokens)
    trained = [p for p in model.parameters() if p.grad is not None]
    for p in trained:
        p.grad.mul_(1 / count)
    if clip:
        nn.utils.clip_grad_norm_(trained, clip)
    optimizer.step()
    optimizer.zero_grad()
    return total / count


def step_update(step: TrainStep, micros: Sequence[Batch]) -> Tensor:
    """One update by graphs; returns the mean loss on the device."""
    for micro in micros:
        step.micro(*micro)
    return step.update().loss


class Twins:
    """The same model twice: ``plain`` is trained eagerly, ``ours`` by a TrainStep."""

    def __init__(
        self,
        build: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        *,
        model: nn.Module | None = None,
        device: str = "cpu",
        accumulate: int = 1,
        clip: float = 0.0,
        autocast: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self.ours = model_of(device=device) if model is None else model
        self.plain = copy.deepcopy(self.ours)
        self.optimizer, self.reference = build(self.ours), build(self.plain)
        self.accumulate, self.clip, self.autocast = accumulate, clip, autocast
        self.step = TrainStep(
            self.ours, self.optimizer, accumulate=accumulate, clip=clip, autocast=autocast, **options
        )

    def run(self, micros: Sequence[Batch], schedule: bool = False) -> None:
        """Train both on the same batches, each from the same random numbers."""
        rates = [cosine(o) for o in (self.optimizer, self.reference)] if schedule else []
        for i, group in enumerate(grouped(micros, self.accumulate)):
            torch.manual_seed(100 + i)
            theirs = eager_update(self.plain, self.reference, group, self.clip, self.autocast)
            torch.manual_seed(100 + i)
            ours = step_update(self.step, group)
            assert abs(float(ours) - theirs) <= (1e-2 if self.autocast else 1e-4) * abs(theirs)
            for rate in rates:
                rate.step()

    def difference(self) -> float:
        """Largest difference between the weights and buffers of the two."""
        return largest_difference(self.ours, self.plain)


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    """Copies of every weight, buffer and tensor of optimizer state."""
    kept = [t.detach().clone() for t in model.state_dict().values()]
    if optimizer is not None:
        states = optimizer.state_dict()["state"].values()
        kept += [v.detach().clone() for s in states for v in s.values() if isinstance(v, Tensor)]
    return kept


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
