"""What kernel and vendor tools print about utilisation, as rows. Pure parsers: a text in, rows out, ValueError else."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lf_hal.evidence import Evidence

__all__ = [
    "Row",
    "busy_between",
    "parse_cnmon",
    "parse_meminfo",
    "parse_npu_smi",
    "parse_nvidia_smi",
    "parse_stat",
]

_MIB = 1 << 20
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_BUS = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
_NPU_NAME = re.compile(r"(\d+)\s+(\S*[A-Za-z]\S*)")
_NPU_USE = re.compile(r"(\d+)((?:\s+\d+\s*/\s*\d+)+)")
_MLU_NAME = re.compile(r"(\d+)\s+\S+\s+(MLU\S+)\s+v\S+")


@dataclass(frozen=True)
class Row:
    """One device at one time: busy in percent, memory in bytes; None where its source does not say."""

    device: str
    name: str
    busy: float | None
    used: int | None
    total: int | None
    source: str
    evidence: Evidence

    @property
    def memory(self) -> float | None:
        """Memory in use, percent."""
        return None if not self.total or self.used is None else 100 * self.used / self.total


def parse_stat(text: str) -> dict[int, tuple[int, int]]:
    """(ticks at work, ticks in all) by CPU, from /proc/stat. Idle and waiting for I/O are not work; time of guests is
    in user time already, and time a hypervisor took (steal) is time in all."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"cpu(\d+)\s+(.+)", line)
        if match:
            ticks = [int(word) for word in match[2].split()[:8]]
            found[int(match[1])] = (sum(ticks) - ticks[3] - (ticks[4] if len(ticks) > 4 else 0), sum(ticks))
    return found


def busy_between(
    before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]
) -> dict[int, float | None]:
    """Percent of the time between two looks by CPU; None for one that came online meanwhile or had no tick yet."""
    found: dict[int, float | None] = {}
    for cpu, (work, total) in after.items():
        then = before.get(cpu)
        span = 0 if then is None else total - then[1]
        found[cpu] = (
            None if then is None or span <= 0 else min(100.0, max(0.0, 100 * (work - then[0]) / span))
        )
    return found


def parse_meminfo(text: str) -> tuple[int, int]:
    """(bytes in use, bytes in all) from a meminfo of the kernel, of the host or of a node. What can be had back is not
    in use: MemAvailable where the kernel has it (hosts), free and file pages otherwise (nodes)."""
    values = {m[1]: int(m[2]) << 10 for m in re.finditer(r"(\w+):\s+(\d+) kB", text)}
    if "MemTotal" not in values:
        raise ValueError("no MemTotal")
    free = values.get("MemAvailable")
    if free is None:
        free = values.get("MemFree", 0) + values.get("FilePages", 0) - values.get("Shmem", 0)
    return values["MemTotal"] - free, values["MemTotal"]


def parse_nvidia_smi(text: str) -> list[Row]:
    """Rows of `nvidia-smi --query-gpu=index,name,utilization.gpu,memory.used,memory.total` as csv,noheader,nounits;
    memory in MiB, "[N/A]" where a GPU does not say. ValueError for any other line."""
    rows = []
    for fields in csv.reader(text.strip().splitlines(), skipinitialspace=True):
        if len(fields) != 5 or not fields[0].isdecimal():
            raise ValueError(f"not a row of the query: {','.join(fields)!r}")
        index, name, *numbers = fields
        busy, used, total = (int(n) if n.strip().isdecimal() else None for n in numbers)
        used, total = (None if n is None else n * _MIB for n in (used, total))
        rows.append(Row(f"cuda:{index}", name, busy, used, total, "nvidia-smi", Evidence.NEEDS_GPU))
    return rows


def parse_npu_smi(text: str) -> list[Row]:
    """Rows of the table of `npu-smi info`: two lines for each chip, the second with AICore(%) and memory in MB. HBM is
    taken where the chip has it, its other memory where it has none."""
    rows: list[Row] = []
    name = ""
    for cells in _cells(text):
        if len(cells) != 3:
            continue
        named = _NPU_NAME.fullmatch(cells[0])
        if named:
            name = named[2]
        use = _NPU_USE.match(cells[2])
        if name and use and _BUS.fullmatch(cells[1]):
            used, total = map(int, re.findall(r"(\d+)\s*/\s*(\d+)", use[2])[-1])
            row = Row(f"npu:{len(rows)}", name, int(use[1]), used * _MIB, total * _MIB, "npu-smi", _CONTRACT)
            rows.append(row)
    if not rows:
        raise ValueError("no chip in the table")
    return rows


def parse_cnmon(text: str) -> list[Row]:
    """Rows of the table that `cnmon` prints: two lines for each card, with Util in the first, memory in the second."""
    rows: list[Row] = []
    card: tuple[str, str, int | None] | None = None
    for cells in _cells(text):
        if len(cells) != 3:
            continue
        named = _MLU_NAME.match(cells[0])
        memory = re.match(r"(\d+) MiB/\s*(\d+) MiB", cells[1])
        if named:
            use = re.match(r"(\d+)\s*%", cells[2])
            card = named[1], named[2], int(use[1]) if use else None
        elif card and memory:
            used, total = int(memory[1]) * _MIB, int(memory[2]) * _MIB
            rows.append(Row(f"mlu:{card[0]}", card[1], card[2], used, total, "cnmon", _CONTRACT))
            card = None
    if not rows:
        raise ValueError("no card in the table")
    return rows


_CONTRACT = Evidence.CONTRACT_ONLY


def _cells(text: str) -> list[list[str]]:
    """Cells of the lines of a table drawn with bars."""
    lines = (_ESCAPES.sub("", line).strip() for line in text.splitlines())
    return [
        [c.strip() for c in line[1:-1].split("|")]
        for line in lines
        if line.startswith("|") and line.endswith("|")
    ]
