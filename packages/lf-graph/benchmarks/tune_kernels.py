"""Tunes the Triton kernels for the shapes of the rows in ``kernel_rows/``, which are those of the models of DESIGN.md.

python tune_kernels.py [--match rms_norm] [--budget-s 600] [--workers 12] [--rebuild] [--export FOLDER]

Every row of ours runs once, which notes for what its kernels were launched; then ``lf_graph.tune.run`` searches. What
was found is kept after every key, so a run that is cut short is gone on with by the next one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from bench_kernels import all_rows, free, obstacle, prepared
from kernel_rows import KernelRow

from lf_graph import tune
from lf_graph.kernels._tunable import TUNABLES
from lf_graph.tune.__main__ import main as tune_command
from lf_graph.tune._run import load_kernels


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Command line; what is not ours goes to ``python -m lf_graph.tune``."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--match", default="", help="only rows whose label contains this")
    p.add_argument("--budget-s", type=float, default=600.0, help="time of the whole run")
    return p.parse_known_args(argv)


def chosen(rows: Sequence[KernelRow], match: str, device: torch.device) -> list[KernelRow]:
    """Rows of ours that can run here."""
    return [r for r in rows if r.ours and match in r.label and obstacle(r, device) is None]


def launch(row: KernelRow, device: torch.device) -> str:
    """Runs a row once; why it could not, or ""."""
    try:
        prepared(row, device)()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as e:  # the other rows can still be tuned
        return f"{type(e).__name__}: {str(e)[:200]}"
    finally:
        free(device)
    return ""


def note_keys(rows: Sequence[KernelRow], device: torch.device) -> int:
    """Launches every row; how many failed."""
    failed = 0
    for row in rows:
        error = launch(row, device)
        print(f"{row.label}: {error or 'launched'}", flush=True)
        failed += bool(error)
    return failed


def without_rows() -> list[str]:
    """Names of tunables that no row launched: they keep their defaults until a row does."""
    load_kernels()
    launched = {chosen.tunable for chosen in tune.stats().chosen}
    return sorted(set(TUNABLES) - launched)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    args, rest = arguments(argv)
    if not torch.cuda.is_available():
        print("tune_kernels.py needs a CUDA device; there is none here, nothing was tuned")
        return 0
    start, device = time.monotonic(), torch.device("cuda", torch.cuda.current_device())
    failed = note_keys(chosen(all_rows(small=False), args.match, device), device)
    if not args.match and without_rows():
        print(f"no row launches {', '.join(without_rows())}")
    left = args.budget_s - (time.monotonic() - start)
    status = tune_command([f"--budget-s={max(0.0, left)}", *rest])
    print(tune.stats().path)
    return 1 if failed or status else 0


if __name__ == "__main__":
    sys.exit(main())
