"""Where graphs stop paying: one training step over growing micro-batches, eager against a whole-step graph and ours.

    python sweep.py --json sweep.json --budget-s 300          # the 1.65 B language model, 128 ... 8192 tokens
    python sweep.py --workload vla --rows stock               # the VLA class, 1 ... 16 samples
    python sweep.py --tiny                                    # on a CPU

All rows have the fused optimizer, so that launches differ and arithmetic does not. A graph can only take away the time
in which the device waits for launches: 1 - kernel time / step time of the eager row, printed as idle.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import report
import stock
import torch
from bench_step import Result, Run, rows_from
from measure import Row, machine
from models import ROPE_POSITIONS
from workloads import (
    LM_DIMS,
    TINY_LM,
    TINY_VLA,
    VLA_DIMS,
    Workload,
    language,
    vision_language_action,
)

TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
SAMPLES = (1, 2, 4, 8, 16)
PAYS = 1.05  # a graph pays where eager takes at least this much longer
EAGER, GRAPH = "eager fused", "graph"


def lm_workload(tokens: int, tiny: bool) -> Workload:
    """``tokens`` per micro-batch: one sequence as long as the position table, then more of them."""
    length = min(tokens, 16 if tiny else ROPE_POSITIONS)
    return language(f"lm-{length}", TINY_LM if tiny else LM_DIMS, (tokens // length,), length)


def sweep_workloads(name: str, tiny: bool) -> list[Workload]:
    """The workloads of one sweep, small micro-batches first."""
    if name == "vla":
        sizes = SAMPLES[:2] if tiny else SAMPLES
        return [vision_language_action("vla", TINY_VLA if tiny else VLA_DIMS, sizes)]
    return [lm_workload(tokens, tiny) for tokens in ((8, 32) if tiny else TOKENS)]


def sweep_rows(selected: Iterable[Workload], modules: Iterable[str], match: str) -> list[Row]:
    """Eager and graph rows of stock PyTorch, and of other modules the rows whose name contains ``match``."""
    found = []
    variants = [replace(v, plain=False, expect_s=15) for v in (stock.EAGER_FUSED, stock.GRAPH)]
    for workload in selected:
        for batch in workload.batches:
            found += [stock.row_of(workload, batch, v) for v in variants]
        others = [r for name in modules if name != "stock" for r in rows_from(name, workload)]
        found += [r for r in others if match in r.name]
    return found


def size_of(r: Result) -> int:
    """Tokens (or samples) per micro-batch, from the rate and the time of a result."""
    return round(r["units_per_s"] * r["step_ms"] / 1000)


def pivot(results: Iterable[Result]) -> dict[int, dict[str, Result]]:
    """Measured results by size, then by row."""
    found: dict[int, dict[str, Result]] = {}
    for r in report.measured(list(results)):
        found.setdefault(size_of(r), {})[r["row"]] = r
    return dict(sorted(found.items()))


def stops_paying(by_size: dict[int, dict[str, Result]], row: str) -> int | None:
    """The smallest size from which on ``row`` gains less than 5 % over eager; None where it always gains more."""
    last = None
    for size, rows in sorted(by_size.items(), reverse=True):
        if EAGER not in rows or row not in rows:
            continue
        if rows[EAGER]["step_ms"] / rows[row]["step_ms"] >= PAYS:
            break
        last = size
    return last


def idle(r: Result) -> float | None:
    """Share of a step in which no kernel ran."""
    return 1 - r["kernel_ms"] / r["step_ms"] if "kernel_ms" in r else None


def line(size: int, rows: dict[str, Result], names: list[str]) -> list[str]:
    """One table row."""
    cell, eager = report.cell, rows.get(EAGER)
    cells = [str(size)]
    for name in names:
        r = rows.get(name)
        gain = eager["step_ms"] / r["step_ms"] if r and eager else None
        cells += [cell(r and r["step_ms"], ".2f")] + ([cell(gain, ".2f")] if name != EAGER else [])
    launches = [rows[name].get("launches") if name in rows else None for name in names]
    cells.append(" / ".join(cell(n, "d") for n in launches))
    cells += [cell(eager and eager.get("kernel_ms"), ".1f"), cell(eager and idle(eager), ".0%")]
    return cells


def table(results: Iterable[Result]) -> str:
    """The sweep as Markdown, and where each row stops paying."""
    by_size = pivot(results)
    names = list(dict.fromkeys(name for rows in by_size.values() for name in rows))
    header = ["per micro-batch"]
    for name in names:
        header += [f"{name} ms"] + (["eager /"] if name != EAGER else [])
    header += [f"launches {' / '.join(names)}", "eager kernel ms", "eager idle"]
    text = report.markdown(header, [line(size, rows, names) for size, rows in by_size.items()])
    ends = [f"{n}: {stops_paying(by_size, n) or 'pays everywhere'}" for n in names if n != EAGER]
    return f"{text}\n\nGain below {PAYS - 1:.0%} from this size on: {', '.join(ends)}."


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line; what :class:`bench_step.Run` reads is there too."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--workload", default="lm", choices=("lm", "vla"))
    p.add_argument("--rows", default="stock,ours")
    p.add_argument("--match", default="", help="of ours, only rows whose name contains this")
    p.add_argument("--budget-s", type=float, default=float("inf"))
    p.add_argument("--windows", type=int, default=12)
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--json", type=Path)
    p.set_defaults(processes=1, isolate=False, only="", window_steps=1, no_profile=False)
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any] | None:
    """Run the sweep and print its table; returns the document that was written."""
    args = arguments(argv)
    if not (torch.cuda.is_available() or args.tiny):
        print("sweep needs a CUDA GPU; --tiny runs what a CPU can")
        return None
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(args, device)
    run.all(sweep_rows(sweep_workloads(args.workload, args.tiny), args.rows.split(","), args.match))
    print(f"\n{report.machine_line(machine(device))}\n\n{table(run.results)}")
    return run.document()


if __name__ == "__main__":
    main()
