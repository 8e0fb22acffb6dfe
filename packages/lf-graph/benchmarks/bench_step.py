"""One training step, stock PyTorch against lf-graph: parity, time, launches, memory, preparation.

    python bench_step.py --workloads vla,moe --rows stock --json stock.json --budget-s 520   # on a GPU
    python bench_step.py --workloads vla --rows stock,ours --match graph --processes 3       # plain rows: 3 processes
    python bench_step.py --tiny --workloads vla,lm,moe                                       # CPU, tiny models
    python bench_step.py --list

Workloads: vla, lm, moe (classes of the baselines, see workloads.py) and n16 (gr00t_n16_vla of lf-meta). Rows come from
stock.py and ours.py. The JSON is written after every row, so that a run that is cut short keeps what it measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import report
import torch
from measure import Effort, Row, machine, measure, not_measured, profile_again
from workloads import Workload, workloads

HERE = Path(__file__).parent
Result = dict[str, Any]
START_S = 25.0  # a process: imports, CUDA context
QUICK_S = 20.0
WARM_S = 50.0  # a row whose code is in the cache
VERSION = 1


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--workloads", default="vla,moe,lm", help="vla, lm, moe, n16")
    p.add_argument(
        "--rows", default="stock,ours", help="stock, ours, peers.tune_stock: modules with rows(workload)"
    )
    p.add_argument(
        "--match",
        default="",
        help="only rows whose workload|batch|name contains one of a,b,...; a&!c: a without c",
    )
    p.add_argument(
        "--warm", default="", help="as --match: compile these at once in processes of their own before"
    )
    p.add_argument("--only", default="", help="only the row of exactly this workload|batch|name")
    p.add_argument("--processes", type=int, default=1, help="plain rows: median over this many processes")
    p.add_argument("--isolate", action="store_true", help="every row in a process of its own")
    p.add_argument(
        "--budget-s", type=float, default=float("inf"), help="start no row that would end after this"
    )
    p.add_argument("--windows", type=int, default=12)
    p.add_argument("--window-steps", type=int, default=1)
    p.add_argument("--no-profile", action="store_true")
    p.add_argument("--tiny", action="store_true", help="tiny models, on a CPU too")
    p.add_argument("--json", type=Path, help="write the results here, after every row")
    p.add_argument("--list", action="store_true", help="print the rows and stop")
    return p.parse_args(argv)


def chosen_workloads(names: Iterable[str], tiny: bool) -> list[Workload]:
    """Workloads by name; that of lf-meta is imported only when asked for, and left out where it cannot be."""
    known = workloads(tiny)
    found: list[Workload] = []
    for name in names:
        if name == "n16":
            try:
                found += importlib.import_module("workload_n16").workloads(tiny)
            except ImportError as e:
                print(f"no workload n16: {e}; the others run", file=sys.stderr)
        elif name in known:
            found += known[name]
        else:
            raise SystemExit(f"no workload {name!r}; known: {', '.join(known)}, n16")
    return found


def by_urgency(rows: Iterable[Row]) -> list[Row]:
    """Urgent rows first in their order, then the others, the quick ones before the slow."""
    rows = list(rows)
    return [r for r in rows if r.urgent] + sorted((r for r in rows if not r.urgent), key=lambda r: r.expect_s)


def rows_from(module: str, workload: Workload) -> list[Row]:
    """Rows of a module beside this one for a workload; none where there is no such file."""
    if not (HERE / f"{module.replace('.', '/')}.py").exists():
        print(f"no rows from {module}: no such file beside bench_step.py", file=sys.stderr)
        return []
    found: list[Row] = importlib.import_module(module).rows(workload)
    return found


def matches(row: Row, wanted: str) -> bool:
    """Whether a row is one of ``a,b&!c``: contains a, or b without c."""
    return any(all(has(row.key, q) for q in p.split("&")) for p in wanted.split(",") if p)


def has(key: str, part: str) -> bool:
    """Whether a name contains a part, or does not where an exclamation mark stands before it."""
    return part[1:] not in key if part.startswith("!") else part in key


def chosen_rows(modules: Iterable[str], selected: list[Workload], args: argparse.Namespace) -> list[Row]:
    """Rows of the modules named, filtered, in the order they run."""
    found = [row for name in modules for workload in selected for row in rows_from(name, workload)]
    if args.only:
        found = [r for r in found if r.key == args.only]
    return by_urgency(r for r in found if not args.match or matches(r, args.match))


def repeats(row: Row, args: argparse.Namespace) -> int:
    """In how many processes of its own a row runs; 0: in this one."""
    if args.only:
        return 0
    if row.plain and args.processes > 1:
        return int(args.processes)
    return 1 if args.isolate or is_slow_and_launches(row) else 0


def is_slow_and_launches(row: Row) -> bool:
    """A row that must not follow a profiler, and would hold the urgent ones up if it went before them."""
    return row.launches_matter and row.expect_s > QUICK_S and torch.cuda.is_available()


def comes_first(row: Row, args: argparse.Namespace) -> bool:
    """Whether a row has to be timed in this process before anything is profiled here."""
    return row.launches_matter and repeats(row, args) == 0


def running_order(rows: Iterable[Row], args: argparse.Namespace) -> list[Row]:
    """Rows that no profiler may precede, then the urgent ones, then the others."""
    ordered = by_urgency(rows)
    return [r for r in ordered if comes_first(r, args)] + [r for r in ordered if not comes_first(r, args)]


def expected(row: Row, args: argparse.Namespace) -> float:
    """Seconds the row will take."""
    count = repeats(row, args)
    return row.expect_s if count == 0 else count * (row.expect_s + START_S)


def median_of(results: list[Result]) -> Result:
    """The result with the median time, with the times of all processes."""
    good = sorted((r for r in results if r["status"] == "ok"), key=lambda r: r["step_ms"])
    if len(good) < len(results):
        return next(r for r in results if r["status"] != "ok")
    times = [r["step_ms"] for r in good]
    middle = good[len(good) // 2]
    return middle | {"processes_ms": times, "processes_spread": (times[-1] - times[0]) / middle["step_ms"]}


def in_process(row: Row, args: argparse.Namespace, limit_s: float) -> Result:
    """Measure a row in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, str(HERE / "bench_step.py"), "--only", row.key, "--json", str(out)]
        command += ["--rows", args.rows, "--workloads", args.workloads]
        command += ["--windows", str(args.windows), "--window-steps", str(args.window_steps)]
        command += ["--tiny"] * args.tiny + ["--no-profile"] * args.no_profile
        try:
            timeout = None if limit_s == float("inf") else limit_s
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return not_measured(row, "failed", f"its process ran longer than the {limit_s:.0f} s left")
        rows = json.loads(out.read_text())["rows"] if out.exists() else []
        return rows[0] if rows else not_measured(row, "failed", done.stderr[-600:])


