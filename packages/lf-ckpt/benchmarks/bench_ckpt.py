#!/usr/bin/env python3
"""What a checkpoint costs: lf-ckpt beside torch.save and torch.distributed.checkpoint, same state, disk and run.

    bench_ckpt.py --json OUT.json [--gib 0.5] [--repeat 3] [--dir DIR]

stall: until the call returns and the tensors may change. durable: until the bytes are fsynced. CPU: seconds of this
process, with what lf-ckpt spends on removing the step before. Every saver saves the same float32 state `repeat` times,
in turns; the table shows the median and the fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import lf_ckpt

Tensors = dict[str, torch.Tensor]
Finish = Callable[[], object]


@dataclass
class Run:
    """One save or load, in seconds and bytes."""

    stall: float
    durable: float
    cpu: float
    size: int


class Saver:
    """A way to save: `save` returns what must still be called for the data to be written, if anything."""

    name: str
    fsynced = False  # whether `save` fsyncs by itself; otherwise the benchmark does, as part of durable

    def __init__(self, path: Path, state: Tensors) -> None:
        self.path, self.state = path, state

    def save(self, step: int) -> Finish | None:
        raise NotImplementedError

    def load(self, into: Tensors) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Free what the saver holds."""


class Memcpy(Saver):
    """The floor of any stall: one copy into memory that is there already."""

    name = "memcpy into a reused buffer (floor of the stall)"

    def __init__(self, path: Path, state: Tensors) -> None:
        super().__init__(path, state)
        self.copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def save(self, step: int) -> Finish | None:
        for name, tensor in self.state.items():
            self.copies[name].copy_(tensor)
        return None


class Pwrite(Saver):
    """The tensors' memory written by one thread through the page cache, without a copy, hash or metadata."""

    name = "buffered pwrite + fsync, 1 thread, nothing checked"

    def save(self, step: int) -> Finish | None:
        with open(self.path / "data", "wb", buffering=0) as file:
            for tensor in self.state.values():
                data = memoryview(tensor.view(-1).view(torch.uint8).numpy())
                while data:
                    data = data[file.write(data) :]
            os.fsync(file.fileno())
        return None


class TorchSave(Saver):
    name = "torch.save"

    def save(self, step: int) -> Finish | None:
        torch.save(self.state, self.path / "data.pt")
        return None

    def load(self, into: Tensors) -> None:
        for name, tensor in torch.load(self.path / "data.pt", weights_only=True).items():
            into[name].copy_(tensor)


class DcpSave(Saver):
    name = "DCP save"

    def save(self, step: int) -> Finish | None:
        dcp.save(self.state, checkpoint_id=self.path / "dcp")
        return None

    def load(self, into: Tensors) -> None:
        dcp.load(into, checkpoint_id=self.path / "dcp")


class DcpAsync(Saver):
    name = "DCP async_save, staging memory reused"

    def __init__(self, path: Path, state: Tensors) -> None:
        super().__init__(path, state)
        options = StagingOptions(
            use_pinned_memory=torch.cuda.is_available(),
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=torch.cuda.is_available(),
        )
        self.stager = DefaultStager(options)

    def save(self, step: int) -> Finish | None:
        future = dcp.async_save(self.state, checkpoint_id=self.path / "dcp", async_stager=self.stager)
        return getattr(future, "upload_completion", future).result

    def close(self) -> None:
        self.stager.close()


class LfCkpt(Saver):
    """Full steps only, so that every row writes the whole state."""

    name = "lf-ckpt, raw"
    compress: Any = "raw"
    full_every = 0
    fsynced = True

    def __init__(self, path: Path, state: Tensors) -> None:
        super().__init__(path, state)
        self.store = lf_ckpt.open(
            path / "store", keep=[lf_ckpt.Last(1)], compress=self.compress, full_every=self.full_every
        )

    def save(self, step: int) -> Finish | None:
        handle = self.store.save(step, self.state)
        return lambda: handle.wait().seconds_durable  # `wait` also removes the step before

    def load(self, into: Tensors) -> None:
        self.store.load(into=into)

    def close(self) -> None:
        self.store.close()


class LfCkptAuto(LfCkpt):
    name = 'lf-ckpt, compress="auto"'
    compress = "auto"


