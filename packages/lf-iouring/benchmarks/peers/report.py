"""What the peer benchmarks print and store."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.rounds import Peer, Row


@dataclass(frozen=True)
class Bar:
    """A wanted ratio of ours to the fastest of some rows; no `wanted`: only reported.

    `median` decides; the ratio of the best passes and that of the rates a core (each to the highest of the others)
    show what other work on the machine changes.
    """

    name: str
    wanted: float | None
    median: float
    best: float
    core: float
    note: str

    @property
    def met(self) -> bool | None:
        return None if self.wanted is None else self.median >= self.wanted


def ratio_bar(name: str, wanted: float | None, ours: Row, peers: Iterable[Row]) -> Bar | None:
    """`ours` over the fastest of `peers`; None where none of them ran."""
    ran = [row for row in peers if row.wall]
    if not ran or not ours.wall:
        return None
    fastest = max(ran, key=lambda row: row.median)
    best = ours.best / max(row.best for row in ran)
    core = ours.core / max(row.core for row in ran)
    return Bar(name, wanted, ours.median / fastest.median, best, core, fastest.name)


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.split(":")[1].strip() for line in lines if "model name" in line), "?"),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def heading(info: dict[str, Any], peers: Sequence[Peer], job: str) -> str:
    """Machine, versions and job in one line."""
    versions = {name: number for peer in peers for name, number in peer.versions.items()}
    return (
        f"{info['cores']} x {info['cpu']}, Linux {info['kernel']}, load {info['load']:.1f}, Python "
        f"{info['python']}; {', '.join(f'{n} {v}' for n, v in versions.items())}; {info['date']}; {job}"
    )


def table(rows: Sequence[Row], anchor: Row, unit: str, scale: float) -> str:
    """One Markdown table; rates in `scale` items, ratios to the anchor's median."""
    lines = [
        f"| | case | {unit}/s, median | lowest - highest | a core, median | of the anchor |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.error is not None or not row.wall:
            lines.append(f"| {row.group} | {row.peer}: {row.name} | failed: {row.error} | | | |")
            continue
        spread = f"{min(row.wall) / scale:.1f} - {max(row.wall) / scale:.1f}"
        ratio = f"{row.median / anchor.median:.3f}x" if anchor.median else ""
        core = f"{row.core / scale:.1f}"
        lines.append(f"| {row.group} | {row.name} | {row.median / scale:.1f} | {spread} | {core} | {ratio} |")
    return "\n".join(lines)


def bar_table(bars: Sequence[Bar]) -> str:
    lines = [
        "| bar | wanted | found, medians | best passes | a core | met | fastest of them |",
        "|---|---|---|---|---|---|---|",
    ]
    for bar in bars:
        met = {None: "", True: "yes", False: "no"}[bar.met]
        wanted = "" if bar.wanted is None else f"{bar.wanted:g}"
        ratios = " | ".join(f"{ratio:.2f}" for ratio in (bar.median, bar.best, bar.core))
        lines.append(f"| {bar.name} | {wanted} | {ratios} | {met} | {bar.note} |")
    return "\n".join(lines)


def report(info: dict[str, Any], job: dict[str, Any], peers: Sequence[Peer], rows: Sequence[Row],
           bars: Sequence[Bar]) -> dict[str, Any]:  # fmt: skip
    """The JSON report: every rate of every round."""
    return {
        "machine": info,
        "job": job,
        "versions": {peer.name: peer.versions for peer in peers},
        "rows": [asdict(row) | {"median": row.median, "core": row.core} for row in rows],
        "bars": [asdict(bar) | {"met": bar.met} for bar in bars],
    }
