#!/usr/bin/env python3
"""Released training steps: bytes at the peak and seconds a step, beside the ordinary loop and what torch offers.

    bench_gradients.py [--json OUT] [--model 5m|134m|1.34b|1.6b] [--device cuda] [--steps N] [--groups A,B]

Each row is a process of its own: a step to make the optimizer's state, one that is measured for memory, then
timed ones; on the host CPU time of one thread, so that a busy machine disturbs little. "step" is the most that is
allocated during a step above parameters, state and batch; "gradients" the most bytes of complete gradients that
release saw alive; "bits" says whether the parameters at the end are, bit for bit, those of the group's ordinary
loop. The loss is computed in chunks of rows, and except for "activations" every row recomputes each block in backward:
else logits and activations would hide what gradients take.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gradient_models import SHAPES, batches, make, recompute
from gradient_rows import GROUPS, Run

MIB = 1 << 20
WARM = 1


def peak_on_host(work: Callable[[], object]) -> int:
    """Most bytes above the start that were asked of the CPU allocator."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


def peak_on_device(work: Callable[[], object]) -> int:
    """Most bytes above the start that were asked of the device's allocator."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    work()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"]) - before


def run_row(args: argparse.Namespace) -> dict[str, Any]:
    """One row in this process."""
    torch.set_num_threads(args.threads)
    device, shape = torch.device(args.device), SHAPES[args.model]
    micro, rows = GROUPS[args.group]
    options = {"fused": True} if args.fused_adamw else {}
    run = Run(
        make(args.model, device), options, torch.bfloat16 if shape.autocast else None, args.pool_gib << 30
    )
    if args.group != "activations":
        recompute(run.model)
    step = rows[args.row](run)
    data = batches(args.model, device, micro)
    for _ in range(WARM):
        step(data)
    gc.collect()
    peak = (peak_on_device if device.type == "cuda" else peak_on_host)(lambda: step(data))
    seconds = [timed(step, data, device) for _ in range(args.steps)]
    return {
        "peak_bytes": peak,
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "bits": digest(run),
        "gradient_bytes": None if run.handle is None else run.handle.stats().peak_bytes,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "parameter_bytes": sum(p.nbytes for p in run.model.parameters()),
    }


def timed(step: Callable[[Any], object], data: Any, device: torch.device) -> float:
    """Seconds of one step: of this process on the host, on the clock with a device."""
    if device.type == "cpu":
        began = time.process_time()
        step(data)
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    step(data)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def digest(run: Run) -> str:
    """Of the bits of all parameters."""
    found = hashlib.sha256()
    for p in run.model.parameters():
        found.update(p.detach().cpu().view(torch.uint8).numpy().tobytes() if p.dim() else b"")
    return found.hexdigest()


def in_process(args: argparse.Namespace, group: str, row: str) -> dict[str, Any]:
    """A row in a process of its own; what went wrong instead, if it did."""
    command = [
        sys.executable,
        __file__,
        "--group",
        group,
        "--row",
        row,
        "--model",
        args.model,
        "--device",
        args.device,
    ]
    command += ["--steps", str(args.steps), "--threads", str(args.threads), "--pool-gib", str(args.pool_gib)]
    command += ["--fused-adamw"] if args.fused_adamw else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {
            "missing": done.stderr.strip().splitlines()[-1]
            if done.stderr.strip()
            else f"exit {done.returncode}"
        }
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def machine(args: argparse.Namespace) -> dict[str, Any]:
    name = (
        torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    )
    return {
        "device": name,
        "cores": len(os.sched_getaffinity(0)),
        "threads": args.threads,
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "adamw": "fused" if args.fused_adamw else "as torch chooses",
    }


def print_group(group: str, rows: dict[str, dict[str, Any]]) -> None:
    first = next(iter(rows.values()))
    print(
        f"\n| {group} | step, MiB | gradients, MiB | s a step, median | fastest | bits |\n|---|---|---|---|---|---|"
    )
    for name, row in rows.items():
        if "missing" in row:
            print(f"| {name} | not measured: {row['missing']} | | | | |")
            continue
        gradients = "-" if row["gradient_bytes"] is None else f"{row['gradient_bytes'] / MIB:.1f}"
        same = "same" if row["bits"] == first.get("bits") else "other"
        times = f"{row['seconds']:.3f} | {row['fastest']:.3f}"
        print(f"| {name} | {row['peak_bytes'] / MIB:.1f} | {gradients} | {times} | {same} |")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", choices=SHAPES)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pool-gib", type=int, default=0)
    parser.add_argument("--fused-adamw", action="store_true")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = args.model or ("1.34b" if args.device == "cuda" else "5m")
    args.pool_gib = args.pool_gib or (24 if args.device == "cuda" else 2)
    return args


def main() -> None:
    args = arguments()
    if args.row:
        print(json.dumps(run_row(args)))
        return
    info, found = machine(args), {}
    for group in args.groups.split(","):
        found[group] = {row: in_process(args, group, row) for row in GROUPS[group][1]}
        print(f"measured: {group}", file=sys.stderr)
    measured = [row for rows in found.values() for row in rows.values() if "missing" not in row]
    size = measured[0]["parameters"] / 1e9 if measured else 0.0
    print(
        f"{args.model} ({size:.3f} B parameters), {info['device']}, {info['threads']} thread(s), "
        f"load {info['load']:.1f}; torch {info['torch']}, AdamW {info['adamw']}; {info['date']}"
    )
    for group, rows in found.items():
        print_group(group, rows)
    if args.json:
        args.json.write_text(
            json.dumps({"machine": info, "model": args.model, "groups": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
