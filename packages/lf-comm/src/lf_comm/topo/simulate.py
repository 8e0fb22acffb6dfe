"""What a ring all-reduce takes in an order of ranks: alpha-beta, with links shared by all that cross them.

In each of its 2 (p - 1) steps every rank sends a p-th of the bytes to the next. A link shares its rate fairly among
what crosses it in one direction, so the step ends when the link of which load / rate is largest has sent all: of
max-min-fair rates that link's are the lowest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lf_comm.topo.graph import NET, Topology

Key: TypeAlias = tuple[int | str, str, str]  # host or "fabric", from, to
SWITCH_LATENCY = 1e-6


@dataclass(frozen=True)
class Simulation:
    """Of one order. seconds: whole all-reduce; step_s: one step; latency_s: of it, what no bytes take; bus_rate: bytes
    sent by each rank over seconds; bottleneck: the link that ends last, flows: how many share it; crossings: links
    crossed by all edges of the ring, by kind."""

    seconds: float
    step_s: float
    latency_s: float
    bus_rate: float
    bottleneck: str
    flows: int
    crossings: dict[str, int]


class Routes:
    """Links between ranks, with their rates."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._uplinks: dict[str, float] = {}
        for host, above in enumerate(topology.groups):
            for level in range(len(above)):
                rate = topology.nodes[host].net_rate / topology.oversubscription
                key = "/".join(above[: level + 1])
                self._uplinks[key] = self._uplinks.get(key, 0.0) + rate
        self._kept: dict[tuple[int, int, int], tuple[tuple[Key, ...], float]] = {}

    def between(self, a: int, b: int) -> tuple[list[Key], float]:
        """The links from one rank to another, and their latencies' sum."""
        (ha, la), (hb, lb) = self.topology.ranks[a], self.topology.ranks[b]
        if ha == hb:
            keys, latency = self._inside(ha, la, lb)
            return list(keys), latency
        out, first = self._inside(ha, la, -1)
        into, last = self._inside(hb, -1, lb)
        up = self._fabric(ha, hb)
        return [*out, *up, *into], first + last + SWITCH_LATENCY * (1 + len(up))

    def rate(self, key: Key) -> float:
        """Bytes per second of a link."""
        where, a, b = key
        if isinstance(where, str):
            return self._uplinks[b]
        return self.topology.nodes[where].wires[a, b].rate

    def kind(self, key: Key) -> str:
        """Of a link; "UP" for a switch's uplinks."""
        where, a, b = key
        return "UP" if isinstance(where, str) else self.topology.nodes[where].wires[a, b].kind

    def name(self, key: Key) -> str:
        """For people."""
        where, a, b = key
        if isinstance(where, str):
            return f"{a}link of switch {b}"
        return f"{self.kind(key)} {a} to {b} of {self.topology.hosts[where]}"

    def _inside(self, host: int, a: int, b: int) -> tuple[tuple[Key, ...], float]:
        """Of a device (-1: the network) to another in one host."""
        if (host, a, b) not in self._kept:
            each = self.topology.nodes[host]
            start, end = (NET if local < 0 else each.devices[local].name for local in (a, b))
            hops = each.routes(start)[end]
            latency = sum(each.wires[hop].latency for hop in hops)
            self._kept[host, a, b] = tuple((host, *hop) for hop in hops), latency
        return self._kept[host, a, b]

    def _fabric(self, ha: int, hb: int) -> list[Key]:
        if not self.topology.groups:
            return []
        above, beyond = self.topology.groups[ha], self.topology.groups[hb]
        same = next((i for i, (x, y) in enumerate(zip(above, beyond, strict=True)) if x != y), len(above))
        levels = range(same, len(above))
        up: list[Key] = [("fabric", "up", "/".join(above[: level + 1])) for level in levels]
        return up + [("fabric", "down", "/".join(beyond[: level + 1])) for level in levels]


def simulate(
    topology: Topology, order: Sequence[int], nbytes: int, routes: Routes | None = None
) -> Simulation:
    """A ring all-reduce of `nbytes` in which the rank at each place of `order` sends to the next place's.

    order: a permutation of some ranks, each once; ValueError otherwise. routes: kept from an earlier call.
    """
    p = len(order)
    if not p or len(set(order)) != p or not all(0 <= rank < topology.size for rank in order):
        raise ValueError(f"order of {p}: ranks below {topology.size} are wanted, each at most once")
    if nbytes < 0:
        raise ValueError(f"nbytes={nbytes}: at least 0 is wanted")
    ways = routes or Routes(topology)
    if p == 1:
        return Simulation(0.0, 0.0, 0.0, 0.0, "none", 0, {})
    load: Counter[Key] = Counter()
    latency = 0.0
    for here, there in zip(order, [*order[1:], order[0]], strict=True):
        keys, each = ways.between(here, there)
        load.update(keys)
        latency = max(latency, each)
    worst = max(load, key=lambda key: load[key] / ways.rate(key))
    crossings: Counter[str] = Counter()
    for key, count in load.items():
        crossings[ways.kind(key)] += count
    step = latency + nbytes / p * load[worst] / ways.rate(worst)
    seconds = 2 * (p - 1) * step
    rate = 2 * (p - 1) / p * nbytes / seconds
    return Simulation(
        seconds, step, latency, rate, ways.name(worst), load[worst], dict(sorted(crossings.items()))
    )
