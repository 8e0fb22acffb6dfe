"""Kernels one by one, beside what a user would take instead: parity first, then time.

python bench_kernels.py [--match rms_norm] [--budget-s 300] [--json FILE]   # on a GPU
python bench_kernels.py --check                     # parity only, small shapes; on a CPU in Triton's interpreter
python bench_kernels.py --show FILE... [--into ../README.md --mark kernels [--check]]

Definitions:

- us: of one call, from at least 20 calls in one CUDA graph; median over replays; spread is (max - min) / median. So
  it is the device's time: no way pays for its launches here. A way that cannot be captured is a failure, and says so.
- cold (default): calls take turns on copies of the inputs that together exceed three times the L2 cache, as
  activations do in a step; ``--warm`` repeats on one copy.
- GB/s and TFLOP/s: the bytes and operations that the operator needs, over us; a way that moves more shows less.
- extra MiB: most memory that a call holds beyond its inputs, outputs included.
- parity: largest max|output - reference| / max|reference| over outputs and gradients. A way beyond the tolerance is
  "wrong", is not timed, and is never the best other. If one of ours is wrong, the exit status is 1.

Rows live in ``kernel_rows/``; see there.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # read when a kernel is defined, so before lf_graph's are imported

import kernel_rows
from kernel_rows import REFERENCE, Call, KernelRow, Output
from kernel_table import Result, rates, tables
from measure import machine
from report import between_markers
from torch import Tensor

from lf_graph.tune._timer import GraphTimer, Timer

SEED = 0
WINDOWS = 15
_MAX_COPIES = 16
_CACHES = 3  # times the L2 cache


def modules() -> list[str]:
    """Names of the modules of rows."""
    return sorted(m.name for m in pkgutil.iter_modules(kernel_rows.__path__) if not m.name.startswith("_"))


def all_rows(small: bool) -> list[KernelRow]:
    """Every row there is."""
    return [r for name in modules() for r in importlib.import_module(f"kernel_rows.{name}").rows(small)]


def grouped(rows: Iterable[KernelRow], match: str) -> list[list[KernelRow]]:
    """Groups that have a row whose label contains ``match``, whole (a number without its peers says little)."""
    found: dict[tuple[str, str], list[KernelRow]] = {}
    for row in rows:
        found.setdefault(row.group, []).append(row)
    return [g for g in found.values() if any(match in r.label for r in g)]


def prepared(row: KernelRow, device: torch.device) -> Call:
    """The row's call on its seeded inputs."""
    torch.manual_seed(SEED)
    return row.build(device)


def as_tuple(output: Output) -> tuple[Tensor, ...]:
    """Outputs as a tuple."""
    return (output,) if isinstance(output, Tensor) else tuple(output)


