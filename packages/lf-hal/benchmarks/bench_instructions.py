#!/usr/bin/env python3
"""How many instructions each target executes for the same kernel call, counted under qemu-user. Not speed.

    bench_instructions.py --json OUT.json [--targets NAME ...] [--only WORD ...]

The driver of the tests, a static program without a C library, runs once with the calls of a kernel and once without
them, packing and all else alike; qemu translates one instruction at a time and logs each, and the difference of the
two logs is the row. Results are compared with ORDER.md in the same run. How many cycles an instruction takes, and what
a cache does, no emulator knows: LASX may execute a quarter of the instructions and not be four times as fast.
Needs zig and qemu-user 8.2 or newer. AVX-512 is left out: qemu does not emulate it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

import kernel_cases as cases
from kernel_runs import FUNCTIONS, UNARY, Program, build_driver

from lf_hal.build import emulator_command, find_compiler
from lf_hal.errors import HalError
from lf_hal.targets import TARGETS, Target

LABEL = "emulated instruction counts, not speed"
EMULATED = [name for name, target in TARGETS.items() if target.emulator]
# one log line for every translated block that runs; blocks of one instruction; none chained to the next unlogged
LOG = ("-one-insn-per-tb", "-d", "nochain,exec", "-D", "/dev/stderr")


@dataclass(frozen=True)
class Case:
    """One kernel: how its call is made, which function of the driver it is, and how many units of work it does."""

    build: Callable[[Program], object]
    function: str
    units: int
    unit: str = "multiply-add"


def gelu(p: Program) -> None:
    x = cases.values("random", 2048, seed=70)
    p.call("unary", UNARY.index("gelu_tanh"), p.out("y", x.shape), p.put(x), 0, x.size)
    p.expected["y"] = cases.order.UNARY["gelu_tanh"](x)


CASES = {
    "linear 24x48x256": Case(lambda p: cases.gemm(p, "y", 24, 48, 256, "random"), "gemm", 24 * 48 * 256),
    "linear 1x64x256 (decode)": Case(lambda p: cases.gemm(p, "y", 1, 64, 256, "random"), "gemm", 64 * 256),
    "conv 3x3 32-32 of 6x6, affine, relu": Case(
        lambda p: cases.conv(p, "y", (1, 6, 6, 32), 32, (3, 3), pad=(1, 1), act=1, parts="scale"),
        "conv2d",
        36 * 32 * 32 * 9,
    ),
    "attention 2 heads, 24x24, width 32, causal": Case(
        lambda p: cases.attention(p, "y", (1, 2, 2, 24, 24, 32, 32), causal=True),
        "attention",
        2 * 2 * 24 * 25 // 2 * 32,
    ),
    "softmax 5x1000": Case(lambda p: cases.rows(p, 1000, "random"), "softmax", 5000, "element"),
    "rms_norm 10x1000": Case(lambda p: cases.rows(p, 1000, "random"), "rms_norm", 10000, "element"),
    "gelu_tanh 2048": Case(gelu, "unary", 2048, "element"),
}


@dataclass(frozen=True)
class Row:
    """Instructions of one kernel on one target; ``scalar_ratio`` is loongarch64-scalar's count over this one."""

    case: str
    target: str
    compiler: str
    instructions: int
    unit: str
    per_unit: float
    scalar_ratio: float | None = None


def executed(command: Sequence[str], emulator: Sequence[str], image: bytes = b"") -> int:
    """Instructions that a program executes from its first to its last, in user mode under ``emulator``."""
    process = subprocess.Popen(
        [*emulator, *LOG, *command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stderr is not None
    stdin = process.stdin

    def feed() -> None:
        stdin.write(image)
        stdin.close()

    feeder = Thread(target=feed)
    feeder.start()
    count = sum(line.startswith(b"Trace ") for line in process.stderr)
    feeder.join()
    if process.wait() != 0:
        raise RuntimeError(f"{command} ended with status {process.returncode} under {emulator[0]}")
    return count


def instructions_of(case: Case, target: Target, driver: Path) -> int:
    """Instructions of the kernel's calls alone. Raises RuntimeError if a bit of its results is wrong."""
    program = Program()
    case.build(program)
    number = FUNCTIONS.index(case.function)
    packing = [FUNCTIONS.index(name) for name in ("pack_b", "pack_conv")]
    before = [c for c in program.calls if c[0] in packing]
    program.calls = [*before, *(c for c in program.calls if c[0] == number)]
    emulator = emulator_command(target)
    found = {k: v for k, v in program.run([*emulator, str(driver)]).items() if (v != cases.f32(1e30)).all()}
    wrong = cases.differences({k: program.expected[k] for k in found}, found)
    if wrong or not found:
        raise RuntimeError(
            f"{case.function} on {target.name}: bits differ from ORDER.md: {wrong or 'no result'}"
        )
    whole = executed([str(driver)], emulator, program.image())
    program.calls = before
    return whole - executed([str(driver)], emulator, program.image())


def measure(names: Sequence[str], only: Sequence[str]) -> list[Row]:
    """Rows of every case on every target, in that order."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        drivers = {name: build_driver(TARGETS[name], Path(folder)) for name in names}
        for label, case in CASES.items():
            if only and not any(word in label for word in only):
                continue
            counts = {name: instructions_of(case, TARGETS[name], drivers[name]) for name in names}
            scalar = counts.get("loongarch64-scalar")
            for name, count in counts.items():
                ratio = (
                    round(scalar / count, 3) if scalar and TARGETS[name].machine == "loongarch64" else None
                )
                version = find_compiler(TARGETS[name]).version
                rows.append(Row(label, name, version, count, case.unit, round(count / case.units, 4), ratio))
                print(f"{label:44} {name:20} {count:9} {rows[-1].per_unit:9.3f} {ratio or ''}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--targets", nargs="*", default=EMULATED, choices=EMULATED, metavar="NAME")
    parser.add_argument("--only", nargs="*", default=[], help="cases with one of these words")
    args = parser.parse_args()
    try:
        rows = measure(args.targets, args.only)
    except HalError as error:
        sys.exit(f"SKIPPED: {error}")
    qemu = subprocess.run(["qemu-loongarch64", "--version"], capture_output=True, text=True, check=True)
    report = {
        "what": LABEL,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "qemu": qemu.stdout.splitlines()[0],
        "command": " ".join(["bench_instructions.py", *sys.argv[1:]]),
        "rows": [asdict(row) for row in rows],
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
