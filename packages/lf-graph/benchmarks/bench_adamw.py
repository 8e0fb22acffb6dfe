"""The flat AdamW beside torch's own, on the trainable parameters of the VLA class of the baselines (1.287 B).

python bench_adamw.py [--json FILE] [--no-sweep] [--seconds 85]

Every row does what a training step with fp32 masters and bf16 compute needs: bf16 gradients in, masters and moments
updated, bf16 weights out. torch needs two casts around its optimizer for that (gradients to fp32, weights to bf16);
ours does both inside. "clip" rows also take the global norm and clip. Bytes are what a row's operations must move, and
GB/s is that over the measured time. Parity with torch.optim.AdamW is checked before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from adamw_contestants import CLIP, Compiled, Flat, Stock, flat_of, parity
from adamw_rows import COMPILED, OURS, STOCK, VLA, Row, Shape, as_json, bytes_moved, shapes_of, table
from measure import machine

from lf_graph._adamw import Launch

LEFT_FOR_COMPILED = 40.0  # seconds; inductor compiles this step once


def time_ms(fn: Callable[[], object], windows: int = 5, calls: int = 4) -> tuple[float, float]:
    """(median ms of a call, (max - min) / median) over windows of queued calls between two events."""
    for _ in range(3):
        fn()
    times = []
    for _ in range(windows):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    middle = statistics.median(times)
    return middle, (max(times) - min(times)) / middle


def graphed(fn: Callable[[], object]) -> Callable[[], None]:
    """``fn`` as one CUDA graph, after two warm-up calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
        fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def stock_rows(shapes: Sequence[Shape], device: torch.device) -> Iterator[Row]:
    """torch's optimizers in their best forms."""
    forms: list[tuple[str, bool, float, dict[str, Any]]] = [
        ("torch foreach + casts", False, 0.0, {"foreach": True}),
        ("torch fused + casts", False, 0.0, {"fused": True}),
        ("torch fused + casts, CUDA graph", True, 0.0, {"fused": True, "capturable": True}),
        ("torch fused + casts + clip", False, CLIP, {"fused": True}),
        ("torch fused + casts + clip, CUDA graph", True, CLIP, {"fused": True, "capturable": True}),
    ]
    for name, graph, clip, options in forms:
        stock = Stock(shapes, device, clip, **options)
        step = graphed(stock.step) if graph else stock.step
        yield Row(name, bool(clip), False, *time_ms(step), bytes_moved(shapes, STOCK[bool(clip)]))
        del stock, step
        free()


def our_rows(flat: Flat, shapes: Sequence[Shape], launch: Launch | None, suffix: str = "") -> Iterator[Row]:
    """The flat step, eagerly and as a graph, without and with norm, clipping and gate."""
    for clip in (0.0, CLIP):
        fused = flat.fused(clip, launch)
        size = bytes_moved(shapes, OURS[bool(clip)])
        gate = " + gate" if clip else ""
        yield Row(f"lf-graph flat{gate}{suffix}", bool(clip), True, *time_ms(fused.step), size)
        step = graphed(fused.step)
        yield Row(f"lf-graph flat{gate}, CUDA graph{suffix}", bool(clip), True, *time_ms(step), size)


def copy_rate(flat: Flat) -> float:
    """GB/s of a device copy, read and write counted: what the memory does (overwrites a moment, so it comes last)."""
    master, target = flat.flat.master, flat.flat.exp_avg
    return 8 * master.numel() / time_ms(lambda: target.copy_(master))[0] / 1e6


def launches(multiprocessors: int) -> list[Launch]:
    """The grid of the sweep; 60 points, twelve compilations. The last number of programs is one per chunk."""
    sizes = [(b, w, 4) for b in (512, 1024, 2048, 4096) for w in (4, 8)]
    sizes += [(b, w, 8) for b in (1024, 2048) for w in (4, 8)]
    return [
        Launch(block=block, warps=warps, vector=vector, programs=programs)
        for block, warps, vector in sizes
        for programs in (*(per * multiprocessors for per in (2, 4, 8, 16)), 1 << 20)
    ]


