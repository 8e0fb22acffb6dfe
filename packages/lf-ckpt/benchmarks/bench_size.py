#!/usr/bin/env python3
"""How many bytes a checkpoint takes on real training: lf-ckpt beside moonclip, same states, same run.

    bench_size.py --json OUT.json [--dir DIR]

moonclip is taken from here or from the environment of LF_PEERS_PYTHON (benchmarks/peers/requirements.txt; nox sets it).

Saves fulls and deltas of the runs in training_run.py at chosen steps. A size is everything that a save adds to its
folder, index and manifest included, over the raw bytes of the state. Sizes do not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from ckpt_savers import add_peers_path
from scratch import scratch
from training_run import RATE, Run, corpus, dense_run, freeze_all_but_last, sparse_run

import lf_ckpt

Tensors = dict[str, torch.Tensor]
BARS = {
    "dense": {60: 0.84, 61: 0.70, 65: 0.75, 80: 0.79},
    "bf16 weights, lr 1e-6": {164: 0.015},
    "5 of 6 blocks frozen, weights": {184: 0.12, 203: 0.12},
    "sparse table": {101: 0.05},
}
MOONCLIP_RATIO = 0.95


def tree_bytes(path: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


class Ours:
    """lf-ckpt with its defaults."""

    name = "lf-ckpt"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = lf_ckpt.open(path, priority="normal")
        self.codecs: dict[int, dict[str, Any]] = {}

    def save(self, step: int, state: Tensors) -> int:
        """Bytes that the save of this step added."""
        report = self.store.save(step, state).wait()
        self.codecs[step] = {"kind": report.kind, "raw": report.codecs, "stored": report.codecs_stored}
        return tree_bytes(self.path / "steps" / report.folder)

    def close(self) -> None:
        self.store.close()


class Moonclip:
    """moonclip at zstd level 1, its fastest and, on planes, not larger than its default."""

    name = "moonclip"

    def __init__(self, path: Path) -> None:
        from moonclip import CheckpointManager

        self.path, self.before = path, 0
        self.manager = CheckpointManager(str(path), world_size=1, rank=0, compression_level=1)

    def save(self, step: int, state: Tensors) -> int:
        """Bytes that the save of this step added."""
        self.manager.save(step=step, extra={"state": state})
        self.manager.flush()
        added, self.before = tree_bytes(self.path) - self.before, tree_bytes(self.path)
        return added

    def close(self) -> None:
        del self.manager


Rows = list[dict[str, Any]]


class Table:
    """Rows of one state at several steps, one store per saver."""

    def __init__(self, title: str, root: Path, savers: list[type[Ours] | type[Moonclip]]) -> None:
        self.title = title
        self.rows: Rows = []
        self.savers = [kind(root / f"{title} {kind.name}".replace(" ", "-")) for kind in savers]

    def save(self, step: int, state: Tensors) -> None:
        """Save with every saver and print the row."""
        raw = sum(tensor.nbytes for tensor in state.values())
        shares = {saver.name: saver.save(step, state) / raw for saver in self.savers}
        row: dict[str, Any] = {"state": self.title, "step": step, "raw_bytes": raw, "share": shares}
        row["codecs"] = next(s.codecs[step] for s in self.savers if isinstance(s, Ours))
        self.rows.append(row)
        text = "  ".join(f"{name} {share:.4f}" for name, share in shares.items())
        print(f"{self.title}, step {step}: {text}", flush=True)

    def close(self) -> None:
        """Free disk and memory."""
        for saver in self.savers:
            saver.close()
            shutil.rmtree(saver.path)


def measure(root: Path, savers: list[type[Ours] | type[Moonclip]]) -> Rows:
    """Every row of the benchmark."""
    data = corpus()
    rows: Rows = []

    def table(title: str, run: Run, steps: list[int], rate: float, state: Callable[[Run], Tensors]) -> None:
        out = Table(title, root, savers)
        for step in steps:
            run.advance(step, rate)
            out.save(step, state(run))
        out.close()
        rows.extend(out.rows)

    run = dense_run(data)
    table("dense", run, [60, 61, 65, 80], RATE, lambda r: r.state())
    run.advance(160)
    table("bf16 weights, lr 1e-6", run, [163, 164, 168, 180], 1e-6, bf16_weights)
    frozen = freeze_all_but_last(run)
    table("5 of 6 blocks frozen, weights", frozen, [183, 184, 188, 203], RATE, lambda r: r.weights())
    sparse = sparse_run(data)
    sparse.advance(99)
    table("sparse table", sparse, [100, 101, 105, 120], RATE, table_weight)
    rows_of_all = sparse_run(data)
    rows_of_all.advance(99)
    table("sparse run, whole state", rows_of_all, [100, 101], RATE, lambda r: r.state())
    return rows


def bf16_weights(run: Run) -> Tensors:
    """What a publisher of weights sends."""
    return {name: tensor.bfloat16() for name, tensor in run.weights().items()}


def table_weight(run: Run) -> Tensors:
    """The table alone."""
    return {"table.weight": run.weights()["table.weight"]}


def judge(rows: Rows) -> list[dict[str, Any]]:
    """Each bar with what was reached."""
    verdicts = []
    for row in rows:
        bar = BARS.get(row["state"], {}).get(row["step"])
        ours, theirs = row["share"][Ours.name], row["share"].get(Moonclip.name)
        limits = {} if bar is None else {"bar": bar}
        if row["state"] == "dense" and theirs is not None:
            limits[f"{MOONCLIP_RATIO} x moonclip"] = MOONCLIP_RATIO * theirs
        for name, limit in limits.items():
            met = ours <= limit
            verdicts.append({"state": row["state"], "step": row["step"], "limit": name, "at_most": limit,
                             "found": ours, "met": met})  # fmt: skip
            verdict = "met" if met else "MISSED"
            print(f"{verdict}: {row['state']}, step {row['step']}: {ours:.4f} <= {limit:.4f} ({name})")
    return verdicts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", required=True)
    parser.add_argument("--dir", type=Path, help="where the stores go; default: the current folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    savers: list[type[Ours] | type[Moonclip]] = [Ours]
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lf-ckpt": lf_ckpt.__version__,
    }
    add_peers_path()
    try:
        versions["moonclip"] = importlib.metadata.version("moonclip")
        savers.append(Moonclip)
    except importlib.metadata.PackageNotFoundError:
        print("moonclip: SKIPPED, not installed (benchmarks/peers/requirements.txt)")
    with scratch(arguments.dir) as folder:
        rows = measure(folder, savers)
    result = {"date": datetime.now(UTC).date().isoformat(), "machine": platform.machine(), "cpus": os.cpu_count(),
              "versions": versions, "rows": rows, "bars": judge(rows)}  # fmt: skip
    Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
