"""Benchmarks run from a command line as their first lines say, also where nothing has been made ready."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_a_folder_to_measure_in_is_made_and_left_empty(tmp_path: Path) -> None:
    where, out = tmp_path / "no/such/folder", tmp_path / "out.json"

    subprocess.run(
        [sys.executable, BENCHMARKS / "bench_soak.py", "--json", out, "--dir", where, "--steps", "10"],
        check=False, timeout=200, cwd=tmp_path,
    )  # fmt: skip

    assert json.loads(out.read_text())["steps"]  # whatever it found of memory in so few steps
    assert where.is_dir()
    assert not list(where.iterdir())


def test_the_readme_shows_the_device_runs_that_are_committed() -> None:
    text = (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")
    (files,) = re.findall(r"bench_device\.py --show (.+)", text)

    shown = subprocess.run(
        [sys.executable, BENCHMARKS / "bench_device.py", "--show", *files.split()],
        check=True, capture_output=True, text=True, cwd=BENCHMARKS.parent,
    ).stdout  # fmt: skip

    assert shown in text