class LfCkptUnchanged(LfCkpt):
    """Delta of a state in which one tensor of the list has changed."""

    name = "lf-ckpt, delta, 1 tensor in 8 changed"
    full_every = 10**6

    def save(self, step: int) -> Finish | None:
        for name in list(self.state)[::8]:
            self.state[name].view(-1)[:: 1 << 16].add_(1)  # dirties every extent of the tensor
        return super().save(step)


SAVERS = (Memcpy, Pwrite, TorchSave, DcpSave, DcpAsync, LfCkpt, LfCkptAuto, LfCkptUnchanged)
STOCK = (TorchSave.name, DcpSave.name, DcpAsync.name)


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
    """Bytes of one save: of the newest step folder of a store, of everything otherwise."""
    steps = list(path.glob("store/steps/*"))
    return sum(
        f.stat().st_size
        for f in files_below(max(steps, key=lambda p: p.stat().st_mtime_ns) if steps else path)
    )


def files_below(path: Path) -> list[Path]:
    """Regular files below `path`."""
    return [file for file in path.rglob("*") if file.is_file()]


def measure_load(saver: Saver, state: Tensors) -> Run:
    """One load in place, with the files' pages dropped from the cache first; hashes are checked where there are any."""
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    os.sync()
    for file in files_below(saver.path):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    began, cpu = time.perf_counter(), time.process_time()
    saver.load(into)
    seconds = time.perf_counter() - began
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items()), saver.name
    return Run(seconds, seconds, time.process_time() - cpu, newest_size(saver.path))


def run_all(folder: Path, state: Tensors, repeat: int) -> tuple[dict[str, list[Run]], dict[str, list[Run]]]:
    """Saves, then cold loads, of every saver, in turns; the first save of each (staging memory made) is apart."""
    saves: dict[str, list[Run]] = {kind.name: [] for kind in SAVERS}
    loads: dict[str, list[Run]] = {}
    savers = []
    for kind in SAVERS:
        (path := folder / kind.__name__).mkdir()
        savers.append(kind(path, state))
    for turn in range(repeat + 1):
        for saver in savers:
            saves[saver.name].append(measure(saver, turn))
    for saver in savers:
        if type(saver) in (TorchSave, DcpSave, LfCkpt, LfCkptAuto):
            saver.save(repeat + 1)
            loads[saver.name] = [measure_load(saver, state) for _ in range(repeat)]
        saver.close()
        shutil.rmtree(saver.path)
    return saves, loads


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


def ratios(saves: dict[str, list[Run]]) -> dict[str, float]:
    """Medians of lf-ckpt against the floor and the best stock row."""
    median = {
        name: {key: statistics.median(getattr(run, key) for run in runs[1:]) for key in ("stall", "durable")}
        for name, runs in saves.items()
    }
    ours = median[LfCkpt.name]
    return {
        "stall / memcpy": ours["stall"] / median[Memcpy.name]["stall"],
        "stall / best stock": ours["stall"] / min(median[name]["stall"] for name in STOCK),
        "durable / best stock": ours["durable"] / min(median[name]["durable"] for name in STOCK),
        "durable / pwrite": ours["durable"] / median[Pwrite.name]["durable"],
    }


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
    parser.add_argument("--gib", type=float, default=0.5, help="size of the state")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure; default: the current one")
    arguments = parser.parse_args()
    state = make_state(arguments.gib)
    state_bytes = sum(tensor.nbytes for tensor in state.values())
    with tempfile.TemporaryDirectory(dir=arguments.dir or Path.cwd()) as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        saves, loads = run_all(Path(folder), state, arguments.repeat)
        dist.destroy_process_group()
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    size = f"{state_bytes / 1e9:.2f} GB of float32 in {len(state)} tensors"
    print(f"state: {size}; median (fastest) of {arguments.repeat}\n")
    print(table(saves, loads, state_bytes))
    print("\n" + ", ".join(f"{name}: {value:.2f}x" for name, value in ratios(saves).items()))
    rows = {
        kind: {name: [asdict(r) for r in runs] for name, runs in part.items()}
        for kind, part in (("saves", saves), ("loads", loads))
    }
    document = {
        "version": 1,
        "machine": machine(),
        "state_bytes": state_bytes,
        "ratios": ratios(saves),
        **rows,
    }
    arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
