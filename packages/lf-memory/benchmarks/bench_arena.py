#!/usr/bin/env python3
"""What contiguous gradients cost: a backward pass, then one norm over all gradients of each bucket.

    bench_arena.py [--json OUT] [--device cpu|cuda] [--repeat N] [--layers N] [--width N] [--vocab N]

Rows take turns. Peers: gradients as they come, one norm each, or foreach_norm; gradients flattened bucket by bucket
when the pass is over (torch._utils._flatten_dense_tensors, as reducers without views do). Peak bytes are those of
both passes and the norms, asked of the allocator, and the arena's own.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_plans import GPT, MIB, Shape
from torch._utils import _flatten_dense_tensors

from lf_memory.gradients import Bucket, GradientArena, predict
from lf_memory.gradients._measure import measure
from lf_memory.gradients._policy import Policy

Norms = list[torch.Tensor]
Finish = Callable[[GPT], Norms]


class Row:
    """A model of its own, what happens to its gradients within the pass, and after it."""

    def __init__(self, model: GPT, finish: Finish, arena: GradientArena | None = None) -> None:
        self.model, self.finish, self.arena = model, finish, arena

    def step(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.finish(self.model)
        self.model.zero_grad()


def one_by_one(model: GPT) -> Norms:
    return [p.grad.norm() for p in model.parameters() if p.grad is not None]


def foreach(model: GPT) -> Norms:
    return list(torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None]))


def flattened(model: GPT) -> Norms:
    gradients = [p.grad for p in reversed(list(model.parameters())) if p.grad is not None]
    buckets = Policy("bucket").buckets([g.nbytes for g in gradients])
    return [_flatten_dense_tensors([gradients[at] for at in bucket]).norm() for bucket in buckets]


def make_rows(make: Callable[[], GPT], ids: torch.Tensor) -> dict[str, Row]:
    rows = {
        "as they come, norm each": Row(make(), one_by_one),
        "as they come, foreach_norm": Row(make(), foreach),
        "flattened in buckets": Row(make(), flattened),
    }
    model, norms = make(), []

    def consume(bucket: Bucket) -> None:
        assert bucket.flat is not None
        norms.append(bucket.flat.norm())

    bucketed = GradientArena(predict(model, ids, mode="bucket"), model, consume)

    def flush(_: GPT) -> Norms:
        bucketed.flush()
        found, norms[:] = list(norms), []
        return found

    rows["arena, buckets given up"] = Row(model, flush, bucketed)
    model = make()
    kept = GradientArena(predict(model, ids, mode="all-alive"), model)
    rows["arena, all kept"] = Row(model, lambda _: [kept.flat.norm()], kept)
    return rows


def run(rows: dict[str, Row], ids: torch.Tensor, repeat: int) -> dict[str, dict[str, Any]]:
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None
    times: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(repeat + 1):
        for name, row in rows.items():
            loss = row.model(ids)
            wait()
            began = time.perf_counter()
            row.step(loss)
            wait()
            if turn:  # the first is a warm-up
                times[name].append((time.perf_counter() - began) * 1e3)
    found = {}
    for name, row in rows.items():
        measured = measure(lambda row=row: row.model(ids), row.step, ids.device)  # type: ignore[misc]
        found[name] = {
            "ms": statistics.median(times[name]),
            "min_ms": min(times[name]),
            "max_ms": max(times[name]),
            "peak_bytes": measured.backward_peak_bytes,
            "arena_bytes": 0 if row.arena is None else row.arena.stats().bytes,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=8000)
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    shape = Shape(options.layers, options.width, options.width // 64, options.vocab, 2, 128, dtype)

    def make() -> GPT:
        torch.manual_seed(0)
        with torch.device(options.device):
            return GPT(shape).to(dtype)

    ids = torch.zeros((2, 128), dtype=torch.long, device=options.device)
    rows = run(make_rows(make, ids), ids, options.repeat)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    info = {"device": device, "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    info |= {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    info |= {"model": vars(shape) | {"dtype": str(dtype)}}
    print(
        f"{device}, {info['cores']} cores, load {info['load']:.1f}; torch {info['torch']}; {info['date']}\n"
    )
    print("| gradients | ms, median | min - max | peak MiB | of these in the arena |\n|---|---|---|---|---|")
    for name, row in rows.items():
        spread = f"{row['min_ms']:.1f} - {row['max_ms']:.1f}"
        total, arena = row["peak_bytes"] + row["arena_bytes"], row["arena_bytes"]
        print(f"| {name} | {row['ms']:.1f} | {spread} | {total / MIB:.1f} | {arena / MIB:.1f} |")
    if options.json:
        options.json.write_text(json.dumps({"machine": info, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
