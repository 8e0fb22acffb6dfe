"""bench_adamw.py: its bookkeeping and its parity check; never how fast."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("bench_adamw")
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("bench_adamw", None)


def test_the_shapes_are_those_of_the_vla_of_the_baselines(bench: Any) -> None:
    shapes = bench.shapes_of(bench.VLA)
    assert len(shapes) == 368
    assert sum(math.prod(s) for s in shapes) == 1_287_170_176


def test_bytes_are_those_of_the_operations_a_row_does(bench: Any) -> None:
    shapes = [(10, 10), (7,)]
    assert bench.bytes_moved(shapes, bench.OURS[False]) == 100 * 28 + 7 * 28
    assert bench.bytes_moved(shapes, bench.OURS[True]) == 100 * 30 + 7 * 32
    assert bench.bytes_moved(shapes, bench.STOCK[False]) == 100 * 40 + 7 * 36


def test_rows_compare_with_the_best_of_torch_that_does_the_same(bench: Any) -> None:
    rows = [
        bench.Row("slow", False, False, 10.0, 0.0, 10**9),
        bench.Row("fast", False, False, 8.0, 0.0, 10**9),
        bench.Row("failed", False, False, math.nan, 0.0, 10**9, "failed: why"),
        bench.Row("clipping", True, False, 9.0, 0.0, 10**9),
        bench.Row("ours", False, True, 4.0, 0.0, 2 * 10**9),
        bench.Row("ours", True, True, 4.5, 0.0, 10**9),
    ]
    lines = bench.table(rows).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["0.80x", "1.00x", "why", "1.00x", "2.00x", "2.00x"]
    assert rows[4].rate == pytest.approx(500.0)


def test_stock_and_flat_steps_of_the_benchmark_agree(bench: Any) -> None:
    for clip in (0.0, 0.05):
        assert bench.parity(torch.device("cpu"), "torch", clip) <= 1e-6


def test_a_wrong_update_fails_parity(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = bench.Flat.fused

    def wrong(self: Any, clip: float, *rest: Any) -> Any:
        self.flat.optimizer.param_groups[0]["lr"] *= 1.01
        return fused(self, clip, *rest)

    monkeypatch.setattr(bench.Flat, "fused", wrong)
    with pytest.raises(SystemExit, match="parity: torch"):
        bench.parity(torch.device("cpu"), "torch", 0.0)


def test_every_launch_of_the_sweep_is_valid_and_there_once(bench: Any) -> None:
    grid = bench.launches(132)
    assert len(set(grid)) == len(grid) == 60
    assert {launch.programs for launch in grid} == {264, 528, 1056, 2112, 1 << 20}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_succeeds() -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_adamw.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "needs a CUDA device" in done.stdout
