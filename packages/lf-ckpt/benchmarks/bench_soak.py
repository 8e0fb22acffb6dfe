#!/usr/bin/env python3
"""Many saves of a small training run: memory stays flat and the files are those that the policy keeps.

    bench_soak.py --json OUT.json [--steps 500] [--every 5] [--dir DIR]

PSS is the process's share of memory in /proc/self/smaps_rollup, without files, taken at every save. Exit code 1 when
the second half of the run needs more than the first, or files are left that no step owns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from scratch import scratch
from torch import nn

import lf_ckpt

KEEP = [lf_ckpt.Last(3), lf_ckpt.Every(steps=100)]
SLACK = 8 << 20  # allocator noise; a leak of one tensor per save would be many times that


@dataclass
class Soak:
    """pss: bytes after each save. steps: committed at the end. stray: files that belong to none of them."""

    pss: list[int]
    steps: list[int]
    stray: list[str]
    growth: int
    seconds: float

    @property
    def flat(self) -> bool:
        """Whether the second half needed no more memory than the first."""
        return self.growth <= SLACK


def soak(folder: Path, steps: int, every: int, *, width: int = 256, overlap: bool = True) -> Soak:
    """Train for `steps`, save every `every`, keep by KEEP."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    fence: Any = optimizer if overlap else ()
    pss, began = [], time.perf_counter()
    with lf_ckpt.open(folder, keep=KEEP) as store:
        for step in range(1, steps + 1):
            model(torch.randn(16, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % every == 0:
                store.save(step, *lf_ckpt.collect(model, optimizer), overlap=overlap, fence=fence)
                pss.append(memory())
        store.wait()
        kept = list(store.steps())
    owned = {f"steps/{step}" for step in kept}
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    stray = [
        str(f) for f in files if f.name.endswith(".tmp") or (len(f.parts) > 1 and str(f.parent) not in owned)
    ]
    half = len(pss) // 2
    growth = max(pss[half:]) - max(pss[:half])
    return Soak(pss, kept, stray, growth, time.perf_counter() - began)


def memory() -> int:
    """PSS of this process in bytes, without pages of files: their share depends on who else uses the libraries."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def main() -> int:
    """Run, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--dir", type=Path)
    arguments = parser.parse_args()
    with scratch(arguments.dir) as folder:
        done = soak(folder, arguments.steps, arguments.every)
    half = len(done.pss) // 2
    first, second = max(done.pss[:half]) / 1e6, max(done.pss[half:]) / 1e6
    print(f"{arguments.steps} steps, {len(done.pss)} saves in {done.seconds:.1f} s")
    verdict = "flat" if done.flat else "GROWS"
    print(f"PSS at most {first:.1f} MB in the first half, {second:.1f} MB in the second: {verdict}")
    print(f"steps kept: {done.steps}; stray files: {done.stray or 'none'}")
    arguments.json.write_text(json.dumps({"version": 1, **asdict(done)}, indent=1))
    return 0 if done.flat and not done.stray else 1


if __name__ == "__main__":
    sys.exit(main())
