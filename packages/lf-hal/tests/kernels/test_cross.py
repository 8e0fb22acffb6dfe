"""The same bits on every instruction set: kernels built for eight targets, run under qemu-user, compared word by word.

Marked ``cross``: ``nox -s cross`` brings the compiler, the emulators and the disassembler.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kernel_cases as cases
import pytest
from kernel_runs import FLUSH_TO_ZERO, Program, build_driver

from lf_hal.build import emulator_command
from lf_hal.targets import TARGETS, Target, missing_features

pytestmark = [
    pytest.mark.cross,
    pytest.mark.skipif(shutil.which("qemu-loongarch64") is None, reason="no qemu-user: use nox -s cross"),
]
ALL = list(TARGETS.values())
LASX, AARCH64, AVX2, SSE2 = (
    TARGETS[n] for n in ("loongarch64-lasx", "aarch64-neon", "x86-64-avx2", "x86-64-sse2")
)
STRICT = ("-Wall", "-Wextra", "-Werror")
LEVELLED = (LASX, AARCH64, AVX2)  # built at other optimisation levels too


def targets(*chosen: Target) -> list[Any]:
    """Parameters of which those of one target stay in one process, so that what is built for it is built once."""
    return [pytest.param(t, id=t.name, marks=pytest.mark.xdist_group(t.name)) for t in chosen]


def _command(target: Target, driver: Path) -> list[str]:
    if not missing_features(target):
        return [str(driver)]
    if not target.emulator:
        pytest.skip(
            f"{target.name} is built and disassembled; no emulator here runs it, nor does this processor"
        )
    return [*emulator_command(target), str(driver)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drivers")


@pytest.fixture(scope="session")
def program() -> Program:
    return cases.all_cases()


@cache
def _driver(target: Target, folder: Path, *, kind: str = "auto", extra: tuple[str, ...] = ()) -> Path:
    return build_driver(target, folder, kind=kind, extra=extra)


@pytest.mark.parametrize("target", targets(*ALL))
def test_no_bit_differs_from_the_order(target: Target, program: Program, folder: Path) -> None:
    results = program.run(_command(target, _driver(target, folder)))
    assert len(results) == len(program.expected) > 250
    assert cases.differences(program.expected, results) == {}


@pytest.mark.parametrize("target", targets(SSE2, AVX2))
def test_no_bit_differs_between_gcc_and_clang(target: Target, program: Program, folder: Path) -> None:
    results = program.run(_command(target, _driver(target, folder, kind="zig")))
    assert cases.differences(program.expected, results) == {}


@pytest.mark.parametrize("target", targets(*LEVELLED))
@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_the_optimisation_level_changes_no_bit(
    target: Target, level: str, program: Program, folder: Path
) -> None:
    extra = (level,) if level == "-O0" else (level, *STRICT)  # gcc ignores loop annotations at -O0, and warns
    results = program.run(_command(target, _driver(target, folder, extra=extra)))
    assert cases.differences(program.expected, results) == {}


@pytest.mark.xdist_group(AVX2.name)
@pytest.mark.parametrize("length", [4, 16])
def test_the_vector_length_changes_no_bit(length: int, program: Program, folder: Path) -> None:
    """16 is the source that an AVX-512 build compiles, here over pairs of AVX2 vectors."""
    driver = _driver(AVX2, folder, kind="zig", extra=(f"-DLF_VL={length}",))
    assert cases.differences(program.expected, program.run(_command(AVX2, driver))) == {}


@pytest.mark.parametrize("target", targets(LASX, AARCH64, AVX2))
def test_contraction_is_seen(target: Target, program: Program, folder: Path) -> None:
    """Order v1 is nearly all fused already: a scaled score plus its mask is what a contracting compiler can change."""
    driver = _driver(target, folder, extra=("-ffp-contract=fast",))
    assert "attention-mask" in cases.differences(program.expected, program.run(_command(target, driver)))


@pytest.mark.parametrize("target", targets(LASX, AARCH64, AVX2))
def test_fast_math_is_seen(target: Target, program: Program, folder: Path) -> None:
    driver = _driver(target, folder, extra=("-ffast-math", "-Wno-nan-infinity-disabled"))
    differing = cases.differences(program.expected, program.run(_command(target, driver)))
    assert len(differing) > 10


@pytest.mark.parametrize("target", targets(AARCH64, AVX2, SSE2))
def test_flushing_subnormals_to_zero_is_seen(target: Target, program: Program, folder: Path) -> None:
    results = program.run(_command(target, _driver(target, folder)), FLUSH_TO_ZERO)
    differing = cases.differences(program.expected, results)
    assert any(name.startswith("linear-") and name.endswith("-subnormal") for name in differing)
    assert not any(name.startswith("linear-") and name.endswith("-random") for name in differing)


@cache
def _disassembler(machine: str) -> tuple[str, ...]:
    """An objdump that knows the machine's vector instructions."""
    names = [f"llvm-objdump-{n}" for n in range(30, 16, -1)]
    for name in [*names, "llvm-objdump"]:
        if found := shutil.which(name):
            said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
            if machine in said or machine == "x86_64":
                return (found,)
    if machine == "x86_64" and (found := shutil.which("objdump")):
        return (found,)
    pytest.fail(f"no disassembler for {machine}: install llvm-19, or use nox -s cross")


def _listing(target: Target, driver: Path) -> list[str]:
    words = [*_disassembler(target.machine), "-d", "--no-show-raw-insn"]
    if "llvm" in words[0] and target.machine == "loongarch64":
        words += ["--mattr=+lsx,+lasx,+d"]
    listing = subprocess.run([*words, str(driver)], capture_output=True, text=True, check=True).stdout
    return [line.split(":", 1)[1] for line in listing.splitlines() if re.match(r"\s*[0-9a-f]+:", line)]


@pytest.mark.parametrize("target", targets(*ALL))
def test_a_build_has_its_instructions_and_no_others(target: Target, folder: Path) -> None:
    lines = _listing(target, _driver(target, folder))
    assert len(lines) > 5000
    if target.expected:
        assert sum(bool(re.search(target.expected, line)) for line in lines) >= 50
    if target.forbidden:
        assert [line for line in lines if re.search(target.forbidden, line)] == []


@pytest.mark.parametrize("target", targets(*ALL))
def test_no_build_warns(target: Target, folder: Path) -> None:
    level = "-O2" if target in LEVELLED else "-O1"
    assert _driver(target, folder, extra=(level, *STRICT)).exists()