def distance(found: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Largest max|found - reference| / max|reference|; infinite for other shapes and for values that are none.

    Both are compared where the reference lies, in float64.
    """
    if [t.shape for t in found] != [t.shape for t in reference]:
        return float("inf")
    worst = 0.0
    for a, b in zip(found, reference, strict=True):
        if b.numel() == 0:
            continue
        scale = float(b.double().abs().max()) or 1.0
        gap = float((a.double() - b.double()).abs().max()) / scale
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def obstacle(row: KernelRow, device: torch.device) -> str | None:
    """Why a row cannot run here."""
    missing = [m for m in row.needs if importlib.util.find_spec(m) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    return "needs a GPU" if row.cuda_only and device.type != "cuda" else None


def identity(row: KernelRow) -> Result:
    """What says which row a result is of."""
    return {"op": row.op, "shape": row.shape, "name": row.name, "ours": row.ours}


def copies_for(row: KernelRow, device: torch.device, cold: bool) -> int:
    """How many copies of the inputs exceed the cache."""
    if not cold or not row.bytes:
        return 1
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return max(1, min(_MAX_COPIES, -(-_CACHES * cache // row.bytes)))


def extra_mib(call: Call, device: torch.device) -> float:
    """Most memory held during one call beyond what was there before it."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def timing(row: KernelRow, timer: Timer, device: torch.device, cold: bool) -> Result:
    """Time and rates of a row that is right."""
    calls = [prepared(row, device) for _ in range(copies_for(row, device, cold))]
    for call in calls:
        call()  # compiles what is compiled at the first call
    extra = extra_mib(calls[0], device)
    taken = timer.time(calls, WINDOWS)
    numbers = {"us": taken.us, "spread": taken.spread, "calls": taken.calls, "copies": len(calls)}
    return numbers | rates(taken.us, row.bytes, row.flops) | {"extra_mib": extra}


def measure(
    row: KernelRow,
    reference: tuple[Tensor, ...],
    device: torch.device,
    time_it: Callable[[KernelRow], Result],
) -> Result:
    """Parity, then ``time_it``; an error becomes the result of this row only."""
    if why := obstacle(row, device):
        return identity(row) | {"status": "skipped", "error": why}
    try:
        found = as_tuple(prepared(row, device)())
        parity = distance([t.detach() for t in found], reference)
        del found
        if parity > row.tolerance:
            error = f"{parity:.1e} from the reference, {row.tolerance:.0e} is allowed"
            return identity(row) | {"status": "wrong", "error": error}
        return identity(row) | {"status": "ok", "parity": parity} | time_it(row)
    except Exception as e:  # one row must not cost the others their device time
        return identity(row) | {"status": "failed", "error": f"{type(e).__name__}: {str(e)[:400]}"}
    finally:
        free(device)


def free(device: torch.device) -> None:
    """Give memory and compiled code back before the next row."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run_group(
    group: Sequence[KernelRow], device: torch.device, time_it: Callable[[KernelRow], Result]
) -> Iterator[Result]:
    """Results of a group's rows, one by one.

    Raises:
        ValueError: the group has no reference, or more than one.
    """
    references = [r for r in group if r.name == REFERENCE]
    if len(references) != 1:
        raise ValueError(
            f"{group[0].op}, {group[0].shape}: {len(references)} rows called {REFERENCE}; one is needed"
        )
    reference = tuple(t.detach().clone() for t in as_tuple(prepared(references[0], device)()))
    free(device)
    for row in group:
        if row.name != REFERENCE:
            yield measure(row, reference, device, time_it)


def broken(results: Iterable[Result]) -> list[Result]:
    """Rows of ours that are wrong or failed."""
    return [r for r in results if r["ours"] and r["status"] in ("wrong", "failed")]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--match", default="", help="only groups with a row 'operator | shape | name' that contains this"
    )
    p.add_argument("--budget-s", type=float, default=600.0, help="no group is started after this time")
    p.add_argument("--warm", action="store_true", help="repeat on one copy of the inputs")
    p.add_argument(
        "--check", action="store_true", help="parity only, on small shapes; with --into: is it up to date?"
    )
    p.add_argument("--list", action="store_true", help="print the rows' labels and stop")
    p.add_argument("--json", type=Path, help="write results here, after every row")
    p.add_argument("--show", nargs="+", type=Path, help="print the tables of these results; measure nothing")
    p.add_argument("--into", type=Path, help="with --show: a Markdown file with marker lines")
    p.add_argument("--mark", default="kernels", help="name in the marker lines")
    return p.parse_args(argv)


def show(args: argparse.Namespace) -> None:
    """Tables of earlier results; of a group measured twice the later file counts."""
    found: dict[tuple[str, str], list[Result]] = {}
    for path in args.show:
        for r in json.loads(path.read_text())["rows"]:
            found.setdefault((r["op"], r["shape"]), []).append(r | {"_file": path})
    last = [r for g in found.values() for r in g if r["_file"] == g[-1]["_file"]]
    body = tables(last)
    if not args.into:
        print(body)
        return
    old = args.into.read_text()
    new = between_markers(old, body, args.mark)
    if args.check and new != old:
        raise SystemExit(f"{args.into} is not what the results say; run this again without --check")
    args.into.write_text(new)


def run(
    args: argparse.Namespace, device: torch.device, time_it: Callable[[KernelRow], Result]
) -> list[Result]:
    """Results of all chosen groups until the time is over."""
    until = time.monotonic() + args.budget_s
    chosen = grouped(all_rows(small=args.check), args.match)
    known: dict[str, Any] = {"version": 1, "machine": machine(device), "cold": not args.warm}
    done: list[Result] = []
    for i, group in enumerate(chosen):
        if time.monotonic() > until:
            print(
                f"out of time: {len(chosen) - i} of {len(chosen)} groups were not measured, from {group[0].label}"
            )
            break
        found: list[Result] = []
        for result in run_group(group, device, time_it):
            found.append(result)
            if args.json:
                args.json.write_text(json.dumps(known | {"rows": done + found}, indent=1) + "\n")
        done += found
        print(tables(found), end="\n\n", flush=True)
    return done


def no_timing(row: KernelRow) -> Result:
    """What ``--check`` measures beyond parity."""
    return {}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    args = arguments(argv)
    if args.show:
        show(args)
        return 0
    if args.list:
        print("\n".join(r.label for g in grouped(all_rows(args.check), args.match) for r in g))
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.check:
        return 1 if broken(run(args, device, no_timing)) else 0
    if device.type != "cuda":
        print("bench_kernels.py times on a GPU only, and there is none; --check compares numbers on any CPU")
        return 0
    timer = GraphTimer(device)
    with timer.on_stream():
        done = run(args, device, lambda row: timing(row, timer, device, not args.warm))
    return 1 if broken(done) else 0


if __name__ == "__main__":
    sys.exit(main())
