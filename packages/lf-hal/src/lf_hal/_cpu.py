"""What the kernel and the CPU say of the CPU: /proc/cpuinfo, getauxval, cpucfg, /sys. Pure parsers, one reader."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["caches_of", "cpucfg_facts", "features_of", "read_cpu", "vector_facts"]

_HWCAP, _HWCAP2 = 16, 26  # AT_HWCAP, AT_HWCAP2 of <elf.h>
# bit -> name, as in the kernel's uapi <asm/hwcap.h>; x86 has its feature bits in cpuinfo only
_HWCAP_BITS = {
    "loongarch64": {0: "cpucfg", 1: "lam", 2: "ual", 3: "fpu", 4: "lsx", 5: "lasx"},
    "aarch64": {0: "fp", 1: "asimd", 9: "fphp", 10: "asimdhp", 20: "asimddp", 22: "sve"},
    "riscv64": {ord(c) - ord("a"): c for c in "acdfimv"},
}
_PR_SVE_GET_VL, _SVE_VL_MASK = 51, 0xFFFF  # <linux/prctl.h>
_CPUCFG = bytes.fromhex("846c0000" + "2000004c")  # cpucfg a0, a0; jr ra


def features_of(machine: str, cpuinfo: str, hwcap: int) -> frozenset[str]:
    """Features of the first CPU in /proc/cpuinfo (flags, Features or isa), and those the kernel's hwcap bits name."""
    found: set[str] = set()
    line = re.search(r"^(?:flags|features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE | re.IGNORECASE)
    if line:
        found |= set(line[1].split())
    isa = re.search(r"^isa\s*:\s*(rv64\S*)", cpuinfo, re.MULTILINE)
    if isa:
        single, *multi = isa[1].lower().removeprefix("rv64").split("_")
        found |= {*single, *multi}
    bits = _HWCAP_BITS.get(machine, {})
    return frozenset(found | {name for bit, name in bits.items() if hwcap >> bit & 1})


def vector_facts(machine: str, features: frozenset[str], sve_bits: int | None = None) -> dict[str, Any]:
    """vector_bits, fma and dtypes that these features mean; sve_bits: length of an SVE vector, when known."""
    facts: dict[str, Any] = {}
    types = ["i8", "i32", "i64", "f32", "f64"]
    if machine in ("x86_64", "amd64"):
        widths = {"avx512f": 512, "avx2": 256, "avx": 256, "sse2": 128}
        facts["fma"] = bool(features & {"fma", "fma4", "avx512f"})
        types += ["f16"] if "avx512_fp16" in features else []
        types += ["bf16"] if features & {"avx512_bf16", "amx_bf16", "avx_bf16"} else []
    elif machine == "aarch64":
        widths = {"asimd": 128}
        facts["fma"] = "asimd" in features
        types += ["f16"] if "asimdhp" in features else []
        types += ["bf16"] if "bf16" in features else []
        if sve_bits:
            facts["vector_bits"] = sve_bits
    elif machine == "loongarch64":
        widths = {"lasx": 256, "lsx": 128}
        facts["fma"] = "fpu" in features
    elif machine == "riscv64":
        widths = {}  # the V extension leaves the length to the chip
        facts["fma"] = bool(features & {"f", "d"})
    else:
        return {}
    width = next((bits for name, bits in widths.items() if name in features), None)
    if width is not None:
        facts.setdefault("vector_bits", width)
    return facts | {"dtypes": tuple(types)}


def cpucfg_facts(words: Mapping[int, int]) -> dict[str, Any]:
    """Facts in LoongArch CPUCFG words 0x2 (float, LSX, LASX) and 0x10 to 0x14 (caches), as volume 1 of the manual
    lays them out: present bits, then ways - 1, log2 of sets and log2 of the line in bytes."""
    facts: dict[str, Any] = {}
    if 2 in words:
        facts["fma"] = bool(words[2] & 1)
        if words[2] >> 6 & 3:
            facts["vector_bits"] = 256 if words[2] >> 7 & 1 else 128
    present = words.get(0x10, 0)
    for name, bit, number in (("l1_bytes", 2, 0x12), ("l2_bytes", 3, 0x13), ("l3_bytes", 10, 0x14)):
        word = words.get(number, 0)
        if present >> bit & 1 and word:
            line = 1 << (word >> 24 & 0x7F)
            facts[name] = ((word & 0xFFFF) + 1) * (1 << (word >> 16 & 0xFF)) * line
            facts.setdefault("cache_line", line)
    return facts


def caches_of(root: Path) -> dict[str, int]:
    """l1_bytes (data), l2_bytes, l3_bytes and cache_line of CPU 0 from /sys/devices/system/cpu/cpu0/cache."""
    facts: dict[str, int] = {}
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level, size, line = (_read(index / f) for f in ("type", "level", "size", "coherency_line_size"))
        found = re.fullmatch(r"(\d+)([KM]?)", size)
        if kind == "Instruction" or not found or level not in ("1", "2", "3"):
            continue
        facts[f"l{level}_bytes"] = int(found[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[found[2]]
        if line.isdecimal():
            facts.setdefault("cache_line", int(line))
    return facts


def read_cpu(
    root: Path = Path("/"), machine: str | None = None
) -> tuple[str, dict[str, Any], dict[str, str]]:
    """(name of the model, facts, source of each fact) of the CPU below `root`; the real CPU is asked for "/" only."""
    own = machine is None and root == Path("/")
    machine = machine or platform.machine().lower()
    text = _read(root / "proc/cpuinfo")
    facts, sources = dict[str, Any](), dict[str, str]()

    def take(found: Mapping[str, Any], source: str) -> None:
        for key, value in found.items():
            if key not in facts:
                facts[key], sources[key] = value, source

    take(caches_of(root), "/sys/devices/system/cpu/cpu0/cache")
    hwcap = _auxval(_HWCAP) if own else 0
    sve = _sve_bits() if own and machine == "aarch64" else None
    if own and machine == "loongarch64":
        take(cpucfg_facts(_cpucfg_words()), "cpucfg")
    take(vector_facts(machine, features_of(machine, text, hwcap), sve), "/proc/cpuinfo and getauxval")
    online = os.cpu_count() if own else len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    take({"core_type": machine, "cores": online}, "uname" if own else "/proc/cpuinfo")
    model = re.search(r"^(?:model name|cpu model|uarch)\s*:\s*(.+)$", text, re.MULTILINE | re.IGNORECASE)
    return model[1].strip() if model else machine, facts, sources


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _auxval(kind: int) -> int:
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):
        return 0
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(getauxval(kind))


def _sve_bits() -> int | None:
    length = int(ctypes.CDLL(None).prctl(_PR_SVE_GET_VL, 0, 0, 0, 0))
    return None if length < 0 else (length & _SVE_VL_MASK) * 8


def _cpucfg_words() -> dict[int, int]:
    """LoongArch only: the instruction may be run by any program, and no file of the kernel has all of it."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_CPUCFG)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    cpucfg = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint64)(address)
    return {number: cpucfg(number) for number in (0x2, 0x10, 0x11, 0x12, 0x13, 0x14)}
