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
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw  # torch.optim deletes the name of its module

from lf_graph._adamw import FusedAdamW, Launch
from lf_graph._flat import FlatParameters

Shape = tuple[int, ...]
# How many of which shape: all that requires grad in VLA of shared/baselines/h200_baseline.py.
VLA: tuple[tuple[int, Shape], ...] = (
    (10, (2048,)),
    (8, (2048, 2048)),
    (8, (1024, 2048)),
    (8, (6144, 2048)),
    (4, (2048, 6144)),
    (32, (3072, 1536)),
    (32, (3072,)),
    (97, (1536, 1536)),
    (32, (1536, 2048)),
    (32, (6144, 1536)),
    (32, (6144,)),
    (32, (1536, 6144)),
    (36, (1536,)),
    (1, (1536, 256)),
    (2, (1536, 128)),
    (1, (128, 1536)),
    (1, (128,)),
)
ODD: tuple[tuple[int, Shape], ...] = (
    (1, (1,)),
    (2, (255, 3)),
    (1, (1537, 769)),
    (2, (40_001,)),
    (1, (4096, 33)),
)
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
CLIP = 1.0
LEFT_FOR_COMPILED = 40.0  # seconds; inductor compiles this step once

# Bytes moved for a matrix element (bf16 gradient, bf16 copy) and for an element of the fp32 rest.
UPDATE = 24  # p, m, v read and written
OURS = {False: (UPDATE + 2 + 2, UPDATE + 4), True: (UPDATE + 2 + 2 + 2, UPDATE + 4 + 4)}
# gradient cast 2 + 4, update with an fp32 gradient, weight cast 4 + 2; clipping reads it twice more and writes it once
STOCK = {False: (6 + UPDATE + 4 + 6, 8 + UPDATE + 4), True: (6 + UPDATE + 4 + 6 + 12, 8 + UPDATE + 4 + 12)}
COMPILED = (UPDATE + 2 + 2, UPDATE + 4)  # what inductor has to move when it fuses both casts


def shapes_of(counts: Sequence[tuple[int, Shape]]) -> list[Shape]:
    """All shapes, matrices and vectors mixed as counted."""
    return [shape for count, shape in counts for _ in range(count)]


def bytes_moved(shapes: Sequence[Shape], per_element: tuple[int, int]) -> int:
    """Bytes of one step, from bytes for an element of a matrix and of the rest."""
    return sum(math.prod(s) * per_element[0 if len(s) > 1 else 1] for s in shapes)


@dataclass(frozen=True)
class Row:
    """One measured line."""

    name: str
    clip: bool
    ours: bool
    ms: float
    spread: float
    bytes: int
    error: str = ""

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.bytes / self.ms / 1e6


def best_stock(rows: Sequence[Row], clip: bool) -> float:
    """ms of the fastest row of torch that does the same work."""
    return min((r.ms for r in rows if not r.ours and not r.error and r.clip == clip), default=math.nan)


def table(rows: Sequence[Row]) -> str:
    """Text lines; the last column is how much faster than torch's best."""
    lines = [f"{'row':44s} {'clip':>4s} {'ms':>8s} {'spread':>7s} {'GB':>6s} {'GB/s':>6s} {'vs best':>8s}"]
    for r in rows:
        clip = "yes" if r.clip else "no"
        if r.error:
            lines.append(f"{r.name:44s} {clip:>4s} {r.error}")
            continue
        ratio = f"{best_stock(rows, r.clip) / r.ms:7.2f}x"
        size = f"{r.bytes / 1e9:6.1f} {r.rate:6.0f}"
        lines.append(f"{r.name:44s} {clip:>4s} {r.ms:8.3f} {r.spread:7.1%} {size} {ratio:>8s}")
    return "\n".join(lines)


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


def parameters(shapes: Sequence[Shape], device: torch.device) -> list[nn.Parameter]:
    """Seeded weights."""
    made = torch.Generator(device).manual_seed(1)
    return [nn.Parameter(torch.empty(s, device=device).normal_(0, 0.02, generator=made)) for s in shapes]


def gradients(shapes: Sequence[Shape], device: torch.device) -> list[Tensor]:
    """Seeded gradients: bf16 of matrices, fp32 of the rest."""
    made = torch.Generator(device).manual_seed(2)
    fresh = [torch.empty(s, device=device).normal_(0, 1e-3, generator=made) for s in shapes]
    return [g.bfloat16() if g.dim() > 1 else g for g in fresh]


