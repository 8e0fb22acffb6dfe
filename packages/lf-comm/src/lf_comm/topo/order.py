"""The order of ranks in which a ring all-reduce is quickest under the model of :func:`simulate`.

Inside a host: the cycle of least summed distance, exact to 12 devices, greedy and 2-opt above; then, to 12 devices,
branch and bound with shared links where the sum alone does not prove it. Hosts: each is entered and left once, hosts
below one switch one after the other, so that every uplink carries one flow each way; or once for each island, a set
of devices that reaches the others of its host better through the network. What comes out is kept only if it beats the
order that ranks have already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lf_comm.topo._tour import EXACT, bottleneck, greedy_cycle, shortest_cycle
from lf_comm.topo.graph import NET, Node, Topology
from lf_comm.topo.simulate import Key, Routes, Simulation, simulate

_MOST_IN_HOST = 512  # devices of one host to which 2-opt is applied
_BRANCHES = 20_000
_SAME = 1 + 1e-9


@dataclass(frozen=True)
class RingOrder:
    """ranks: by place in the ring, the rank; method: how it was found; proven: nothing is quicker under the model;
    before: the order 0, 1, 2, ... simulated; after: this one."""

    ranks: tuple[int, ...]
    method: str
    proven: bool
    before: Simulation
    after: Simulation

    @property
    def gain(self) -> float:
        """Predicted seconds of the order that was there over those of this one; 1.0: nothing to gain."""
        return self.before.seconds / self.after.seconds if self.after.seconds else 1.0


def best_order(topology: Topology, nbytes: int = 64 << 20) -> RingOrder:
    """The order for all-reduces of `nbytes`: a permutation of all ranks, by the model never slower than 0, 1, 2, ..."""
    routes = Routes(topology)
    identity = list(range(topology.size))
    before = simulate(topology, identity, nbytes, routes)
    if topology.size <= 3:
        # A cycle of three reversed is the other one: with links alike in both directions they take as long.
        return RingOrder(tuple(identity), "kept", True, before, before)
    bound = _bound(topology, routes, nbytes)
    if before.seconds <= bound * _SAME:
        return RingOrder(tuple(identity), "kept", True, before, before)
    best, name, after = identity, "kept", before
    for islands in (False, True):
        composed, method = _compose(topology, islands)
        tried = simulate(topology, composed, nbytes, routes)
        if tried.seconds * _SAME < after.seconds:
            best, name, after = composed, method, tried
    proven = after.seconds <= bound * _SAME
    if not proven and topology.size < EXACT:
        found, proven = _Search(routes, topology.size, nbytes).run(best, after.step_s)
        tried = simulate(topology, found, nbytes, routes)
        if tried.seconds * _SAME < after.seconds:
            best, name, after = found, "branch and bound", tried
    return RingOrder(tuple(best), name, proven, before, after)


def _compose(topology: Topology, islands: bool) -> tuple[list[int], str]:
    """Hosts switch by switch, each as a path; a single host as a cycle.

    islands: devices of a host that reach each other better through the network are entered apart, as hosts are.
    """
    at: dict[int, dict[int, int]] = {}
    for rank, (host, local) in enumerate(topology.ranks):
        at.setdefault(host, {})[local] = rank
    alone = len(at) == 1
    parts: dict[tuple[Node, tuple[int, ...]], list[tuple[list[int], str]]] = {}
    units: list[tuple[tuple[int, ...], int, int, list[int]]] = []
    methods = set()
    for place, (host, above) in enumerate(_by_switch(topology, list(at))):
        # In the order ranks have there, which is what equal distances keep.
        used = tuple(sorted(at[host], key=at[host].__getitem__))
        key = (topology.nodes[host], used)
        if key not in parts:
            apart = _islands(topology.nodes[host], used) if islands and not alone else [used]
            parts[key] = [_inside(topology.nodes[host], each, alone) for each in apart]
        for number, (path, method) in enumerate(parts[key]):
            methods.add(method)
            units.append((above, number, place, [at[host][device] for device in path]))
    # Below a switch first the first island of every host: two of one host in a row would meet inside it.
    units.sort(key=lambda unit: unit[:3])
    said = " and ".join(sorted(methods)) + ("" if alone else ", hosts by switch")
    return [rank for unit in units for rank in unit[3]], said + (", in islands" if islands else "")


def _by_switch(topology: Topology, hosts: list[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Hosts with the places of the switches above them, those below one switch together, as ranks meet them."""
    if not topology.groups:
        return [(host, ()) for host in hosts]
    first: dict[tuple[str, ...], int] = {}
    for place, host in enumerate(hosts):
        above = topology.groups[host]
        for level in range(len(above)):
            first.setdefault(above[: level + 1], place)
    levels = range(len(topology.groups[0]))
    placed = [(host, tuple(first[topology.groups[host][: level + 1]] for level in levels)) for host in hosts]
    return sorted(placed, key=lambda each: each[1])


