"""The training runs of the size benchmark: a 10.9 M-parameter byte-level transformer on the interpreter's own library.

States are plain dicts of CPU tensors in the order that `lf_ckpt.collect` gives. Seeds are fixed; the corpus and the
rounding of matrix products depend on the Python and torch at hand, sizes move by less than a per mille with them.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CORPUS_FILES = 1500
SEQUENCES, LENGTH = 2, 64  # a batch; small, so that a run takes minutes on one core
WARM_UP = 20
RATE = 3e-4


class Block(nn.Module):
    """Pre-norm attention and MLP of width `d`."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length, d)."""
        batch, length, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class ByteModel(nn.Module):
    """Next-byte model; with `rows` also a table of hashed byte 4-grams whose gradient is sparse."""

    def __init__(self, d: int = 384, layers: int = 6, context: int = 128, rows: int = 0) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, d), nn.Embedding(context, d)
        self.table = nn.Embedding(rows, d, sparse=True) if rows else None
        self.blocks = nn.ModuleList(Block(d, 6) for _ in range(layers))
        self.nf, self.head = nn.LayerNorm(d), nn.Linear(d, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length) int64 bytes; logits over the next byte."""
        hidden = self.tok(x) + self.pos.weight[: x.shape[1]]
        if self.table is not None:
            p = F.pad(x, (3, 0))
            gram = p[:, 3:] + p[:, 2:-1] * 257 + p[:, 1:-2] * 66049 + p[:, :-3] * 16974593
            hidden = hidden + self.table(gram % self.table.num_embeddings)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.nf(hidden))
        return logits


def corpus() -> Tensor:
    """Bytes of the first files of the standard library, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)[:CORPUS_FILES]
    return torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in files)), dtype=torch.uint8)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW as in research: betas (0.9, 0.95), weight decay 0.1."""
    return torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)


@dataclass
class Run:
    """A model in training; `advance` to a step and take its `state`."""

    model: ByteModel
    optimizers: list[torch.optim.Optimizer]
    data: Tensor
    step: int = 0
    _batches: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def advance(self, to: int, rate: float = RATE) -> None:
        """Train up to step `to`."""
        while self.step < to:
            self.step += 1
            warm = min(1.0, self.step / WARM_UP)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * warm
            self._one_step()

    def _one_step(self) -> None:
        starts = torch.randint(len(self.data) - LENGTH - 1, (SEQUENCES,), generator=self._batches)
        batch = torch.stack([self.data[at : at + LENGTH + 1] for at in starts]).long()
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        dense = [p for p in self.model.parameters() if p.grad is not None and not p.grad.is_sparse]
        nn.utils.clip_grad_norm_(dense, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """Copies of the parameters."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """Copies of parameters and Adam moments: 12 bytes per parameter, and a counter per tensor."""
        return {**self.weights(), **{name: value.clone() for name, value in self._moments()}}

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for parameter, values in optimizer.state.items():
                for key, value in values.items():
                    if isinstance(value, Tensor):
                        yield f"{names[parameter]}.{key}", value


def dense_run(data: Tensor) -> Run:
    """The 10.9 M-parameter run."""
    torch.manual_seed(0)
    model = ByteModel()
    return Run(model, [adamw(model.parameters())], data)


def freeze_all_but_last(run: Run) -> Run:
    """Go on with the last of six blocks and the final norm only."""
    for name, parameter in run.model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.5", "nf")))
    live = [p for p in run.model.parameters() if p.requires_grad]
    return Run(run.model, [adamw(live)], run.data, run.step, run._batches)


def sparse_run(data: Tensor) -> Run:
    """A table of 65536 rows under SparseAdam, on a small model under AdamW."""
    torch.manual_seed(0)
    model = ByteModel(d=96, layers=2, rows=65536)
    assert model.table is not None
    rest = [p for name, p in model.named_parameters() if name != "table.weight"]
    table = torch.optim.SparseAdam([model.table.weight], lr=RATE)
    return Run(model, [adamw(rest), table], data)