class Stock:
    """torch.optim.AdamW with the two casts that bf16 compute on fp32 masters needs."""

    def __init__(
        self, shapes: Sequence[Shape], device: torch.device, clip: float = 0.0, **options: Any
    ) -> None:
        self.clip, self.parameters = clip, parameters(shapes, device)
        self.given = gradients(shapes, device)
        for p in self.parameters:
            p.grad = torch.empty_like(p)
        self.wide = [p.grad for p in self.parameters if p.grad is not None]
        self.masters = [p.detach() for p in self.parameters if p.dim() > 1]
        self.weights = [m.bfloat16() for m in self.masters]
        self.optimizer = torch.optim.AdamW(self.parameters, **OPTIONS, **options)

    @torch.no_grad()
    def step(self) -> None:
        """Casts, clipping, update, casts."""
        torch._foreach_copy_(self.wide, self.given)
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip, foreach=True)
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)


class Compiled:
    """torch's functional foreach AdamW with both casts in one compiled function, so that inductor may fuse them."""

    def __init__(self, shapes: Sequence[Shape], device: torch.device) -> None:
        self.masters = [p.detach() for p in parameters(shapes, device)]
        self.given = gradients(shapes, device)
        self.first = [torch.zeros_like(m) for m in self.masters]
        self.second = [torch.zeros_like(m) for m in self.masters]
        self.steps = [torch.zeros((), device=device) for _ in self.masters]
        self.weights = [m.bfloat16() for m in self.masters if m.dim() > 1]
        self._compiled = torch.compile(self._body, fullgraph=True)

    def _body(self) -> None:
        adamw(
            self.masters,
            [g.float() for g in self.given],
            self.first,
            self.second,
            [],
            self.steps,
            foreach=True,
            capturable=True,
            amsgrad=False,
            maximize=False,
            beta1=OPTIONS["betas"][0],
            beta2=OPTIONS["betas"][1],
            lr=OPTIONS["lr"],
            weight_decay=OPTIONS["weight_decay"],
            eps=OPTIONS["eps"],
        )
        torch._foreach_copy_(self.weights, [m for m in self.masters if m.dim() > 1])

    @torch.no_grad()
    def step(self) -> None:
        """One compiled step."""
        self._compiled()


@dataclass
class Flat:
    """Flat buffers with the same weights and gradients; one set serves every row of ours."""

    flat: FlatParameters
    gradients: list[Tensor]

    def fused(self, clip: float, launch: Launch | None = None, implementation: str = "triton") -> FusedAdamW:
        """A step on them; without clipping also without the gate, as torch's rows have none."""
        made = FusedAdamW(self.flat, clip=clip, gate=bool(clip), launch=launch, implementation=implementation)
        made.set_gradients(self.gradients)
        return made


def flat_of(shapes: Sequence[Shape], device: torch.device) -> Flat:
    """Flat buffers over seeded weights; matrices have shadows."""
    ps = parameters(shapes, device)
    flat = FlatParameters(torch.optim.AdamW(ps, **OPTIONS), [p for p in ps if p.dim() > 1])
    return Flat(flat, gradients(shapes, device))


def parity(device: torch.device, implementation: str, clip: float, launch: Launch | None = None) -> float:
    """Largest relative difference from torch's fused AdamW after five steps on odd shapes; raises beyond 2e-6."""
    shapes = shapes_of(ODD)
    stock, flat = Stock(shapes, device, clip, foreach=True), flat_of(shapes, device)
    fused = flat.fused(clip, launch, implementation)
    for _ in range(5):
        stock.step()
        fused.step()
    worst = 0.0
    for p, q in zip(flat.flat.parameters, stock.parameters, strict=True):
        worst = max(worst, float((p - q).detach().abs().max() / q.detach().abs().max()))
        if flat.flat.has_shadow(p) and not torch.equal(flat.flat.shadow_of(p), p.detach().bfloat16()):
            raise SystemExit(f"parity: the shadow of a {tuple(p.shape)} is not its rounded master")
    if not worst <= 2e-6:
        raise SystemExit(f"parity: {implementation}, clip {clip}: {worst:.1e} from torch.optim.AdamW")
    return worst


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


def facts(device: torch.device) -> dict[str, Any]:
    """Machine and versions."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


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
    known = facts(device)
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


def as_json(row: Row) -> dict[str, Any]:
    """A row's fields and its rate; what was not measured is null."""
    fields = dataclasses.asdict(row) | {"rate": row.rate}
    return {k: None if v != v else v for k, v in fields.items()}


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
