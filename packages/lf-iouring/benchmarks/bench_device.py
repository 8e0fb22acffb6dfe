#!/usr/bin/env python3
"""Feeding a GPU: what a training step waits for its samples, ours beside torch's DataLoader.

    bench_device.py [--json OUT] [--steps N] [--step-ms 60] [--frames N] [--root DIR]

Job: the inputs of a GR00T N1.6 step at batch 16: two consecutive 224 x 224 x 3 uint8 frames, 92 token ids, state [128]
and action [50, 128] in float32, from a warm page cache. The step is a CUDA graph of matrix products that reads the
batch and takes --step-ms; a loop of steps on one batch that stays on the device is the 0 % of every row. "gpu wait"
is the time between the end of a step and the start of the next one, measured by events on the GPU, beyond that of
the resident loop. Copies are timed by events on the copy stream; their ceiling is one large pinned copy and
pinned copies of one batch, in the same run. Needs a CUDA device and torch; nothing runs without one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

SIZE, IDS, STATE, HORIZON = 224, 92, 128, 50
BATCH = 16


@dataclass(frozen=True)
class Row:
    """One way to feed the step.

    Attributes:
        name: of the way.
        step_ms: wall time of a step, median over windows of 50 steps, and the spread of these windows.
        wait_percent: GPU wait over the step's own time.
        copy_gbs: host to device, median of the copies of a batch; None where it was not timed.
    """

    name: str
    step_ms: float
    lowest_ms: float
    highest_ms: float
    wait_percent: float
    copy_gbs: float | None = None


def write(root: Path, frames: int) -> tuple[Path, dict[str, Any]]:
    """The samples as one .lfg and as the arrays a map-style data set would read."""
    import lf_format as lff

    random = np.random.default_rng(0)
    arrays = {
        "camera": random.integers(0, 256, (frames, SIZE, SIZE, 3), np.uint8),
        "input_ids": random.integers(0, 50_000, (frames, IDS)).astype(np.int32),
        "state": random.normal(size=(frames, STATE)).astype(np.float32),
        "action": random.normal(size=(frames, HORIZON, STATE)).astype(np.float32),
    }
    fields = [
        lff.Field.image("camera", (SIZE, SIZE, 3)),
        lff.Field.tokens("input_ids", length=IDS),
        lff.Field.tensor("state", "float32", (STATE,)),
        lff.Field.tensor("action", "float32", (HORIZON, STATE)),
    ]
    path = root / "train.lfg"
    with lff.Writer(path, fields=fields, vocab_size=50_000, buckets=(IDS,)) as writer:
        for i in range(frames):
            sample = {name: values[i] for name, values in arrays.items()}
            writer.append(sample, None, i % 100 == 0, i % 100 == 99 or i == frames - 1)
    maps = {}
    for name, values in arrays.items():
        np.save(root / f"{name}.npy", values)
        maps[name] = np.load(root / f"{name}.npy", mmap_mode="r")
        maps[name].sum()  # into the page cache
    path.read_bytes()
    return path, maps


class Samples:
    """What people write: a map-style data set over memory-mapped arrays, a batch at a time."""

    def __init__(self, maps: dict[str, Any]) -> None:
        self.maps = maps

    def __len__(self) -> int:
        return len(self.maps["state"])

    def __getitems__(self, ids: Sequence[int]) -> dict[str, Any]:
        import torch

        rows = np.asarray(ids)
        before = np.maximum(rows - (rows % 100 != 0), 0)
        batch = {
            name: torch.from_numpy(values[rows]) for name, values in self.maps.items() if name != "camera"
        }
        batch["camera"] = torch.from_numpy(self.maps["camera"][np.stack([before, rows], 1)])
        return batch


class Step:
    """A CUDA graph of `ms` milliseconds that reads a batch."""

    def __init__(self, ms: float) -> None:
        import torch

        self.torch = torch
        self.inputs = {
            "camera": torch.zeros(BATCH, 2, SIZE, SIZE, 3, dtype=torch.uint8, device="cuda"),
            "input_ids": torch.zeros(BATCH, IDS, dtype=torch.int32, device="cuda"),
            "state": torch.zeros(BATCH, STATE, device="cuda"),
            "action": torch.zeros(BATCH, HORIZON, STATE, device="cuda"),
        }
        self.weight = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) / 90
        self.state = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.seen = torch.zeros((), device="cuda")
        self.products = 1
        once = self._timed(self._capture())
        self.products = max(1, round(ms / once))
        self.graph = self._capture()
        self.ms = self._timed(self.graph)

    def _work(self) -> None:
        for values in self.inputs.values():
            self.seen += values.float().mean()
        for _ in range(self.products):
            self.state = self.state @ self.weight

    def _capture(self) -> Any:
        stream = self.torch.cuda.Stream()
        with self.torch.cuda.stream(stream):
            self._work()
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            self._work()
        return graph

    def _timed(self, graph: Any) -> float:
        times = []
        for _ in range(12):
            first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        return statistics.median(times[2:])

    def run(self, batches: Iterator[dict[str, Any]], steps: int) -> tuple[list[float], list[float]]:
        """Wall milliseconds of windows of 50 steps, and milliseconds between each two steps on the GPU."""
        event = self.torch.cuda.Event
        marks = []
        walls = []
        began = time.perf_counter()
        for number in range(steps):
            batch = next(batches)
            first, last = event(enable_timing=True), event(enable_timing=True)
            first.record()
            for name, values in self.inputs.items():
                values.copy_(batch[name].view(values.shape))
            self.graph.replay()
            last.record()
            marks.append((first, last))
            if number >= 2:
                marks[number - 2][1].synchronize()  # a trainer stays a step or two ahead of the GPU
            if number % 50 == 49:
                walls.append((time.perf_counter() - began) / 50 * 1e3)
                began = time.perf_counter()
        self.torch.cuda.synchronize()
        gaps = [a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(marks)]
        return walls[1:], gaps[50:]


def resident(step: Step) -> Iterator[dict[str, Any]]:
    """The same batch for ever, on the device."""
    batch = {name: values.clone() for name, values in step.inputs.items()}
    while True:
        yield batch


def timed_backend() -> Any:
    """CudaBackend whose copies carry events."""
    import torch

    from lf_iouring import CudaBackend

    class Timed(CudaBackend):
        def __init__(self) -> None:
            super().__init__("cuda")
            self.copies: list[tuple[Any, Any, int]] = []

        def _copy(self, host: Sequence[Any], arrays: Sequence[Any]) -> None:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            super()._copy(host, arrays)
            last.record()
            self.copies.append((first, last, sum(tensor.nbytes for tensor in host)))

    return Timed()


def ours(path: Path, step: Step, steps: int) -> tuple[Row, dict[str, Any]]:
    """LoongDataLoader, every hash checked, copies one batch ahead."""
    import lf_format as lff
    from lf_iouring import LoongDataLoader

    backend = timed_backend()
    with (
        lff.open_dataset(path) as dataset,
        LoongDataLoader(dataset, global_batch=BATCH, deltas={"camera": [-1, 0]}, device=backend) as loader,
    ):
        walls, gaps = step.run(iter(loader), steps)
        rates = [size / first.elapsed_time(last) / 1e6 for first, last, size in backend.copies[20:]]
        stats = loader.stats()
        about = {"engine": stats.engine, "pages": stats.pages, "threads": loader.info().engine.threads}
        about |= {"notes": list(loader.info().notes), "overflow": stats.overflow}
        about |= {"wait_s": stats.wait_s, "copy_s": stats.copy_s, "batches": stats.batches}
    return _row(
        "LoongDataLoader, device prefetch, xxh3 per record", step, walls, gaps, statistics.median(rates)
    ), about


def torch_loader(maps: dict[str, Any], step: Step, steps: int, workers: int) -> Row:
    """DataLoader with pinned memory and non-blocking copies."""
    import torch

    options: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4} if workers else {}
    data = Samples(maps)
    loader = torch.utils.data.DataLoader(
        data,  # type: ignore[arg-type]
        batch_sampler=[
            rows.tolist()
            for _ in range(1 + steps * BATCH // len(data))
            for rows in np.random.default_rng(0).permutation(len(data))[: len(data) // BATCH * BATCH].reshape(-1, BATCH)
        ],
        num_workers=workers, pin_memory=True, collate_fn=_same, **options,
    )  # fmt: skip
    batches = ({k: v.to("cuda", non_blocking=True) for k, v in batch.items()} for batch in loader)
    walls, gaps = step.run(batches, steps)
    return _row(f"torch DataLoader, {workers} workers, pin_memory, unchecked", step, walls, gaps)


def _same(batch: Any) -> Any:
    return batch


def _row(name: str, step: Step, walls: list[float], gaps: list[float], rate: float | None = None) -> Row:
    wait = 100 * statistics.mean(gaps) / step.ms
    return Row(name, statistics.median(walls), min(walls), max(walls), wait, rate)


def ceiling(nbytes: int) -> float:
    """GB/s of pinned copies of `nbytes`, back to back: the median of 50."""
    import torch

    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).fill_(1)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    rates = []
    for _ in range(50):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        device.copy_(host, non_blocking=True)
        last.record()
        last.synchronize()
        rates.append(nbytes / first.elapsed_time(last) / 1e6)
    return statistics.median(rates)


def machine() -> dict[str, str]:
    """Card, driver and versions."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    return {
        "card": torch.cuda.get_device_name(), "driver": found, "torch": torch.__version__,
        "cuda": str(torch.version.cuda), "python": platform.python_version(), "kernel": platform.release(),
        "cores": str(len(os.sched_getaffinity(0))), "lf-iouring": version("lf-iouring"),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--root", type=Path, help="where the data go; default a temporary directory")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=60)
    parser.add_argument("--frames", type=int, default=4096)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("bench_device: no CUDA device, not measured")
        return
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        path, maps = write(Path(folder), args.frames)
        step = Step(args.step_ms)
        sample = BATCH * (2 * SIZE * SIZE * 3 + 4 * (IDS + STATE + HORIZON * STATE))
        ceilings = {"1 GiB": ceiling(1 << 30), "one batch": ceiling(sample)}
        walls, gaps = step.run(resident(step), args.steps)
        rows = [_row("batch resident on the device", step, walls, gaps)]
        fed, about = ours(path, step, args.steps)
        rows.append(fed)
        ways: list[Callable[[], Row]] = [
            lambda n=n: torch_loader(maps, step, args.steps, n)
            for n in (0, 4)  # type: ignore[misc]
        ]
        rows += [way() for way in ways]
    base = rows[0].wait_percent
    rows = [Row(**asdict(row) | {"wait_percent": row.wait_percent - base}) for row in rows]
    copies = ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in ceilings.items())
    print(
        f"\nstep {step.ms:.1f} ms on {machine()['card']}; batch {sample / 1e6:.2f} MB; pinned copies: {copies}"
    )
    print("\n| fed by | ms a step (spread) | GPU wait | copies |\n|---|---|---|---|")
    print("\n".join(_line(row) for row in rows))
    if args.json:
        settings = {"steps": args.steps, "frames": args.frames}
        report = {"machine": machine(), "settings": settings, "step_ms": step.ms, "batch_bytes": sample}
        report |= {"pinned_gbs": ceilings, "rows": [asdict(row) for row in rows], "ours": about}
        args.json.write_text(json.dumps(report, indent=1))


def _line(row: Row) -> str:
    copies = "" if row.copy_gbs is None else f"{row.copy_gbs:.1f} GB/s"
    spread = f"{row.step_ms:.2f} ({row.lowest_ms:.2f} - {row.highest_ms:.2f})"
    return f"| {row.name} | {spread} | {row.wait_percent:.2f} % | {copies} |"


if __name__ == "__main__":
    main()
