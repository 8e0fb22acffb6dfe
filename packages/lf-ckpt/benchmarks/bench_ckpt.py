#!/usr/bin/env python3
"""What a checkpoint costs: lf-ckpt beside its floors and peers, same state, disk and run.

    bench_ckpt.py --json OUT.json [--gib 1] [--repeat 3] [--dir DIR] [--only WORD ...]

stall: until the call returns and the tensors may change. durable: until the bytes are fsynced. CPU: seconds of this
process, with what lf-ckpt spends on removing the step before. Every saver saves the same float32 state `repeat` times,
in turns; the table shows the median and the fastest. The bars compare the fastest. Peers are taken from
here or from the environment of LF_PEERS_PYTHON (benchmarks/peers/requirements.txt; nox sets it).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ckpt_savers import (
    FLOORS,
    OURS,
    PEERS,
    DirectIo,
    HashPass,
    LfCkpt,
    LfCkptDelta,
    Memcpy,
    MoonclipDelta,
    Run,
    Saver,
    Skipped,
    Tensors,
    add_peers_path,
)
from scratch import scratch

import lf_ckpt

Runs = dict[str, list[Run]]


def make_state(gib: float) -> Tensors:
    """Float32 layers of 16 and 64 MiB, normal with deviation 0.02, as the weights of a 2048-wide model."""
    generator = torch.Generator().manual_seed(0)
    left, state = int(gib * (1 << 30)) // 4, {}
    while left > 0:
        count = min(left, 2048 * 2048 * (4 if len(state) % 2 else 1))
        state[f"layer{len(state)}.weight"] = torch.randn(count, generator=generator) * 0.02
        left -= count
    return state


def measure(saver: Saver, step: int) -> Run:
    """One save from a quiet disk."""
    os.sync()
    began, cpu = time.perf_counter(), time.process_time()
    finish = saver.save(step)
    stall = time.perf_counter() - began
    known = finish() if finish is not None else None
    if not saver.fsynced:
        fsync_tree(saver.path)
    durable = known if isinstance(known, float) else time.perf_counter() - began
    return Run(stall, durable, time.process_time() - cpu, newest_size(saver.path))


def fsync_tree(path: Path) -> None:
    """fsync every file below `path`."""
    for file in files_below(path):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def newest_size(path: Path) -> int:
    """Bytes of one save: of the newest folder of a store that has one per step, of everything otherwise."""
    steps = [*path.glob("store/steps/*"), *path.glob("moonclip/snapshots/*")]
    return sum(
        f.stat().st_size
        for f in files_below(max(steps, key=lambda p: p.stat().st_mtime_ns) if steps else path)
    )


def files_below(path: Path) -> list[Path]:
    """Regular files below `path`."""
    return [file for file in path.rglob("*") if file.is_file()]


def measure_load(saver: Saver, state: Tensors, into: Tensors) -> Run:
    """One load in place, with the files' pages dropped from the cache first; hashes are checked where there are any."""
    os.sync()
    for file in files_below(saver.path):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    began, cpu = time.perf_counter(), time.process_time()
    saver.load(into)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    if isinstance(saver, DirectIo):
        seconds = saver.seconds  # without the copy that lets the same check follow
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items()), saver.name
    for tensor in into.values():
        tensor.zero_()
    return Run(seconds, seconds, cpu, newest_size(saver.path))


def run_all(
    folder: Path, state: Tensors, repeat: int, kinds: list[type[Saver]]
) -> tuple[Runs, Runs, dict[str, str]]:
    """Saves, then cold loads, of every saver, in turns; the first save of each (staging memory made) is apart.

    Returns (saves, loads, notes): a note is why a row was skipped, or how lf-ckpt wrote and read.
    """
    savers, notes = [], {}
    for kind in kinds:
        (path := folder / kind.__name__).mkdir()
        try:
            savers.append(kind(path, state))
        except Skipped as reason:
            notes[kind.name] = f"skipped: {reason}"
    saves: Runs = {saver.name: [] for saver in savers}
    loads: Runs = {saver.name: [] for saver in savers if saver.loads}
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for turn in range(repeat + 1):
        for saver in savers:
            saves[saver.name].append(measure(saver, turn))
    for saver in savers:
        if saver.loads:  # the row of deltas has changed the state since
            if isinstance(saver, DirectIo):
                saver.fill()
            if (finish := saver.save(repeat + 1)) is not None:
                finish()
    for _ in range(repeat):
        for saver in savers:
            if saver.loads:
                loads[saver.name].append(measure_load(saver, state, into))
    for saver in savers:
        if isinstance(saver, LfCkpt):
            read = f"; read {saver.loaded.io}" if saver.loads else ""
            notes[saver.name] = f"written {saver.report.io}; {saver.report.slab}{read}"
        saver.close()
        shutil.rmtree(saver.path)
    return saves, loads, notes


