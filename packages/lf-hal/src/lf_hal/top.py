"""How busy each CPU, NUMA node and accelerator is, from the kernel and from the vendors' own tools."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lf_hal._monitors import (
    Row,
    busy_between,
    parse_cnmon,
    parse_meminfo,
    parse_npu_smi,
    parse_nvidia_smi,
    parse_stat,
)
from lf_hal.affinity import nodes
from lf_hal.evidence import Evidence

__all__ = ["Monitor", "Row", "Snapshot", "table"]

_PATIENCE_S = 10.0  # nvidia-smi without persistence mode takes seconds
_QUERY = "index,name,utilization.gpu,memory.used,memory.total"
TOOLS: tuple[tuple[tuple[str, ...], Callable[[str], list[Row]]], ...] = (
    (("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"), parse_nvidia_smi),
    (("npu-smi", "info"), parse_npu_smi),
    (("cnmon",), parse_cnmon),
)


@dataclass(frozen=True)
class Snapshot:
    """Rows of one moment; seconds since the look before (0 at the first); notes on what could not be read."""

    seconds: float
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """The snapshot as JSON-able data, with memory in percent."""
        rows = [asdict(row) | {"memory_percent": row.memory} for row in self.rows]
        return {"version": 1, "seconds": self.seconds, "rows": rows, "notes": list(self.notes)}


class Monitor:
    """Looks at this host; each look tells what was done since the one before. A tool that is not installed is no row
    and no note, one that fails is a note."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._stat, self._time = self._read_stat(), time.monotonic()

    def look(self) -> Snapshot:
        """All rows: CPUs, NUMA nodes (the mean of their CPUs, and their memory), accelerators."""
        stat, now = self._read_stat(), time.monotonic()
        busy, seconds = busy_between(self._stat, stat), now - self._time
        self._stat, self._time = stat, now
        rows = [
            Row(f"cpu{cpu}", "", percent, None, None, "/proc/stat", Evidence.VERIFIED)
            for cpu, percent in sorted(busy.items())
        ]
        notes: list[str] = []
        rows += self._nodes(busy, notes)
        for command, parse in TOOLS:
            rows += _ask(command, parse, notes)
        return Snapshot(seconds, tuple(rows), tuple(notes))

    def _read_stat(self) -> dict[int, tuple[int, int]]:
        return parse_stat((self._root / "proc/stat").read_text())

    def _nodes(self, busy: dict[int, float | None], notes: list[str]) -> list[Row]:
        rows = []
        places = {n: self._root / f"sys/devices/system/node/node{n}/meminfo" for n in nodes(self._root)}
        members = nodes(self._root) or {0: frozenset(busy)}
        for number, cpus in sorted(members.items()):
            known = [percent for cpu in cpus if (percent := busy.get(cpu)) is not None]
            mean = sum(known) / len(known) if known else None
            path = places.get(number, self._root / "proc/meminfo")
            used: int | None = None
            total: int | None = None
            try:
                used, total = parse_meminfo(path.read_text())
            except (OSError, ValueError) as error:
                notes.append(f"memory of node {number} is unknown: {error}")
            rows.append(
                Row(f"node{number}", f"{len(cpus)} CPUs", mean, used, total, str(path), Evidence.VERIFIED)
            )
        return rows


def _ask(command: Sequence[str], parse: Callable[[str], list[Row]], notes: list[str]) -> list[Row]:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
        )
    except FileNotFoundError:
        return []
    except (OSError, subprocess.TimeoutExpired) as error:
        notes.append(f"{command[0]}: {error}")
        return []
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        notes.append(f"{command[0]}: exit {done.returncode}{', ' + said[0][:200] if said else ''}")
        return []
    try:
        return parse(done.stdout)
    except ValueError as error:
        notes.append(f"{command[0]} printed what lf-hal does not understand: {error}")
        return []


def table(snapshot: Snapshot, cpus: bool = True) -> str:
    """The snapshot as text; cpus: with a line for each CPU, not only for their nodes."""
    lines = [f"{'device':<9} {'busy':>6}  {'memory':<31} {'name':<22} source"]
    for row in snapshot.rows:
        if row.device.startswith("cpu") and not cpus:
            continue
        busy = "-" if row.busy is None else f"{row.busy:.0f} %"
        memory = "-"
        if row.memory is not None and row.used is not None and row.total is not None:
            memory = f"{_bar(row.memory)} {row.memory:3.0f} % of {row.total / 2**30:.1f} GiB"
        lines.append(f"{row.device:<9} {busy:>6}  {memory:<31} {row.name:<22} {row.source} [{row.evidence}]")
    return "\n".join([*lines, *(f"note: {note}" for note in snapshot.notes)])


def _bar(percent: float) -> str:
    full = round(percent / 10)
    return "#" * full + "." * (10 - full)
