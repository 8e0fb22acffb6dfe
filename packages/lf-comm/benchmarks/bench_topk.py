#!/usr/bin/env python3
"""Block top-k beside DDP's own averaging and torch's PowerSGD hook: bytes on the wire, time of a step, loss.

    bench_topk.py --json OUT.json [--ranks 2] [--steps 300] [--seeds 0,1,2] [--link-mbit 1000] [--bytes-ranks 2,3,4]

A tiny language model (gr00t_n16_lm of lf-meta) reads the bytes of this repository's texts and code. Every row makes the
same steps from the same weights on the same batches; "loss" is that of texts that nobody trained on. The ranks run in
a network namespace of their own, whose loopback carries all of them and is held to ranks x rate (needs root,
iproute2); bytes are what it counted, headers included. Then one gradient of --mb MiB is averaged by 2, 3 and 4 ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_rows import INSIDE, sent_by_loopback, shape
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import lf_comm
from lf_meta.models.gr00t_lm import GR00TLM, build

LENGTH, BATCH, WARM, LR = 128, 4, 20, 3e-3
BYTES, LOSS = 0.26, 1.01  # of dense, of the issue


def powersgd(ddp: DistributedDataParallel) -> None:
    """torch's hook, of rank 4, after ten dense steps."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


ROWS: dict[str, Callable[[DistributedDataParallel], object]] = {
    "DDP, dense": lambda ddp: None,
    "PowerSGD, rank 4": powersgd,
    "blocks, threshold 0": lambda ddp: lf_comm.SparseGradientReducer.attach(ddp, 0.0),
    "blocks, threshold 0.85": lambda ddp: lf_comm.SparseGradientReducer.attach(ddp),
    "blocks, threshold 0, no feedback": lambda ddp: lf_comm.SparseGradientReducer.attach(ddp, 0.0, 4, False),
}


def corpus() -> Tensor:
    """Bytes of the repository's texts and code, files in the order of their digests; int64."""
    root = Path(__file__).resolve().parents[3]
    names = subprocess.run(
        ["git", "ls-files", "*.md", "*.py"], cwd=root, capture_output=True, text=True, check=True
    )
    files = [(root / name).read_bytes() for name in names.stdout.split()]
    files.sort(key=lambda data: hashlib.blake2b(data).digest())
    return torch.frombuffer(bytearray(b"\n".join(files)), dtype=torch.uint8).long()


def batch_of(text: Tensor, seed: int) -> Tensor:
    """int64 [BATCH, LENGTH] from random places."""
    starts = torch.randint(0, len(text) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[at : at + LENGTH] for at in starts.tolist()])


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Nats per predicted byte."""
    total, count = model(tokens, torch.full((len(tokens),), LENGTH))
    loss: Tensor = total / count
    return loss


def train(how: str, seed: int, options: argparse.Namespace, text: Tensor) -> dict[str, Any]:
    """One row of one seed."""
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), options.steps
    cut = len(text) * 19 // 20
    torch.manual_seed(seed)
    net: GR00TLM = build("tiny", 256)
    ddp = DistributedDataParallel(
        net, bucket_cap_mb=64
    )  # one bucket: on Gloo, PowerSGD's of several get mixed up
    reducer = ROWS[how](ddp)
    optimizer = torch.optim.AdamW(net.parameters(), LR, betas=(0.9, 0.95), weight_decay=0.1)
    seconds, sent = [], []
    for step in range(steps):
        rate = min((step + 1) / WARM, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = LR * rate
        dist.barrier()
        before, began = sent_by_loopback(), time.perf_counter()
        dist.barrier()
        mean_loss(ddp, batch_of(text[:cut], (seed * steps + step) * ranks + rank)).backward()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        sent.append((sent_by_loopback() - before) / ranks)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = [float(mean_loss(net, batch_of(text[cut:], 10**6 + i))) for i in range(16)]
    late = slice(steps // 2, None)
    found = {
        "row": how,
        "seed": seed,
        "loss": statistics.mean(losses),
        "step_ms": 1e3 * statistics.median(seconds[late]),
        "bytes": statistics.median(sent[late]),
    }
    if isinstance(reducer, lf_comm.SparseGradientReducer):
        found["in_blocks"] = sum(one.path == "blocks" for one in reducer.report().values())
        found["concentration"] = {n: d.concentration for n, d in reducer.report().items()}
    return found


def large(options: argparse.Namespace) -> dict[str, float]:
    """Bytes and median time of one large gradient, dense and by blocks."""
    count = options.mb << 18
    net = nn.Linear(1, count, bias=False)
    found: dict[str, float] = {"ranks": dist.get_world_size(), "elements_formula": dist.get_world_size() / 4}
    for name, blocks in (("dense", False), ("blocks", True)):
        ddp = DistributedDataParallel(net, bucket_cap_mb=2 * options.mb)
        if blocks:
            lf_comm.SparseGradientReducer.attach(ddp, 0.0)
        values, seconds, sent = (
            torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank())),
            [],
            [],
        )
        for _ in range(6):
            loss = (ddp(torch.ones(1, 1))[0] * values).sum()
            dist.barrier()
            before, began = sent_by_loopback(), time.perf_counter()
            dist.barrier()
            loss.backward()
            dist.barrier()
            seconds.append(time.perf_counter() - began)
            sent.append((sent_by_loopback() - before) / dist.get_world_size())
            net.zero_grad()
        found[f"{name}_bytes"], found[f"{name}_ms"] = (
            statistics.median(sent),
            1e3 * statistics.median(seconds[1:]),
        )
    return found


def one_rank(rank: int, ranks: int, options: argparse.Namespace, training: bool) -> None:
    """What each process does; rank 0 prints, and leaves a file for the parent."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{options.json.resolve()}.store", rank=rank, world_size=ranks)
    if training:
        text = corpus()
        found: Any = []
        for seed in map(int, options.seeds.split(",")):
            for how in ROWS:
                found.append(train(how, seed, options, text))
                if rank == 0:
                    print({k: v for k, v in found[-1].items() if k != "concentration"}, flush=True)
    else:
        found = large(options)
    if rank == 0:
        part_of(options).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def part_of(options: argparse.Namespace) -> Path:
    """Where rank 0 leaves what it found."""
    return Path(f"{options.json.resolve()}.part")