def table(saves: dict[str, list[Run]], loads: dict[str, list[Run]], state_bytes: int) -> str:
    """The rows as Markdown: median (fastest)."""
    lines = [
        "| save | stall s | durable s | CPU s | first stall s | size / state |",
        "|---|---|---|---|---|---|",
    ]
    for name, (first, *runs) in saves.items():
        size = f"{runs[-1].size / state_bytes:.3f}" if runs[-1].size else "-"
        cells = " | ".join(spread([getattr(run, key) for run in runs]) for key in ("stall", "durable", "cpu"))
        lines.append(f"| {name} | {cells} | {first.stall:.2f} | {size} |")
    lines += ["", "| cold load in place | s | CPU s |", "|---|---|---|"]
    for name, runs in loads.items():
        lines.append(f"| {name} | {spread([r.durable for r in runs])} | {spread([r.cpu for r in runs])} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Median and minimum."""
    return f"{statistics.median(values):.2f} ({min(values):.2f})"


def bars(saves: Runs, loads: Runs) -> list[dict[str, Any]]:
    """The bars of the issue: ratios of the fastest runs, with their limits; those without their rows are left out."""

    def best(runs: Runs, name: str, key: str) -> float | None:
        values = (
            [getattr(run, key) for run in (runs[name][1:] if runs is saves else runs[name])]
            if name in runs
            else []
        )
        return min(values, default=None)

    def bar(name: str, ours: float | None, floor: list[float | None], limit: float) -> dict[str, Any] | None:
        if ours is None or None in floor:
            return None
        ratio = ours / sum(value for value in floor if value is not None)
        return {"bar": name, "ratio": ratio, "limit": limit, "holds": ratio <= limit}

    ours, io = LfCkpt.name, DirectIo.name
    floor = [best(saves, kind.name, "cpu") for kind in (Memcpy, DirectIo, HashPass)]
    found = [
        bar("stall / memcpy", best(saves, ours, "stall"), [best(saves, Memcpy.name, "stall")], 1.1),
        bar("durable / O_DIRECT write", best(saves, ours, "durable"), [best(saves, io, "durable")], 1 / 0.9),
        bar("CPU / (memcpy + O_DIRECT write + hash pass)", best(saves, ours, "cpu"), floor, 1.1),
        bar("cold load / O_DIRECT read", best(loads, ours, "durable"), [best(loads, io, "durable")], 1 / 0.9),
    ]
    for key in ("stall", "durable"):
        peers = [best(saves, kind.name, key) for kind in PEERS if kind.full]
        known = [value for value in peers if value is not None]
        found.append(bar(f"{key} / best peer", best(saves, ours, key), [min(known, default=None)], 1.0))
        delta = best(saves, LfCkptDelta.name, key)
        found.append(bar(f"delta, {key} / moonclip", delta, [best(saves, MoonclipDelta.name, key)], 1.0))
    return [one for one in found if one is not None]


def machine() -> dict[str, str]:
    """Where and with what."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpus": str(os.cpu_count()),
        "load": " ".join(f"{x:.1f}" for x in os.getloadavg()),
        "kernel": platform.release(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "lf-ckpt": lf_ckpt.__version__,
    }


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", required=True, type=Path, help="where the results go")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--dir", type=Path, help="a folder on the disk to measure, made if missing; default: the current one"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose name holds one of these words")
    arguments = parser.parse_args()
    add_peers_path()
    kinds = [k for k in (*FLOORS, *PEERS, *OURS) if any(word in k.name for word in arguments.only)]
    state = make_state(arguments.gib)
    state_bytes = sum(tensor.nbytes for tensor in state.values())
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # DCP's writer process wants them
    os.environ.setdefault("MASTER_PORT", "29511")
    with scratch(arguments.dir) as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        saves, loads, notes = run_all(folder, state, arguments.repeat, kinds)
        dist.destroy_process_group()
    found = bars(saves, loads)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    size = f"{state_bytes / 1e9:.2f} GB of float32 in {len(state)} tensors"
    print(f"state: {size}; median (fastest) of {arguments.repeat}\n")
    print(table(saves, loads, state_bytes) + "\n")
    for name, note in notes.items():
        print(f"{name}: {note}")
    for one in found:
        verdict = "holds" if one["holds"] else "MISSED"
        print(f"bar {one['bar']}: {one['ratio']:.2f}x, limit {one['limit']:.2f}x, {verdict}")
    rows = {
        kind: {name: [asdict(r) for r in runs] for name, runs in part.items()}
        for kind, part in (("saves", saves), ("loads", loads))
    }
    document = {
        "version": 2,
        "machine": machine(),
        "state_bytes": state_bytes,
        "bars": found,
        "notes": notes,
        **rows,
    }
    arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
