"""Control registers and cpucfg of machines that are not here: programs of theirs, run by qemu-user."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lf_hal import resolve_target
from lf_hal._cpu import _CPUCFG, cpucfg_facts
from lf_hal.build import build_objects, emulator_command, find_compiler, link
from lf_hal.errors import CompilerMissingError
from lf_hal.fp_guard import LAYOUTS, FpState
from lf_hal.spec import spec

OTHERS = {"aarch64": "aarch64-neon", "riscv64": "riscv64", "loongarch64": "loongarch64-scalar"}


def command(machine: str, folder: Path) -> list[str]:
    """The program for this machine, and what starts it here."""
    target = resolve_target(OTHERS[machine])
    if not target.emulator or shutil.which(target.emulator[0]) is None:
        pytest.skip("no qemu-user")
    try:
        compiler = find_compiler(target, "zig")
    except CompilerMissingError:
        pytest.skip("no zig")
    text = (Path(__file__).parent / "fenv_probe.c").read_text()
    source = folder / "fenv_probe.c"
    source.write_text(text.replace("CPUCFG_CODE", ",".join(map(str, _CPUCFG))))
    program = folder / "fenv_probe"
    link(compiler, target, build_objects(compiler, target, [source]), program, shared=False)
    return [*emulator_command(target), str(program)]


def lines(words: list[str]) -> list[str]:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


@pytest.mark.cross
@pytest.mark.parametrize("machine", OTHERS)
def test_the_table_finds_the_fields_where_the_c_library_puts_them(machine: str, tmp_path: Path) -> None:
    program = command(machine, tmp_path)
    plain, towards_zero, flushing = (bytes.fromhex(line) for line in lines(program)[-3:])
    assert FpState.of(machine, plain).wrong == ()
    (direction,) = FpState.of(machine, towards_zero).wrong
    assert "rounding direction" in direction
    flushes = FpState.of(machine, flushing).wrong
    assert bool(flushes) == (machine == "aarch64")  # the others keep subnormals whatever is set
    assert all("FPCR.FZ " in text for text in flushes)


@pytest.mark.cross
@pytest.mark.parametrize("machine", OTHERS)
def test_an_environment_with_the_fields_cleared_restores_rounding_and_subnormals(
    machine: str, tmp_path: Path
) -> None:
    program = command(machine, tmp_path)
    for line in lines(program)[-3:]:
        env = bytes.fromhex(line)
        for field in LAYOUTS[machine]:
            env = field.put(env, 0)
        assert lines([*program, env.hex()]) == ["1 0"]


@pytest.mark.cross
def test_the_machine_code_of_cpucfg_reads_what_the_instruction_does(tmp_path: Path) -> None:
    """The program ends with status 3 where they differ; the emulator's LA464 has the caches of a 3A5000."""
    first = lines(command("loongarch64", tmp_path))[0]
    words = {int(number, 16): int(word, 16) for number, word in (pair.split(":") for pair in first.split())}
    facts = cpucfg_facts(words)
    stated = spec("3a5000")
    assert facts["vector_bits"] == stated.vector_bits
    assert facts["fma"] is True
    assert {k: facts.get(k) for k in ("l1_bytes", "l2_bytes", "l3_bytes", "cache_line")} == {
        k: getattr(stated, k) for k in ("l1_bytes", "l2_bytes", "l3_bytes", "cache_line")
    }
