"""A short run of the soak benchmark: flat memory, and the files that the policy keeps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lf_ckpt

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))  # its neighbours, which it imports as a script does
    spec = importlib.util.spec_from_file_location("bench_soak", BENCHMARKS / "bench_soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_soak"] = module
    spec.loader.exec_module(module)
    return module


def test_saves_every_few_steps_leave_memory_flat_and_only_the_files_of_the_policy(
    tmp_path: Path, bench: ModuleType
) -> None:
    done = bench.soak(tmp_path, steps=120, every=5, width=128)

    assert done.flat, done.pss
    assert done.stray == []
    with lf_ckpt.open(tmp_path, read_only=True) as store:
        bases = {int(m.parent.folder) for m in store._catalog.committed() if m.parent}
    assert {100, 110, 115, 120} <= set(done.steps)
    assert set(done.steps) <= {100, 110, 115, 120} | bases
