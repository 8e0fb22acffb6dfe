"""The whole set of measurements on one GPU, in calls that fit a lease: what runs, in which order, for how long at most.

    python gpu_plan.py                            # print the plan
    python gpu_plan.py --call vla --out DIR       # run one call; JSON and logs land in DIR
    python gpu_plan.py --call small --only hf,adamw --out DIR

Every command has its own budget and keeps the JSON of what it measured when it is cut short. Ours come
before stock: what they compile first is then compiled by nobody else (`prep s`). Budgets hold on an H200 with 16 cores,
where a cold Inductor cache costs most of the time; calls that follow each other on one machine share that cache.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Command:
    """A script with its arguments; ``out`` names its JSON."""

    script: str
    arguments: tuple[str, ...]
    out: str
    seconds: int

    def line(self, folder: Path) -> list[str]:
        """The process to start."""
        return [
            sys.executable,
            str(HERE / self.script),
            *self.arguments,
            "--json",
            str(folder / f"{self.out}.json"),
        ]


def step(workloads: str, out: str, seconds: int, rows: str = "ours,stock", *more: str) -> Command:
    """Our rows of some workloads, and the stock rows they are compared with."""
    fixed = ("--workloads", workloads, "--rows", rows, "--budget-s", str(seconds - 20))
    return Command("bench_step.py", (*fixed, *more), out, seconds)


UNCOMPILED = ("--match", "not compiled")  # the kernels of eager PyTorch, launched as graphs

CALLS: dict[str, tuple[Command, ...]] = {
    "vla": (step("vla", "vla", 450),),
    "n16": (step("n16", "n16", 260, "ours,stock", "--match", "n16|16"),),
    "experts": (step("moe", "moe", 420, "ours,fused,stock"),),
    "rest": (
        Command("curves.py", (*UNCOMPILED, "--budget-s", "290"), "curves", 300),
        Command("sweep.py", (*UNCOMPILED, "--budget-s", "130"), "sweep", 140),
        step("n16", "n16_4", 180, "ours,stock", "--match", "n16|4"),
    ),
    "plain": (step("vla", "vla4_plain", 250, "stock", "--match", "vla|4|eager", "--processes", "3"),),
    "language": (
        step("lm", "lm512", 150, "ours,stock", "--match", "lm-512"),
        step("lm", "lm2048", 360, "ours,fused,stock", "--match", "lm-2048"),
    ),
    "memory": (step("lm", "lm_memory", 560, "memory_rows", "--match", "lm-2048"),),
    "small": (
        Command("bench_hf.py", ("--batches", "1", "--budget-s", "190"), "hf", 200),
        Command("bench_adamw.py", (), "adamw", 70),
        Command("bench_pieces.py", (), "pieces", 40),
    ),
    "lengths": (
        Command("bench_lengths.py", ("--budget-s", "250"), "lengths", 270),
        Command("bench_lengths.py", ("--rows", "ladder", "--budget-s", "180"), "ladder", 200),
    ),
    "tune": (step("vla", "tune_ours", 570, "ours,tuned", "--match", "vla|16|lf-graph"),),
    "peers": (step("vla", "tune_stock", 570, "stock,peers.tune_stock", "--match", "vla|16|whole"),),
}


def arguments() -> argparse.Namespace:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--call", choices=CALLS)
    p.add_argument("--only", default="", help="names of JSON files a,b,...: only these commands of the call")
    p.add_argument("--out", type=Path, default=Path("gpu-out"))
    return p.parse_args()


def run(command: Command, folder: Path) -> None:
    """One command within its budget; its output goes to a log and, shortened, to the console."""
    start = time.perf_counter()
    log = folder / f"{command.out}.log"
    with log.open("w") as sink:
        try:
            code = subprocess.run(
                command.line(folder), stdout=sink, stderr=subprocess.STDOUT, timeout=command.seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    ending = "\n".join(log.read_text().splitlines()[-25:])
    print(f"== {command.out}: exit {code}, {time.perf_counter() - start:.0f} s\n{ending}", flush=True)


def main() -> None:
    """Print the plan, or run one call of it."""
    args = arguments()
    if args.call is None:
        for name, commands in CALLS.items():
            print(f"call {name}: at most {sum(c.seconds for c in commands)} s")
            for command in commands:
                print(f"  {command.seconds:4d} s  {command.script} {' '.join(command.arguments)}")
        return
    wanted = [c for c in CALLS[args.call] if not args.only or c.out in args.only.split(",")]
    if not wanted:
        raise SystemExit(f"--only {args.only}: {args.call} has {', '.join(c.out for c in CALLS[args.call])}")
    args.out.mkdir(parents=True, exist_ok=True)
    for command in wanted:
        run(command, args.out)


if __name__ == "__main__":
    main()
