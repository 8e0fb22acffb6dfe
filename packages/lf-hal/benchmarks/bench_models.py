#!/usr/bin/env python3
"""Whole models as C beside torch eager, on the CPU, float32, 1 and 2 threads.

    bench_models.py --json OUT.json [--repeat 5] [--only WORD ...]

Both compute the same model with the same weights, in turns; a row has the fastest and the median run of each, and the
largest difference between their outputs. cpu is the processor time of the process in the fastest run: for one thread,
on a machine with neighbours, it says more than the clock. unfused_over_fused is of processor time as well. prefill is
256 tokens, decode one token after 256 others (keys and values of the past are inputs and outputs on both sides).
bf16, f16 and i8 are the storage of our weights; torch stays float32, so the largest difference is that of the storage.
compile is from the traced graph to a loaded artefact, with the kernels of the target already built; open maps, checks
and packs the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # two busy cores: spinning threads cost torch far more

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "compile"))

from compile_models import DecodeStep, LanguageModel, resnet50, with_statistics

import lf_hal
from lf_hal.lir.trace import trace, weights_of
from lf_hal.passes import PassOptions

UNFUSED = PassOptions(fold_affine=False, fuse_conv=False)


@dataclass(frozen=True)
class Row:
    """Times in milliseconds; ratios are torch over ours, of the fastest runs: above 1 we are faster."""

    model: str
    threads: int
    torch_best: float
    torch_median: float
    ours_best: float
    ours_median: float
    ratio: float
    torch_cpu: float
    ours_cpu: float
    ratio_cpu: float
    largest_difference: float


def resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return with_statistics(resnet50()), (torch.randn(1, 3, 224, 224),)


def language() -> LanguageModel:
    """25.8 million parameters."""
    return LanguageModel(8192, 512, layers=6, heads=8, kv_heads=4, hidden=1376, length=512).eval()


def prefill() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return language(), (torch.randint(0, 8192, (1, 256)),)


def decode() -> tuple[nn.Module, tuple[Tensor, ...]]:
    step = DecodeStep(language(), past=256).eval()
    return step, (torch.randint(0, 8192, (1, 1)), *step.caches())


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "resnet50 224": resnet,
    "lm25m prefill 256": prefill,
    "lm25m decode": decode,
}


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of the clock, and of the processors."""
    begin, cpu = time.perf_counter(), time.process_time()
    run()
    return 1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - cpu)


def measure(name: str, repeat: int) -> tuple[list[Row], dict[str, float]]:
    torch.manual_seed(0)
    module, examples = MODELS[name]()
    graph = trace(module, examples)
    weights = weights_of(module, graph)
    lf_hal.compile(graph, weights).close()  # builds the kernels
    begin = time.perf_counter()
    made = lf_hal.compile(graph, weights)
    once = {"compile_s": time.perf_counter() - begin}
    begin = time.perf_counter()
    lf_hal.load(made.folder).open(1)
    once["load_and_open_s"] = time.perf_counter() - begin
    arrays = [x.numpy() for x in examples]
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        rows.append(compare(f"{name}", threads, lambda: module(*examples), made, arrays, repeat))
    for dtype in ("bf16", "f16", "i8"):
        with lf_hal.compile(graph, weights, weights_dtype=dtype) as narrow:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                label = f"{name} {dtype}"
                rows.append(compare(label, threads, lambda: module(*examples), narrow, arrays, repeat))
            once[f"relative_error_{dtype}"] = narrow.manifest["storage"]["relative_error"]
    if name.startswith("resnet"):
        plain = lf_hal.compile(graph, weights, passes=UNFUSED)
        pair: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeat + 1):
            for artifact, into in zip((made, plain), pair, strict=True):
                into.append(timed(lambda a=artifact: a.run(arrays, threads=1))[1])  # type: ignore[misc]
        once["unfused_over_fused"] = min(pair[1][1:]) / min(pair[0][1:])
        plain.close()
    made.close()
    return rows, once


def compare(
    name: str,
    threads: int,
    theirs: Callable[[], object],
    made: lf_hal.Artifact,
    arrays: list[np.ndarray],
    repeat: int,
) -> Row:
    torch_runs, ours_runs = [], []
    with torch.inference_mode():
        for _ in range(repeat + 1):  # the first is warm-up
            torch_runs.append(timed(theirs))
            ours_runs.append(timed(lambda: made.run(arrays, threads=threads)))
        expected = theirs()
    outputs = expected if isinstance(expected, tuple) else (expected,)
    found = made.run(arrays, threads=threads).values()
    difference = max(float(np.abs(f - e.numpy()).max()) for f, e in zip(found, outputs, strict=True))  # type: ignore[union-attr]
    torch_ms, torch_cpu = (list(column) for column in zip(*torch_runs[1:], strict=True))
    ours_ms, ours_cpu = (list(column) for column in zip(*ours_runs[1:], strict=True))
    return Row(
        name,
        threads,
        min(torch_ms),
        statistics.median(torch_ms),
        min(ours_ms),
        statistics.median(ours_ms),
        min(torch_ms) / min(ours_ms),
        min(torch_cpu),
        min(ours_cpu),
        min(torch_cpu) / min(ours_cpu),
        difference,
    )


def line(row: Row) -> str:
    theirs = f"torch {row.torch_best:8.2f} ms (median {row.torch_median:8.2f})"
    ours = f"ours {row.ours_best:8.2f} ms (median {row.ours_median:8.2f})"
    ratio = f"torch/ours {row.ratio:5.2f} (cpu {row.ratio_cpu:5.2f})"
    return f"{row.model:<22} {row.threads} thread(s)  {theirs}  {ours}  {ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    rows: list[Row] = []
    once: dict[str, dict[str, float]] = {}
    for name in MODELS:
        if args.only and not any(word in name for word in args.only):
            continue
        found, once[name] = measure(name, args.repeat)
        rows += found
        for row in found:
            print(line(row), flush=True)
        print("   ", ", ".join(f"{key} {value:.3g}" for key, value in once[name].items()), flush=True)
    if args.json:
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "torch": torch.__version__,
            "target": lf_hal.resolve_target("native").name,
            "repeat": args.repeat,
        }
        report = {"about": about, "rows": [asdict(r) for r in rows], "once": once}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
