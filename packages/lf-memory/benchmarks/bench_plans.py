#!/usr/bin/env python3
"""Predicted beside measured memory of the backward pass of GPTs, and the seconds a plan takes.

    bench_plans.py [--json OUT] [--device cpu|cuda] [--models NAME ...] [--modes MODE ...] [--no-measure]

Each row plans a step on fake tensors, plans it again from the cache, and runs it once with the allocator watched. A
model that does not fit on the device is predicted only. Peer: torch.distributed._tools.mem_tracker.MemTracker, which
also runs fake tensors; it knows no policy, so it stands beside the mode "all-alive".
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from lf_memory.gradients import Plan, predict, verify
from lf_memory.gradients._policy import MODES

MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """A GPT and its batch."""

    layers: int
    width: int
    heads: int
    vocab: int
    batch: int
    length: int
    dtype: torch.dtype
    tied: bool = False
    chunk: int = 0  # tokens of a chunk of head and loss; 0 makes all logits

    @property
    def gib(self) -> float:
        """What a real step needs at least: parameters, gradients and 40 activations a layer."""
        parameters = 12 * self.layers * self.width**2 + 2 * self.vocab * self.width
        activations = 40 * self.layers * self.batch * self.length * self.width
        return (2 * parameters + activations) * self.dtype.itemsize / 2**30


SMALL = {
    "layers": 12,
    "width": 768,
    "heads": 12,
    "vocab": 32000,
    "batch": 2,
    "length": 128,
    "dtype": torch.float32,
}
LARGE = {
    "layers": 24,
    "width": 2048,
    "heads": 16,
    "vocab": 32000,
    "batch": 4,
    "length": 2048,
    "dtype": torch.bfloat16,
}
MODELS = {
    "134 M": Shape(**SMALL),
    "110 M, tied": Shape(**SMALL, tied=True),
    "1.34 B": Shape(**LARGE),
    "1.34 B, chunked loss": Shape(**LARGE, chunk=256),
}

COLUMNS = (
    *("model", "gradients are", "of parameters", "backward allocates", "measured", "measured / predicted"),
    *("step peak", "measured", "MemTracker", "plan, s", "from cache, s"),
)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and cross entropy, a chunk of tokens at a time; the backward pass makes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk = chunk
        parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
        losses = [F.cross_entropy((h @ weight.t()).float(), t, reduction="sum") for h, t in parts]
        return torch.stack(losses).sum() / len(targets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        to_hidden, to_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        parts = zip(
            hidden.split(ctx.chunk), targets.split(ctx.chunk), to_hidden.split(ctx.chunk), strict=True
        )
        for h, t, out in parts:
            probability = (h @ weight.t()).float()
            probability -= probability.logsumexp(-1, keepdim=True)
            probability.exp_()
            probability.scatter_add_(1, t[:, None], torch.full_like(t[:, None], -1, dtype=torch.float32))
            probability *= gradient / len(targets)
            small = probability.to(weight.dtype)
            torch.mm(small, weight, out=out)
            to_weight.addmm_(small.t(), h)
        return to_hidden, to_weight, None, None


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.chunk = shape.chunk
        self.embed, self.position = (
            nn.Embedding(shape.vocab, shape.width),
            nn.Embedding(shape.length, shape.width),
        )
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        x, targets = self.norm(x).flatten(0, 1), ids.flatten()
        if self.chunk:
            found: torch.Tensor = ChunkedCrossEntropy.apply(x, self.head.weight, targets, self.chunk)
            return found
        return F.cross_entropy(self.head(x).float(), targets)


def make(shape: Shape, device: str, fake: bool) -> tuple[GPT, torch.Tensor]:
    """The model and its ids."""
    with FakeTensorMode() if fake else nullcontext(), torch.device(device):
        model = GPT(shape).to(shape.dtype) if not fake else _fake_model(shape)
        return model, torch.zeros((shape.batch, shape.length), dtype=torch.long)


def _fake_model(shape: Shape) -> GPT:
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        return GPT(shape)
    finally:
        torch.set_default_dtype(before)


def timed(work: Callable[[], Plan]) -> tuple[Plan, float]:
    began = time.perf_counter()
    plan = work()
    return plan, time.perf_counter() - began


def peer_peak(shape: Shape, device: str) -> int:
    """MemTracker's peak of a step above the parameters, bytes."""
    model, ids = make(shape, device, fake=True)
    tracker = MemTracker()
    tracker.track_external(model)
    with next(model.parameters()).fake_mode, tracker:  # type: ignore[attr-defined]
        model(ids).backward()
    peak = tracker.get_tracker_snapshot("peak")
    (totals,) = (sizes for place, sizes in peak.items() if place.type == device)
    own = sum(p.nbytes for p in model.parameters())
    return int(next(size for kind, size in totals.items() if str(kind) == "Total")) - own


def row(name: str, mode: Any, options: argparse.Namespace) -> dict[str, Any]:
    shape, device = MODELS[name], options.device
    model, ids = make(shape, device, fake=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dag.json"
        plan, made_s = timed(lambda: predict(model, ids, mode=mode, dag_cache_path=path))
        _, read_s = timed(lambda: predict(model, ids, mode=mode, dag_cache_path=path))
    found: dict[str, Any] = {
        "model": name,
        "mode": mode,
        "made_s": made_s,
        "read_s": read_s,
        "steps": plan.steps,
    }
    found |= {
        key: getattr(plan, key) for key in ("parameter_peak_bytes", "gradient_peak_bytes", "step_peak_bytes")
    }
    found |= {"arena_bytes": plan.arena_bytes, "arena_bound_bytes": plan.arena_bound_bytes, "plan": str(plan)}
    if mode == "all-alive":
        found["peer_step_peak_bytes"] = peer_peak(shape, device)
    if options.measure and shape.gib < memory_gib(device):
        real, real_ids = make(shape, device, fake=False)
        measured = verify(plan, real, real_ids).measured
        found["measured"] = asdict(measured)
        found["measured_step_peak_bytes"] = max(measured.forward_peak_bytes, measured.backward_peak_bytes)
    return found


def memory_gib(device: str) -> float:
    """What may be used: half of what is free."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] / 2**31
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**31


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS)
    for one in rows:
        measured = one.get("measured", {}).get("gradient_peak_bytes")
        cells = [
            one["model"],
            one["mode"],
            mib(one["parameter_peak_bytes"]),
            mib(one["gradient_peak_bytes"]),
            mib(measured),
            "-" if measured is None else f"{measured / one['gradient_peak_bytes']:.4f}",
            mib(one["step_peak_bytes"]),
            mib(one.get("measured_step_peak_bytes")),
            mib(one.get("peer_step_peak_bytes")),
            f"{one['made_s']:.2f}",
            f"{one['read_s']:.2f}",
        ]
        yield "| " + " | ".join(cells) + " |"


def mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / MIB:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--no-measure", dest="measure", action="store_false", help="predict only")
    options = parser.parse_args()
    make(
        Shape(1, 64, 1, 64, 1, 8, torch.float32), options.device, fake=True
    )  # the first fake tensor costs a second
    rows = [row(name, mode, options) for name in options.models for mode in options.modes]
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    info = {"device": device, "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    info |= {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(
        f"{device}, {info['cores']} cores, load {info['load']:.1f}; torch {info['torch']}; {info['date']}; MiB\n"
    )
    print("\n".join(table(rows)))
    if options.json:
        options.json.write_text(json.dumps({"machine": info, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