def _islands(each: Node, local: Sequence[int]) -> list[tuple[int, ...]]:
    """Devices that are nearer to each other than to the network, set by set."""
    out = {device: each.seconds(each.routes(each.devices[device].name)[NET]) for device in local}
    left, found = list(local), []
    while left:
        island, reach = [], [left.pop(0)]
        while reach:
            here = reach.pop()
            island.append(here)
            ways = each.routes(each.devices[here].name)
            near = [
                there
                for there in left
                if each.seconds(ways[each.devices[there].name]) < out[here] + out[there]
            ]
            left = [there for there in left if there not in near]
            reach += near
        found.append(tuple(device for device in local if device in island))
    return found


def _inside(each: Node, local: Sequence[int], alone: bool) -> tuple[list[int], str]:
    """Devices of a host as a cycle, or from the network to the network."""
    if len(local) > _MOST_IN_HOST or len(local) == 1:
        return list(local), "kept"
    names = [each.devices[device].name for device in local]
    points = names if alone else [NET, *names]
    cost = _distances(each, points)
    exact = len(points) <= EXACT
    tour = shortest_cycle(cost) if exact else greedy_cycle(cost)
    start = 0 if alone else 1
    return [
        local[point - start] for point in tour if point >= start
    ], "exact" if exact else "greedy and 2-opt"


def _distances(each: Node, points: Sequence[str]) -> Tensor:
    rows = [[each.seconds(each.routes(a)[b]) if a != b else 0.0 for b in points] for a in points]
    cost = torch.tensor(rows, dtype=torch.float64)
    return torch.maximum(cost, cost.T)  # routes of equal length may be found in either direction


def _bound(topology: Topology, routes: Routes, nbytes: int) -> float:
    """Seconds that no order beats: links not shared, and of one host's ring the least possible slowest step."""
    p = topology.size
    hosts = {host for host, _ in topology.ranks}

    def alone(keys: Sequence[Key], latency: float) -> float:
        return latency + nbytes / p / min(routes.rate(key) for key in keys)

    if len(hosts) == 1:
        if p >= EXACT:
            return 0.0
        rows = [[0.0 if a == b else alone(*routes.between(a, b)) for b in range(p)] for a in range(p)]
        cost = torch.tensor(rows, dtype=torch.float64)
        return 2 * (p - 1) * bottleneck(torch.minimum(cost, cost.T))
    slowest = 0.0
    seen = set()
    for host in hosts:
        each = topology.nodes[host]
        if each in seen:
            continue
        seen.add(each)
        used = [local for h, local in topology.ranks if h == host]
        out = min(
            nbytes / p / min(each.wires[hop].rate for hop in each.routes(each.devices[d].name)[NET])
            for d in used
        )
        slowest = max(slowest, out)
    return 2 * (p - 1) * slowest


class _Search:
    """Depth first over cycles from rank 0, with the load of every link; cut where a link alone is too slow already."""

    def __init__(self, routes: Routes, size: int, nbytes: int) -> None:
        self._size = size
        self._ways = {(a, b): routes.between(a, b) for a in range(size) for b in range(size) if a != b}
        self._price = {
            key: nbytes / size / routes.rate(key) for keys, _ in self._ways.values() for key in keys
        }
        self._load: Counter[Key] = Counter()
        self._left = _BRANCHES

    def run(self, order: list[int], step_s: float) -> tuple[list[int], bool]:
        """(the best of `order` and what was found, whether all was searched)."""
        self._best, self._limit = order, step_s
        self._extend([0], 0.0, 0.0)
        return self._best, self._left > 0

    def _extend(self, path: list[int], latency: float, transfer: float) -> None:
        if len(path) == self._size:
            closed = self._add(path[-1], path[0], latency, transfer)
            if sum(closed) * _SAME < self._limit:
                self._best, self._limit = list(path), sum(closed)
            self._load.subtract(self._ways[path[-1], path[0]][0])
            return
        for rank in range(self._size):
            if rank in path or self._left <= 0:
                continue
            self._left -= 1
            further = self._add(path[-1], rank, latency, transfer)
            if sum(further) * _SAME < self._limit:
                self._extend([*path, rank], *further)
            self._load.subtract(self._ways[path[-1], rank][0])

    def _add(self, a: int, b: int, latency: float, transfer: float) -> tuple[float, float]:
        keys, each = self._ways[a, b]
        self._load.update(keys)
        return max(latency, each), max(transfer, *(self._load[key] * self._price[key] for key in keys))
