"""The machines that models are compiled for: compiler flags, emulators, and what may stand in their code.

A target names an instruction set, never a chip. Results are the same bits on all of them (ORDER.md), so the
choice is one of speed alone. ``native`` is no entry of the table: it is the best entry this machine can run.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lf_hal.errors import UnknownSwitchError, UnknownTargetError, WrongTargetError
from lf_hal.evidence import Evidence

__all__ = ["SWITCHES", "TARGETS", "Switch", "Target", "check_switches", "missing_features", "resolve_target"]


@dataclass(frozen=True)
class Target:
    """One instruction set.

    ``flags`` go to gcc and clang alike when kernels and graphs are compiled; ``zig_only`` are flags that only
    clang needs, ``zig_link`` flags of the C library of programs, the same for all targets of a machine.
    ``features`` are the words of /proc/cpuinfo that a machine of this architecture must show.
    ``expected`` and ``forbidden`` are regular expressions over the mnemonics of a disassembly.
    """

    name: str
    machine: str
    zig_triple: str
    flags: tuple[str, ...] = ()
    zig_only: tuple[str, ...] = ()
    zig_link: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    emulator: tuple[str, ...] = ()
    expected: str | None = None
    forbidden: str | None = None
    evidence: Evidence = Evidence.EMULATED


# Never contract, never -ffast-math: the bits are the contract (ORDER.md). -fno-math-errno only drops the errno
# of sqrt, so that it becomes one instruction.
COMMON_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fPIC",
    "-Wall",
)

_X86_FEATURES_AVX2 = ("avx2", "fma", "f16c")
_X86_FEATURES_AVX512 = (*_X86_FEATURES_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_WITHOUT_LSX = (
    "-mno-lsx",
)  # zig's baseline of LoongArch has it, and its musl would use it in a scalar program too
_LOONGARCH_QEMU = ("qemu-loongarch64", "-cpu", "la464")

_ALL = (
    Target(
        name="x86-64-sse2",
        machine="x86_64",
        zig_triple="x86_64-linux-musl",
        flags=("-march=x86-64", "-mtune=generic"),
        zig_only=(),
        emulator=("qemu-x86_64",),
        forbidden=r"\bv(?:f?n?m(?:add|sub)|mul|add)\w*|%[yz]mm",
        evidence=Evidence.VERIFIED,
    ),
    Target(
        name="x86-64-avx2",
        machine="x86_64",
        zig_triple="x86_64-linux-musl",
        flags=("-march=x86-64-v3", "-mtune=generic"),
        features=_X86_FEATURES_AVX2,
        emulator=("qemu-x86_64", "-cpu", "max"),
        expected=r"\bvfn?madd\w*ps\b.*%ymm",
        forbidden=r"%zmm",
        evidence=Evidence.VERIFIED,
    ),
    Target(
        name="x86-64-avx512",
        machine="x86_64",
        zig_triple="x86_64-linux-musl",
        flags=("-march=x86-64-v4", "-mtune=generic", "-mprefer-vector-width=512"),
        features=_X86_FEATURES_AVX512,
        expected=r"\bvfn?madd\w*ps\b.*%zmm",
        evidence=Evidence.CONTRACT_ONLY,  # compiled; tests run it where the processor has it, and none had so far
    ),
    Target(
        name="aarch64-neon",
        machine="aarch64",
        zig_triple="aarch64-linux-musl",
        emulator=("qemu-aarch64",),
        expected=r"\bfmla\b",
    ),
    Target(
        name="riscv64",
        machine="riscv64",
        zig_triple="riscv64-linux-musl",
        emulator=("qemu-riscv64",),
        expected=r"\bfmadd\.s\b",
    ),
    Target(
        name="loongarch64-scalar",
        machine="loongarch64",
        zig_triple="loongarch64-linux-musl",
        zig_link=_WITHOUT_LSX,
        zig_only=_WITHOUT_LSX,
        emulator=_LOONGARCH_QEMU,
        expected=r"\bfmadd\.s\b",
        forbidden=r"\b(?:x?vf|x?vld|x?vst)\w*",
    ),
    Target(
        name="loongarch64-lsx",
        machine="loongarch64",
        zig_triple="loongarch64-linux-musl",
        zig_link=_WITHOUT_LSX,
        flags=("-mlsx",),
        features=("lsx",),
        emulator=_LOONGARCH_QEMU,
        expected=r"\bvfmadd\.s\b",
        forbidden=r"\bxvf\w*",
    ),
    Target(
        name="loongarch64-lasx",
        machine="loongarch64",
        zig_triple="loongarch64-linux-musl",
        zig_link=_WITHOUT_LSX,
        flags=("-mlasx",),
        features=("lasx",),
        emulator=_LOONGARCH_QEMU,
        expected=r"\bxvfmadd\.s\b",
    ),
)

TARGETS: dict[str, Target] = {t.name: t for t in _ALL}


@dataclass(frozen=True)
class Switch:
    """A compiler switch by its command-line name; ``machines`` empty means that it is for all."""

    name: str
    meaning: str
    machines: tuple[str, ...] = ()


SWITCHES: dict[str, Switch] = {
    s.name: s
    for s in (
        Switch(
            "enable-vma-fusion", "fuse a multiply and an add into one operation over memory (on by default)"
        ),
        Switch("disable-vma", "keep a multiply and an add apart"),
        Switch(
            "enable-loongarch-optimization",
            "take the widest vectors for --target loongarch64: of this machine if it is one, else LASX",
            ("loongarch64",),
        ),
    )
}


_ANY_LOONGARCH = "loongarch64"
_WITHOUT_VECTORS = "loongarch64-scalar"


def check_switches(target: Target, switches: Iterable[str]) -> frozenset[str]:
    """The switches, without leading dashes; refuses unknown ones, and those of other machines than the target."""
    names = frozenset(s.removeprefix("--") for s in switches)
    for name in sorted(names):
        if name not in SWITCHES:
            raise UnknownSwitchError(name, sorted(SWITCHES))
        machines = SWITCHES[name].machines
        if machines and (target.machine not in machines or target.name == _WITHOUT_VECTORS):
            able = [t.name for t in TARGETS.values() if t.machine in machines and t.name != _WITHOUT_VECTORS]
            raise WrongTargetError(name, target.name, [_ANY_LOONGARCH, *able])
    return names


@cache
def _cpu_features() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    words: set[str] = set()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            words.update(value.split())
    return frozenset(words)


def missing_features(target: Target) -> tuple[str, ...]:
    """What this machine lacks to run ``target`` itself; empty if it can."""
    if platform.machine() != target.machine:
        return (f"a {target.machine} processor",)
    present = _cpu_features()
    return tuple(f for f in target.features if f not in present)


def resolve_target(name: str, switches: Iterable[str] = ()) -> Target:
    """The target of that name; ``native`` is the last entry of the table that this machine can run.

    ``loongarch64`` runs on every processor of that machine: it is ``loongarch64-scalar``. With the switch
    ``enable-loongarch-optimization`` it is the widest entry that this machine can run, if it is a LoongArch, and
    ``loongarch64-lasx`` elsewhere, which a 3A5000, 3A6000 or later has; a program says so where it meets less.

    Raises :class:`UnknownTargetError` for other names, and for ``native`` on a machine that has no entry.
    """
    if name == _ANY_LOONGARCH:
        if "enable-loongarch-optimization" not in {s.removeprefix("--") for s in switches}:
            return TARGETS[_WITHOUT_VECTORS]
        entries = [t for t in TARGETS.values() if t.machine == "loongarch64" and t.name != _WITHOUT_VECTORS]
        able = [t for t in entries if not missing_features(t)]
        if platform.machine() == "loongarch64" and not able:
            raise WrongTargetError(
                "enable-loongarch-optimization", "a processor without LSX", [_ANY_LOONGARCH]
            )
        return (able or entries)[-1]
    if name == "native":
        able = [t for t in TARGETS.values() if not missing_features(t)]
        if able:
            return able[-1]
        raise UnknownTargetError(f"native ({platform.machine()})", sorted(TARGETS))
    if name not in TARGETS:
        raise UnknownTargetError(name, sorted(TARGETS))
    return TARGETS[name]
