"""Executed instructions, counted under qemu-user: the count is exact, and vectors are what saves them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from kernel_runs import build_driver

from lf_hal.build import find_compiler, run_compiler
from lf_hal.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
LOOP = """__asm__(".globl _start\\n_start:\\n addi.w $t0,$zero,{rounds}\\n1: addi.w $t0,$t0,-1\\n bnez $t0,1b\\n"
" ori $a7,$zero,93\\n move $a0,$zero\\n syscall 0\\n");"""
needs_qemu = pytest.mark.skipif(
    shutil.which("qemu-loongarch64") is None, reason="no qemu-user: use nox -s cross"
)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "bench_instructions", ROOT / "benchmarks" / "bench_instructions.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.cross
@needs_qemu
@pytest.mark.parametrize("rounds", [1, 100, 2000])
def test_every_executed_instruction_is_counted_once(bench: ModuleType, rounds: int, tmp_path: Path) -> None:
    target = TARGETS["loongarch64-scalar"]
    (tmp_path / "loop.c").write_text(LOOP.format(rounds=rounds))
    words = [*find_compiler(target).command, "-target", target.zig_triple, "-O2", "-nostdlib", "-static"]
    run_compiler([*words, str(tmp_path / "loop.c"), "-o", str(tmp_path / "loop")])
    assert bench.executed([str(tmp_path / "loop")], target.emulator) == 1 + 2 * rounds + 3


@pytest.mark.cross
@needs_qemu
@pytest.mark.parametrize("label", ["linear 24x48x256", "softmax 5x1000", "rms_norm 10x1000"])
def test_wider_vectors_execute_fewer_instructions(bench: ModuleType, label: str, tmp_path: Path) -> None:
    scalar, lsx, lasx = (
        bench.instructions_of(bench.CASES[label], TARGETS[name], build_driver(TARGETS[name], tmp_path))
        for name in ("loongarch64-scalar", "loongarch64-lsx", "loongarch64-lasx")
    )
    assert 0 < 1.5 * lasx < lsx < scalar / 2  # a loop that a compiler left scalar is seen


def test_committed_counts_say_that_they_are_emulated_and_no_speed() -> None:
    (path,) = (ROOT / "benchmarks" / "results").glob("instructions-*.json")
    report = json.loads(path.read_text())
    assert report["what"] == "emulated instruction counts, not speed"
    assert report["what"] in (ROOT / "README.md").read_text()
    emulated = {name for name, target in TARGETS.items() if target.emulator}
    for case in {row["case"] for row in report["rows"]}:
        assert {row["target"] for row in report["rows"] if row["case"] == case} == emulated
