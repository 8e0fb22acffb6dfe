#!/usr/bin/env python3
"""Orders of ranks on the acceptance hosts beside the order ranks have, random ones and two of networkx.

    bench_topo.py --json OUT.json

Milliseconds of an all-reduce (--mb) are predicted by lf-comm's own model for every row: no network is used, and what
they say is as good as the model. Seconds to find the order are measured, the median of --repeat runs. networkx gets the
distances between all pairs, up to --pairs ranks; finding those is part of its time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import networkx as nx
from topo_hosts import a100, cluster, hccl, two_hosts, two_sockets

from lf_comm.topo import Routes, Topology, best_order, parse_hccl, parse_nvidia_smi, simulate

CASES: dict[str, Callable[[], Topology]] = {
    "8 A100, NVSwitch": lambda: Topology.of([parse_nvidia_smi(a100())]),
    "PCIe, 4 + 4, ranks by socket": lambda: Topology.of([parse_nvidia_smi(two_sockets([0] * 4 + [1] * 4))]),
    "PCIe, 4 + 4, ranks in turns": lambda: Topology.of([parse_nvidia_smi(two_sockets([0, 1] * 4))]),
    "12 GPUs, PCIe, in turns": lambda: Topology.of([parse_nvidia_smi(two_sockets([0, 1] * 6))]),
    "32 GPUs, PCIe, in turns": lambda: Topology.of([parse_nvidia_smi(two_sockets([0, 1] * 16))]),
    "7 + 8 A100, in turns": two_hosts,
    "4 Ascend": lambda: parse_hccl(hccl([4])),
    "32 Ascend, 4 servers": lambda: parse_hccl(hccl([8] * 4), mesh=4),
    "512 A100, in turns": lambda: cluster(64, round_robin=True),
    "4096 A100, host after host": lambda: cluster(512, round_robin=False),
    "4096 A100, in turns": lambda: cluster(512, round_robin=True),
}


def timed(work: Callable[[], Any], repeat: int) -> tuple[Any, float]:
    """The result and the median of seconds."""
    found, seconds = None, []
    for _ in range(repeat):
        began = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - began)
    return found, statistics.median(seconds)


def by_networkx(topology: Topology, solve: Callable[[nx.Graph], Sequence[int]]) -> list[int]:
    """A cycle from the summed seconds of every pair's links for 1 MiB."""
    routes, graph = Routes(topology), nx.Graph()
    for a in range(topology.size):
        for b in range(a):
            keys, latency = routes.between(a, b)
            graph.add_edge(a, b, weight=latency + sum((1 << 20) / routes.rate(key) for key in keys))
    return list(solve(graph))[:-1]


def row(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All orders of one case."""
    topology, nbytes = CASES[name](), options.mb << 20
    routes = Routes(topology)

    def ms(order: Sequence[int]) -> float:
        return simulate(topology, order, nbytes, routes).seconds * 1e3

    ours, seconds = timed(lambda: best_order(CASES[name](), nbytes), options.repeat)
    shuffled = []
    for seed in range(options.seeds):
        order = list(range(topology.size))
        random.Random(seed).shuffle(order)
        shuffled.append(ms(order))
    found = {
        "case": name,
        "ranks": topology.size,
        "identity_ms": ms(range(topology.size)),
        "random_ms": statistics.mean(shuffled),
        "ours_ms": ours.after.seconds * 1e3,
        "ours_s": seconds,
        "method": ours.method,
        "proven": ours.proven,
    }
    for peer, solve in {
        "greedy": nx.approximation.greedy_tsp,
        "christofides": nx.approximation.christofides,
    }.items():
        if 4 <= topology.size <= options.pairs:
            order, seconds = timed(lambda solve=solve: by_networkx(topology, solve), 1)
            found |= {f"{peer}_ms": ms(order), f"{peer}_s": seconds}
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [
        "| hosts | identity ms | random ms | networkx greedy ms (s) | christofides ms (s) "
        "| lf-comm ms | gain | found in s | method |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        peers = [
            f"{each[f'{peer}_ms']:.3g} ({each[f'{peer}_s']:.2g})" if f"{peer}_ms" in each else "-"
            for peer in ("greedy", "christofides")
        ]
        sure = ", proven" if each["proven"] else ""
        lines.append(
            f"| {each['case']} | {each['identity_ms']:.3g} | {each['random_ms']:.3g} | {peers[0]} | {peers[1]} "
            f"| {each['ours_ms']:.3g} | {each['identity_ms'] / each['ours_ms']:.2f}x | {each['ours_s']:.3f} "
            f"| {each['method']}{sure} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=64)
    options = parser.parse_args()
    rows = [row(name, options) for name in CASES]
    worse = [each["case"] for each in rows if each["ours_ms"] > each["identity_ms"] * (1 + 1e-9)]
    late = [each["case"] for each in rows if each["ranks"] == 4096 and each["ours_s"] >= 1.0]
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }
    report = {
        "version": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "mb": options.mb,
        "machine": machine,
        "rows": rows,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(rows))
    print(
        f"worse than the order of ranks: {worse or 'none'}; 4096 devices in a second or more: {late or 'none'}"
    )
    return 1 if worse or late else 0


if __name__ == "__main__":
    raise SystemExit(main())
