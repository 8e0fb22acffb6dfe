"""Compiles a launch for sm_90 with the ptxas that Triton brings, and counts what came out."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import triton

from offline.launches import SHARED_BYTES, Launch, stand_in

_REGISTERS, _SHARED_TOTAL = 65536, 228 * 1024  # of a multiprocessor of sm_90
_WIDTHS = re.compile(r"\b(ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bfu](\d+)\b")
_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[.\w:]*\s+\[[^\]]*\], \[[^\]]*\], (?:0x)?([0-9a-f]+)")


@dataclass
class Compiled:
    """What ptxas says of one kernel, and what PTX shows.

    Attributes:
        registers: of a thread.
        spills: bytes of spill stores and loads.
        loop_spills: instructions of innermost loops that store or load spilled registers.
        shared: bytes of shared memory of a program.
        wgmma, mma: matrix instructions of Hopper, and of the cards before.
        serialized: ptxas says that wgmma instructions wait for each other.
        accesses: instructions on global memory by kind and bytes, such as ``{"ld 16": 4}``; ``cp`` copies to shared
            memory without registers.
        bulk: copies by the tensor memory accelerator.
        error: why it was not compiled.
    """

    kernel: str
    warps: int = 0
    registers: int = 0
    spills: int = 0
    loop_spills: int = 0
    shared: int = 0
    wgmma: int = 0
    mma: int = 0
    serialized: bool = False
    bulk: int = 0
    accesses: dict[str, int] = field(default_factory=dict)
    error: str = ""

    @property
    def fits(self) -> bool:
        """Whether a program of sm_90 can have that much shared memory."""
        return self.shared <= SHARED_BYTES

    @property
    def resident(self) -> int:
        """Programs that share a multiprocessor, as registers and shared memory allow."""
        registers = -(-self.registers // 8) * 8 * 32 * self.warps
        shared = self.shared + 1024  # of which each program costs the system 1 KiB
        return min(_REGISTERS // max(registers, 1), _SHARED_TOTAL // shared, 64 // max(self.warps, 1), 32)

    def wide(self, *kinds: str) -> float:
        """Share of the bytes of loads ("ld"), copies ("cp") and stores ("st") that move 16 at once in PTX."""
        sizes = [(int(name.split()[1]), n) for name, n in self.accesses.items() if name.split()[0] in kinds]
        whole = sum(size * n for size, n in sizes)
        return sum(size * n for size, n in sizes if size == 16) / whole if whole else 1.0

    def to_json(self) -> dict[str, Any]:
        """Fields and what follows from them."""
        derived = {"fits": self.fits, "resident": self.resident}
        return asdict(self) | derived | {"wide": self.wide("ld", "cp", "st")}


def accesses(ptx: str) -> Counter[str]:
    """Instructions on global memory by kind and bytes of a thread: ``{"ld 16": 4, "st 2": 1}``."""
    found: Counter[str] = Counter()
    for kind, count, bits in _WIDTHS.findall(ptx):
        found[f"{kind} {int(count or 1) * int(bits) // 8}"] += 1
    for size in _ASYNC.findall(ptx):
        found[f"cp {int(size, 16)}"] += 1
    return found


def loop_spills(sass: str) -> int:
    """Accesses of local memory in innermost loops: what a jump back to an earlier address goes over."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]+);", sass)]
    jumps = [(int(m[1], 16), at) for at, text in lines if (m := re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text))]
    loops = {(begin, end) for begin, end in jumps if begin < end}
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    local = [at for at, text in lines if re.search(r"\b(LDL|STL)\b", text)]
    return sum(begin <= at <= end for begin, end in inner for at in local)


def disassembled(cubin: bytes) -> str:
    """SASS, by the cuobjdump that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read(kernel: str, warps: int, shared: int, ptx: str, log: str) -> Compiled:
    """Numbers from PTX and the log of ``ptxas -v``."""
    spilled = re.findall(r"(\d+) bytes spill", log)
    used = re.findall(r"Used (\d+) registers", log)
    return Compiled(
        kernel,
        warps,
        registers=int(used[-1]),
        spills=sum(map(int, spilled)),
        shared=shared,
        wgmma=ptx.count("wgmma.mma_async"),
        mma=len(re.findall(r"\bmma\.sync", ptx)),
        serialized="serialized" in log,
        bulk=ptx.count("cp.async.bulk.tensor"),
        accesses=dict(sorted(accesses(ptx).items())),
    )


def compile_launch(launch: Launch) -> Compiled:
    """Compiles a launch anew; a kernel that cannot be compiled is a result too."""
    log = io.StringIO()
    knobs = triton.knobs
    try:
        with (
            stand_in(),
            mock.patch.object(knobs.compilation, "always_compile", True),  # the cache keeps no log
            mock.patch.object(knobs.nvidia, "dump_ptxas_log", True),
            contextlib.redirect_stdout(log),
        ):
            made = launch.function().preload(launch.data)
    except Exception as e:
        return Compiled(launch.kernel, launch.warps, error=f"{type(e).__name__}: {str(e).strip()[:500]}")
    found = read(launch.kernel, launch.warps, int(made.metadata.shared), str(made.asm["ptx"]), log.getvalue())
    if found.spills:
        found.loop_spills = loop_spills(disassembled(made.asm["cubin"]))
    return found