def warm(rows: list[Row], args: argparse.Namespace) -> list[Row]:
    """Compile rows side by side into the cache that their measurement reads; their `prep s` then says little."""
    start = time.perf_counter()
    command = [
        sys.executable,
        str(HERE / "bench_step.py"),
        "--rows",
        args.rows,
        "--workloads",
        args.workloads,
    ]
    command += ["--windows", "1", "--no-profile"] + ["--tiny"] * args.tiny
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    wanted = [r.key for r in rows if matches(r, args.warm)]
    running = {key: subprocess.Popen([*command, "--only", key], **quiet) for key in wanted}
    done = {key for key, process in running.items() if process.wait() == 0}
    for key in wanted:
        print(
            f"warm {key}: {'done' if key in done else 'failed'}, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return [replace(r, expect_s=min(r.expect_s, WARM_S)) if r.key in done else r for r in rows]


class Run:
    """Measures rows one after the other within a time budget and keeps the JSON up to date."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.started = time.perf_counter()
        self.results: list[Result] = []
        self.effort = Effort(args.windows, args.window_steps, profiled=not args.no_profile)

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return float(self.args.budget_s) - (time.perf_counter() - self.started)

    def one(self, row: Row) -> Result:
        """Measure one row, or say why not."""
        if expected(row, self.args) > self.left_s():
            why = f"needs about {expected(row, self.args):.0f} s, {max(0.0, self.left_s()):.0f} s left"
            return not_measured(row, "not run", why)
        count = repeats(row, self.args)
        if count == 0:
            effort = replace(self.effort, profiled=False) if self.postpones(row) else self.effort
            return measure(row, self.device, effort)
        return median_of([in_process(row, self.args, self.left_s()) for _ in range(count)])

    def postpones(self, row: Row) -> bool:
        """Whether a row is timed now and profiled after all others."""
        here = self.device.type == "cuda" and not self.args.only
        return here and self.effort.profiled and comes_first(row, self.args)

    def all(self, rows: list[Row]) -> None:
        """Measure every row, then profile those that had to be timed first."""
        rows = running_order(rows, self.args)
        self.measure_all(rows)
        for row, result in zip(rows, self.results, strict=True):
            if result["status"] == "ok" and self.postpones(row) and row.expect_s < self.left_s():
                result |= profile_again(row, self.device)
                self.write()

    def measure_all(self, rows: list[Row]) -> None:
        """Measure every row; one line of progress each."""
        for row in rows:
            result = self.one(row)
            self.results.append(result)
            ms = f"{result['step_ms']:.2f} ms" if result["status"] == "ok" else result["error"][:200]
            took = result.get("seconds", 0.0)
            print(f"{row.key} [{row.source}]: {result['status']}, {ms} ({took:.0f} s)", flush=True)
            self.write()

    def document(self) -> dict[str, Any]:
        """What is written as JSON."""
        return {
            "version": VERSION,
            "machine": machine(self.device),
            "settings": {k: str(v) for k, v in vars(self.args).items() if k != "json"},
            "rows": report.with_parity(self.results),
        }

    def write(self) -> None:
        """Write what is known so far; the file is complete at any time."""
        if not self.args.json:
            return
        self.args.json.parent.mkdir(parents=True, exist_ok=True)
        partial = self.args.json.with_suffix(".partial")
        partial.write_text(json.dumps(self.document(), indent=1))
        partial.replace(self.args.json)


def main(argv: list[str] | None = None) -> None:
    """Run the rows asked for and print the tables."""
    args = arguments(argv)
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or args.tiny or args.list):
        print("bench_step needs a CUDA GPU; --tiny runs what a CPU can")
        return
    torch.set_float32_matmul_precision("high")  # tf32 where float32 is multiplied, as in the baselines
    device = torch.device("cuda" if has_gpu else "cpu")
    selected = chosen_workloads(args.workloads.split(","), args.tiny)
    rows = chosen_rows(args.rows.split(","), selected, args)
    if args.list:
        ordered = running_order(rows, args)
        print("\n".join(f"{r.key} [{r.source}] about {expected(r, args):.0f} s" for r in ordered))
        return
    run = Run(args, device)
    run.all(warm(rows, args))
    print(f"\n{report.machine_line(machine(device))}\n\n{report.tables(run.results)}")


if __name__ == "__main__":
    main()
