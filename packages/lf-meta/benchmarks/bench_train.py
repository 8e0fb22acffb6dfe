"""What the trainer costs on top of a bare PyTorch loop with the same model, batch and optimizer.

Rows of one run, each the median over log intervals after warm-up:

- bare loop: one batch that already lies on the device, forward, backward, clip, fused AdamW; nothing else
- torch pieces: our loop with torch's DataLoader (in-process) and torch.save
- ours: our loop with lf-iouring and lf-ckpt

The two trainer rows read every batch from disk, check its hashes, write metrics and save checkpoints.

    python bench_train.py --json out.json                    # size tiny on a CPU, 1.6b on a CUDA device
    python bench_train.py --size small --batch 16 --length 512
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lf_format as lff
import lf_meta
from lf_meta import jobs
from lf_meta.config import Config, load_config
from lf_meta.metrics import MetricsFile
from lf_meta.session import autocast_for, make_model
from lf_meta.signals import StopSignal

DEFAULTS = {"cpu": ("tiny", 256, 16, 128, 120, 40), "cuda": ("1.6b", 50257, 8, 2048, 60, 20)}


def arguments() -> argparse.Namespace:
    """Command line; numbers not given depend on the device."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", help="write the results here")
    p.add_argument("--size")
    p.add_argument("--vocab", type=int)
    p.add_argument("--batch", type=int)
    p.add_argument("--length", type=int)
    p.add_argument("--steps", type=int)
    p.add_argument("--save-every", type=int)
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = ("size", "vocab", "batch", "length", "steps", "save_every")
    for name, value in zip(names, DEFAULTS[device], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.device = torch.device(device)
    return args


def write_data(path: Path, args: argparse.Namespace) -> None:
    """Random records, all of one length, enough for one epoch of the run."""
    rng = np.random.default_rng(0)
    tokenizer = lff.TokenizerInfo("random", "")
    with lff.Writer(path, vocab_size=args.vocab, tokenizer=tokenizer, buckets=(args.length,)) as writer:
        for _ in range(args.batch * args.steps):
            writer.append(rng.integers(0, args.vocab, args.length))


def configured(folder: Path, name: str, args: argparse.Namespace, *more: str) -> Config:
    """The run of one trainer row."""
    return load_config(
        None,
        [
            f"run.name={name}",
            f"run.dir={folder / 'runs'}",
            f"run.steps={args.steps}",
            f"model.size={args.size}",
            f"data.path={folder / 'data.loongbin'}",
            f"data.max_len={args.length}",
            f"batch.size={args.batch}",
            f"ckpt.every={args.save_every}",
            "ckpt.keep=1",
            "metrics.every=5",
            "eval.every=0",
            "optim.lr=1e-4",
            *more,
        ],
    )


def bare_loop(config: Config, args: argparse.Namespace) -> list[float]:
    """Milliseconds per step of intervals of 5 steps."""
    model = make_model(config, args.vocab, args.device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    autocast = autocast_for(config, args.device)
    tokens = torch.randint(0, args.vocab, (args.batch, args.length), device=args.device)
    lengths = torch.full((args.batch,), args.length, device=args.device)
    intervals = []
    for _ in range(args.steps // 5):
        start = time.perf_counter()
        for _ in range(5):
            optimizer.zero_grad(set_to_none=True)
            with autocast():
                loss, count = model(tokens, lengths)
            (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        intervals.append((time.perf_counter() - start) * 200)
    return intervals


def trainer(config: Config) -> dict[str, Any]:
    """Run the trainer; intervals with a save are reported apart."""
    start = time.perf_counter()
    with redirect_stdout(sys.stderr), StopSignal() as signal:
        jobs.start_run(config, signal)
    assert config.run.name is not None
    run = Path(config.run.dir) / config.run.name
    rows = list(MetricsFile(run / "metrics.jsonl").rows())
    shutil.rmtree(run)  # a checkpoint of the next row may need the space
    steps = [(r["step"], r["step_ms"], r["wait_pct"]) for r in rows if "loss" in r and r["step"] % 5 == 0]
    every = config.ckpt.every
    # a save is started after an interval was reported, so its cost lands in the next one
    saving = [ms for step, ms, _ in steps if step > every and (step - 5) % every == 0]
    plain = [ms for step, ms, _ in steps if step > 10 and (step - 5) % every != 0]
    return {
        "intervals_ms": plain,
        "save_ms": (statistics.median(saving) - statistics.median(plain)) * 5 if saving else None,
        "wait_pct": statistics.median(w for step, _, w in steps if step > 10),
        "total_s": time.perf_counter() - start,
    }


def summary(name: str, intervals: list[float], base: float | None, more: dict[str, Any]) -> dict[str, Any]:
    """One table row."""
    median = statistics.median(intervals)
    spread = (max(intervals) - min(intervals)) / median
    return {"row": name, "step_ms": median, "spread": spread, "ratio": median / (base or median), **more}


def driver() -> str | None:
    """Version of the NVIDIA driver, or None without one."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return None
    return next((word for word in line.split() if word[0].isdigit() and "." in word), line)


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Where this ran."""
    gpu = torch.cuda.get_device_name(0) if args.device.type == "cuda" else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "driver": driver(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "lf_meta": lf_meta.__version__,
    }


def main() -> None:
    """Run all rows, print the table, write the JSON."""
    args = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data.loongbin", args)
        bare = bare_loop(configured(folder, "bare", args), args)[2:]
        base = statistics.median(bare)
        rows = [summary("bare loop", bare, base, {})]
        for label, more in [
            ("torch pieces", ["loader.backend=torch", "ckpt.backend=torch"]),
            ("ours", []),
        ]:
            if args.device.type == "cuda":
                torch.cuda.empty_cache()
            result = trainer(configured(folder, label.replace(" ", "-"), args, *more))
            rows.append(summary(label, result.pop("intervals_ms"), base, result))
    facts = machine(args)
    shape = f"{args.size}, batch {args.batch} x {args.length}; " + ", ".join(
        f"{k} {v}" for k, v in facts.items() if v
    )
    print(
        f"\n{shape}\n\n| row | step ms | spread | / bare | one save costs ms | data wait % |"
        "\n|---|---|---|---|---|---|"
    )
    for r in rows:
        save = "" if r.get("save_ms") is None else f"{r['save_ms']:.0f}"
        wait = "" if r.get("wait_pct") is None else f"{r['wait_pct']:.2f}"
        print(f"| {r['row']} | {r['step_ms']:.1f} | {r['spread']:.0%} | {r['ratio']:.3f} | {save} | {wait} |")
    if args.json:
        settings = {k: str(v) for k, v in vars(args).items() if k != "json"}
        Path(args.json).write_text(
            json.dumps({"machine": facts, "settings": settings, "rows": rows}, indent=2)
        )


if __name__ == "__main__":
    main()
