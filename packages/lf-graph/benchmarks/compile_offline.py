"""Compiles the kernels of lf_graph for an H200 (sm_90) without a GPU, and prints what ptxas made of them.

python compile_offline.py [--match attention] [--candidates] [--quick] [--workers 2] [--budget-s 600] [--json FILE]

Triton brings its own ptxas. Every operator is called at the sizes of our models; what it would launch is compiled in
worker processes, in the default configuration or in all that the tuner would try. A row gives registers and bytes of
spills of a thread, accesses to spilled registers in innermost loops, shared memory of a program, programs that share a
multiprocessor, matrix instructions (of Hopper, and of the cards before), and the share of the bytes of loads and stores
of global memory that move 16 at once, as PTX lists them.

Marks: ``spills`` in loops; ``no room``: more shared memory than a program may have; ``no wgmma``: products by the
matrix instructions of older cards; ``serialized``: wgmma instructions that wait for each other; ``narrow``: most bytes
of a kernel bound by memory move in smaller accesses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from offline.cases import Case, all_cases
from offline.compiled import Compiled, compile_launch
from offline.launches import Launch, recorded

from lf_graph.kernels._tunable import TUNABLES, Config

HEAD = ("registers", "spills", "in loops", "shared", "resident", "wgmma", "mma", "wide")


@dataclass(frozen=True)
class Row:
    """A launch, the case that needs it, and its configuration ("" if nobody may choose one)."""

    case: Case
    config: str
    launch: Launch


def defaults(cases: Sequence[Case]) -> list[Row]:
    """Launches in the default configurations, each once."""
    found: dict[Launch, Row] = {}
    for case in cases:
        launches, asked = recorded(case.call)
        for launch in launches:
            names = [str(c) for (name, _), c in asked.items() if launch.kernel in _kernels(name)]
            found.setdefault(launch, Row(case, " or ".join(dict.fromkeys(names)), launch))
    return list(found.values())


def candidates(cases: Sequence[Case]) -> list[Row]:
    """Launches in every configuration that the tuner would try."""
    found = {row.launch: row for row in defaults(cases)}
    for case in cases:
        for chosen in recorded(case.call)[1]:
            for config in TUNABLES[chosen[0]].candidates(chosen[1]):
                for launch in _with(case, chosen, config):
                    found.setdefault(launch, Row(case, str(config), launch))
    return list(found.values())


def _kernels(tunable: str) -> set[str]:
    return {k.__name__ for k in TUNABLES[tunable].kernels}


def _with(case: Case, chosen: Any, config: Config) -> list[Launch]:
    """What changes with the configuration of one tunable."""
    launches, _ = recorded(case.call, {chosen: config})
    return [launch for launch in launches if launch.kernel in _kernels(chosen[0])]


def without_case(rows: Sequence[Row]) -> list[str]:
    """Kernels of tunables that no case launches."""
    launched = {row.launch.kernel for row in rows}
    return sorted({k for name in TUNABLES for k in _kernels(name)} - launched)


def marks(row: Row, made: Compiled) -> list[str]:
    """What is wrong with a kernel, in words."""
    if made.error:
        return [made.error]
    streams = not row.case.products and not row.case.tails
    found = {
        "spills": made.loop_spills > 0,
        "no room": not made.fits,
        "no wgmma": made.mma > 0,
        "serialized": made.serialized,
        "narrow": streams and made.wide("ld", "cp", "st") < 0.5,
    }
    return [name for name, is_so in found.items() if is_so]


def compiled(rows: Sequence[Row], workers: int, budget_s: float) -> Iterator[tuple[Row, Compiled]]:
    """Rows with what became of them, as they are ready; those that the time does not suffice for are left out."""
    stop = time.monotonic() + budget_s
    if workers == 0:
        for row in rows:
            if time.monotonic() > stop:
                print(f"the time of {budget_s:.0f} s is over: not everything was compiled")
                return
            yield row, compile_launch(row.launch)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        waiting: dict[Future[Compiled], Row] = {pool.submit(compile_launch, r.launch): r for r in rows}
        for done in as_completed(waiting, timeout=max(1.0, stop - time.monotonic())):
            yield waiting[done], done.result()
    except TimeoutError:
        print(f"the time of {budget_s:.0f} s is over: not everything was compiled")
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def line(row: Row, made: Compiled) -> str:
    """One row of the table."""
    numbers = (
        made.registers, made.spills, made.loop_spills, made.shared, made.resident, made.wgmma, made.mma,
        f"{made.wide('ld', 'cp', 'st'):.0%}",
    )  # fmt: skip
    cells = " ".join(f"{n!s:>9}" for n in numbers)
    return f"{cells}  {row.case.label} | {made.kernel} | {row.config} | {', '.join(marks(row, made))}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--match", default="", help="only cases whose label contains this, or one of these between commas"
    )
    p.add_argument("--candidates", action="store_true", help="every configuration the tuner would try")
    p.add_argument("--quick", action="store_true", help="the hardest sizes only, as the test does")
    p.add_argument("--workers", type=int, default=2, help="processes that compile; 0: this one")
    p.add_argument("--budget-s", type=float, default=600.0, help="time of the whole run")
    p.add_argument("--json", type=Path, help="write the rows to this file too")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 if a kernel cannot be compiled."""
    args = arguments(argv)
    torch.set_num_threads(1)
    wanted = args.match.split(",")
    cases = [c for c in all_cases() if any(w in c.label for w in wanted) and (c.quick or not args.quick)]
    rows = candidates(cases) if args.candidates else defaults(cases)
    print(f"triton {triton.__version__}, sm_90: {len(rows)} kernels of {len(cases)} cases")
    print(" ".join(f"{name:>9}" for name in HEAD), flush=True)
    if not args.match and without_case(rows):
        print(f"no case launches {', '.join(without_case(rows))}")
    found = []
    for row, made in compiled(rows, args.workers, args.budget_s):
        print(line(row, made), flush=True)
        about = {"case": row.case.label, "op": row.case.op, "config": row.config, "marks": marks(row, made)}
        found.append(about | made.to_json())
    if args.json:
        args.json.write_text(json.dumps({"triton": triton.__version__, "kernels": found}, indent=1) + "\n")
    return int(any(made["error"] for made in found))


if __name__ == "__main__":
    sys.exit(main())