def sweep(flat: Flat, grid: Sequence[Launch], until: float) -> list[tuple[float, Launch]]:
    """(ms with norm, clipping and gate, launch), fastest first; stops at ``until`` (``time.monotonic``)."""
    found: list[tuple[float, Launch]] = []
    for launch in grid:
        if time.monotonic() > until:
            print(f"sweep: out of time after {len(found)} of {len(grid)} points")
            break
        fused = flat.fused(CLIP, launch)
        found.append((time_ms(fused.step, windows=3, calls=3)[0], launch))
    return sorted(found, key=lambda pair: pair[0])


def compiled_row(shapes: Sequence[Shape], seconds: float) -> Row:
    """The compiled step in a process of its own, which may take this long."""
    name, size = "torch.compile of foreach + casts, CUDA graph", bytes_moved(shapes, COMPILED)
    command = [sys.executable, str(Path(__file__).resolve()), "--compiled-only"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Row(name, False, False, math.nan, 0.0, size, f"not compiled within {seconds:.0f} s")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Row(name, False, False, math.nan, 0.0, size, f"failed: {reason[:80]}")
    ms, spread = json.loads(done.stdout.splitlines()[-1])
    return Row(name, False, False, ms, spread, size)


def run_compiled() -> None:
    """What the process of ``compiled_row`` does: prints [ms, spread]."""
    step = Compiled(shapes_of(VLA), torch.device("cuda")).step
    step()
    print(json.dumps(time_ms(graphed(step))))


def free() -> None:
    """Give memory back before the next row takes its own."""
    gc.collect()
    torch.cuda.empty_cache()


def our_part(shapes: Sequence[Shape], device: torch.device, sweeping: bool, until: float) -> dict[str, Any]:
    """Rows of ours with the default and the best launch, the sweep, and the memory's own rate."""
    flat = flat_of(shapes, device)
    free()
    rows, tried = list(our_rows(flat, shapes, None)), []
    if sweeping:
        count = torch.cuda.get_device_properties(device).multi_processor_count
        tried = sweep(flat, launches(count), until)
    if tried:
        parity(device, "triton", CLIP, tried[0][1])
        rows += our_rows(flat, shapes, tried[0][1], ", tuned")
    return {"rows": rows, "sweep": tried, "copy": copy_rate(flat)}


def run(seconds: float, sweeping: bool) -> dict[str, Any]:
    """All parts, printed; returns what goes to JSON."""
    until = time.monotonic() + seconds
    device, shapes = torch.device("cuda"), shapes_of(VLA)
    known = machine(device)
    print(*(f"{k} {v}" for k, v in known.items()), sep=", ", flush=True)
    errors = {f"{i} clip {c}": parity(device, i, c) for i in ("triton", "torch") for c in (0.0, 0.05)}
    print("parity with torch.optim.AdamW, 5 steps:", ", ".join(f"{k}: {v:.1e}" for k, v in errors.items()))
    stock = list(stock_rows(shapes, device))
    print(table(stock), flush=True)  # in case something below is cut short
    ours = our_part(shapes, device, sweeping, until - LEFT_FOR_COMPILED)
    free()
    rows = [*stock, compiled_row(shapes, max(5.0, until - time.monotonic())), *ours["rows"]]
    print(f"\n{len(shapes)} tensors, {sum(map(math.prod, shapes)):,} parameters\n{table(rows)}")
    print(f"device copy: {ours['copy']:.0f} GB/s")
    for ms, launch in ours["sweep"][:8]:
        print(f"{ms:8.3f} ms  {launch}")
    return {
        "version": 1,
        **known,
        "parity": errors,
        "copy_rate": ours["copy"],
        "rows": [as_json(r) for r in rows],
        "sweep": [{"ms": ms, **dataclasses.asdict(launch)} for ms, launch in ours["sweep"]],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="flat AdamW beside torch's, 1.287 B parameters")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--no-sweep", dest="sweep", action="store_false", help="skip the launch sweep")
    parser.add_argument("--seconds", type=float, default=85.0, help="time budget of the whole run")
    parser.add_argument("--compiled-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_adamw.py needs a CUDA device with 40 GB; there is none here, nothing was measured")
        return 0
    if arguments.compiled_only:
        run_compiled()
        return 0
    results = run(arguments.seconds, arguments.sweep)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
