"""What the tests of the benchmarks share: the modules, which are scripts and no package, and made-up results."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MODULES = (
    "models",
    "workloads",
    "measure",
    "report",
    "stock",
    "bench_step",
    "sweep",
    "curves",
    "peers.tune_stock",
)
LAZY = (
    "workload_n16",
    "ours",
    "fused",
    "tuned",
    "memory_rows",
    "planned_memory",
    "epilogue",
    "peers",
    "bench_hf",
    "bench_pieces",
    "bench_lengths",
    "lengths_data",
    "lengths_models",
    "lengths_rows",
    "float8_rows",
)


def loaded() -> Iterator[Any]:
    """The benchmark modules, without leaving their short names behind for other tests."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield SimpleNamespace(**{n.rpartition(".")[2]: importlib.import_module(n) for n in MODULES})
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in (*MODULES, *LAZY):
            sys.modules.pop(name, None)


def result(**fields: Any) -> dict[str, Any]:
    """One row as bench_step.py writes it."""
    base = {"workload": "w", "batch": 1, "row": "eager", "source": "stock", "status": "ok", "unit": "tokens"}
    numbers = {"step_ms": 10.0, "spread": 0.1, "units_per_s": 5.0, "prep_s": 1.0, "losses": [2.0, 1.0]}
    return base | numbers | {"losses_reseeded": [2.0, 1.0]} | fields