def run(ranks: int, options: argparse.Namespace, training: bool) -> Any:
    """Ranks over a link of that rate for each of them."""
    shape(argparse.Namespace(link_mbit=options.link_mbit, ranks=ranks))
    store = Path(f"{options.json.resolve()}.store")
    store.unlink(missing_ok=True)
    mp.spawn(one_rank, (ranks, options, training), nprocs=ranks)
    found = json.loads(part_of(options).read_text())
    store.unlink(missing_ok=True)
    part_of(options).unlink()
    if options.link_mbit:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)
    return found


def table(trained: list[dict[str, Any]]) -> list[str]:
    """Means over seeds beside the dense row."""
    lines = [
        "| row | KB sent a step | of dense | step ms | loss | worst loss / dense |",
        "|---|---|---|---|---|---|",
    ]
    dense = {one["seed"]: one for one in trained if one["row"] == next(iter(ROWS))}
    for how in ROWS:
        mine = [one for one in trained if one["row"] == how]
        kb, ms, loss = (statistics.mean(one[k] for one in mine) for k in ("bytes", "step_ms", "loss"))
        share = statistics.mean(one["bytes"] / dense[one["seed"]]["bytes"] for one in mine)
        worst = max(one["loss"] / dense[one["seed"]]["loss"] for one in mine)
        lines.append(f"| {how} | {kb / 1e3:.0f} | {share:.3f} | {ms:.0f} | {loss:.4f} | {worst:.4f} |")
    return lines


def bars(trained: list[dict[str, Any]], summed: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Those of the issue."""
    dense = {one["seed"]: one["loss"] for one in trained if one["row"] == next(iter(ROWS))}
    found: list[dict[str, Any]] = []
    for one in summed:
        share = one["blocks_bytes"] / one["dense_bytes"]
        found.append({"bar": f"{one['ranks']} ranks: bytes of dense", "value": share, "limit": BYTES})
    for row in trained:
        if row["row"] in ("blocks, threshold 0", "blocks, threshold 0.85"):
            name = f"{row['row']}, seed {row['seed']}: loss of dense"
            found.append({"bar": name, "value": row["loss"] / dense[row["seed"]], "limit": LOSS})
    return [{**one, "holds": one["value"] <= one["limit"]} for one in found]


def main() -> None:
    """Enter a namespace, train, sum, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--ranks", type=int, default=2, help="that train")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--mb", type=int, default=16)
    parser.add_argument("--bytes-ranks", default="2,3,4")
    parser.add_argument(
        "--link-mbit", type=int, default=1000, help="of each rank; 0 leaves the loopback free"
    )
    options = parser.parse_args()
    if INSIDE not in os.environ:
        options.json.resolve().parent.mkdir(parents=True, exist_ok=True)
        command = ["unshare", "-n", sys.executable, *sys.argv]
        raise SystemExit(subprocess.run(command, env={**os.environ, INSIDE: "1"}).returncode)
    trained = run(options.ranks, options, True)
    summed = [run(ranks, options, False) for ranks in map(int, options.bytes_ranks.split(","))]
    print("\n".join(table(trained)))
    print(
        "\n| ranks | dense MB, ms | blocks MB, ms | of dense | values with indices, by formula |\n|---|---|---|---|---|"
    )
    for one in summed:
        ours, dense = one["blocks_bytes"], one["dense_bytes"]
        print(
            f"| {one['ranks']} | {dense / 1e6:.1f}, {one['dense_ms']:.0f} | {ours / 1e6:.1f}, {one['blocks_ms']:.0f} | "
            f"{ours / dense:.3f} | {one['elements_formula']:.2f} |"
        )
    found = bars(trained, summed)
    for bar in found:
        print(
            f"bar {bar['bar']}: {bar['value']:.4f}, limit {bar['limit']}, {'holds' if bar['holds'] else 'MISSED'}"
        )
    machine = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "torch": str(torch.__version__),
        "load": " ".join(f"{x:.1f}" for x in os.getloadavg()),
    }
    settings = {k: v for k, v in vars(options).items() if k != "json"}
    document = {"version": 1, "machine": machine, "settings": settings, "trained": trained, "summed": summed}
    options.json.write_text(json.dumps({**document, "bars": found}, indent=1))


if __name__ == "__main__":
    main()
