"""Every row of the benchmark runs, and those that claim to be the ordinary loop have its bits."""

import argparse
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_gradients  # noqa: E402 (from the folder above)
from gradient_rows import GROUPS  # noqa: E402


@pytest.mark.parametrize("group", GROUPS)
def test_rows_run_and_have_the_bits_they_claim(group):
    common = {"group": group, "model": "tiny", "device": "cpu", "steps": 2, "threads": 1, "pool_gib": 1}
    found = {
        row: bench_gradients.run_row(argparse.Namespace(row=row, fused_adamw=False, **common))
        for row in GROUPS[group][1]
    }
    ordinary = found["ordinary loop"]
    for name, row in found.items():
        assert row["peak_bytes"] > 0
        other = "other mathematics" in name or "rounds" in name
        assert other or row["bits"] == ordinary["bits"], name
    assert all(row["gradient_bytes"] for name, row in found.items() if "release" in name)
