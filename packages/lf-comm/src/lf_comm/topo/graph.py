"""One graph for what connects the ranks of a job: devices, switches, sockets and NICs of each host, and the network.

Everything here is plain data. Rates are bytes per second in one direction of a full-duplex link, latencies seconds.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from lf_comm._errors import CommError

NET = "net"  # the vertex of every host at which its network begins

# What NCCL counts for one direction, GB/s (src/graph/topo.h of NCCL 2.30)
NVLINK_RATE = {60: 18.0e9, 70: 20.0e9, 80: 20.0e9, 86: 12.0e9, 90: 20.6e9, 100: 40.1e9}
SOCKET_RATE = {"GenuineIntel": 10.0e9, "AuthenticAMD": 16.0e9}
PCIE_RATE = 24.0e9  # generation 4, 16 lanes
# Orders of magnitude only: they decide between routes of equal rate, and what very small messages cost.
LATENCY = {
    "NVL": 0.6e-6,
    "HCCS": 0.6e-6,
    "PCI": 0.5e-6,
    "SYS": 0.5e-6,
    "NET": 2.5e-6,
    "C2C": 0.6e-6,
    "MEASURED": 5e-6,
}
_PROBE = 1 << 20  # a route is the one on which so many bytes arrive first


class TopologyError(CommError, ValueError):
    """What was read describes no topology. source: what was read; where: line, element or key; found; wanted."""

    def __init__(self, source: str, where: str, found: str, wanted: str) -> None:
        self.source, self.where, self.found, self.wanted = source, where, found, wanted
        super().__init__(f"{source}, {where}: found {found[:120]!r}, {wanted}")

    def __reduce__(self) -> tuple[type[TopologyError], tuple[str, str, str, str]]:
        return TopologyError, (self.source, self.where, self.found, self.wanted)


@dataclass(frozen=True)
class Device:
    """An accelerator, or a process on CPUs. kind: "gpu", "npu" or "cpu"; numa: None where the system does not say."""

    name: str
    kind: str = "gpu"
    bus: str = ""
    numa: int | None = None


@dataclass(frozen=True)
class Link:
    """Two vertices that are wired. kind: "NVL", "HCCS", "PCI", "SYS" (sockets), "C2C", "NET" or "MEASURED"."""

    a: str
    b: str
    kind: str
    rate: float
    latency: float

    @classmethod
    def of(cls, a: str, b: str, kind: str, rate: float) -> Link:
        """With the usual latency of its kind."""
        return cls(a, b, kind, rate, LATENCY[kind])


Hop: TypeAlias = tuple[str, str]  # a link in one direction
Route: TypeAlias = tuple[Hop, ...]


@dataclass(frozen=True)
class Node:
    """One host. Vertices are names: of devices, of NICs, of switches and sockets, and "net". Hosts that are equal are
    equal Nodes; their names are with the Topology."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    nics: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def wires(self) -> Mapping[Hop, Link]:
        """Links by both directions; of two between the same vertices, the faster."""
        found: dict[Hop, Link] = {}
        for link in sorted(self.links, key=lambda each: each.rate):
            found[link.a, link.b] = found[link.b, link.a] = link
        return found

    @cached_property
    def _next(self) -> Mapping[str, list[tuple[str, float]]]:
        found: dict[str, list[tuple[str, float]]] = {}
        for (a, b), link in self.wires.items():
            found.setdefault(a, []).append((b, link.latency + _PROBE / link.rate))
        return found

    @cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(device.name for device in self.devices) | {NET}

    @cached_property
    def _routes(self) -> dict[str, dict[str, Route]]:
        return {}

    def routes(self, start: str) -> Mapping[str, Route]:
        """The quickest way from a vertex to each other one; devices and the network forward nothing."""
        if start in self._routes:
            return self._routes[start]
        cost, routes = {start: 0.0}, {start: ()}  # type: dict[str, float], dict[str, Route]
        order = itertools.count()
        heap: list[tuple[float, int, str]] = [(0.0, next(order), start)]
        while heap:
            spent, _, here = heapq.heappop(heap)
            if spent > cost[here] or (here in self._ends and here != start):
                continue
            for there, price in self._next.get(here, ()):
                if spent + price < cost.get(there, float("inf")):
                    cost[there] = spent + price
                    routes[there] = (*routes[here], (here, there))
                    heapq.heappush(heap, (spent + price, next(order), there))
        return self._routes.setdefault(start, routes)

    def seconds(self, route: Route, nbytes: float = _PROBE) -> float:
        """Of a message alone on its way, every link after the other: a distance, not a prediction."""
        return sum(self.wires[hop].latency + nbytes / self.wires[hop].rate for hop in route)

    @property
    def net_rate(self) -> float:
        """Of all NICs together; 0 without network."""
        return sum(link.rate for link in self.links if link.kind == "NET")


def node(
    source: str,
    devices: Iterable[Device],
    links: Iterable[Link],
    nics: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> Node:
    """A checked Node. TopologyError when names repeat, a rate is none, or a device cannot reach all others."""
    made = Node(tuple(devices), tuple(links), tuple(nics), tuple(notes))
    names = [device.name for device in made.devices]
    if not names or len(set(names)) != len(names):
        raise TopologyError(
            source, "devices", ", ".join(names), "every device once is wanted, and at least one"
        )
    for link in made.links:
        if not 0 < link.rate < float("inf"):
            raise TopologyError(
                source, f"link {link.a} - {link.b}", str(link.rate), "a rate above 0 is wanted"
            )
    reached = made.routes(names[0])
    lone = [name for name in names if name not in reached]
    if lone:
        raise TopologyError(
            source, f"device {names[0]}", f"no way to {lone[0]}", "connected devices are wanted"
        )
    return made


@dataclass(frozen=True)
class Topology:
    """Hosts, and which rank is where.

    hosts: names; nodes: by host; ranks: (host, device of it) by rank; groups: by host the switches above it, outermost
    first, e.g. ("pod1", "leaf3"), all equally many; oversubscription: what a switch's hosts may send together over
    what its uplinks carry.
    """

    hosts: tuple[str, ...]
    nodes: tuple[Node, ...]
    ranks: tuple[tuple[int, int], ...]
    groups: tuple[tuple[str, ...], ...] = ()
    oversubscription: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        def wrong(where: str, found: object, wanted: str) -> TopologyError:
            return TopologyError(self.source or "topology", where, str(found), wanted)

        if len(self.hosts) != len(self.nodes) or not self.nodes:
            raise wrong(
                "hosts",
                len(self.hosts),
                f"{len(self.nodes)} names for as many nodes are wanted, at least one",
            )
        if len(set(self.ranks)) != len(self.ranks) or not self.ranks:
            raise wrong("ranks", len(self.ranks), "a device of its own for every rank is wanted")
        for rank, (host, local) in enumerate(self.ranks):
            if not (0 <= host < len(self.nodes) and 0 <= local < len(self.nodes[host].devices)):
                raise wrong(f"rank {rank}", (host, local), "a device of a host is wanted")
        if self.groups and (len(self.groups) != len(self.nodes) or len({len(g) for g in self.groups}) > 1):
            raise wrong("groups", len(self.groups), "as many switches above each host are wanted")
        if any("/" in name for above in self.groups for name in above):
            raise wrong("groups", "/", "names of switches without / are wanted")
        if not 1 <= self.oversubscription < float("inf"):
            raise wrong("oversubscription", self.oversubscription, "a ratio of at least 1 is wanted")
        if len({host for host, _ in self.ranks}) > 1:
            for host in {host for host, _ in self.ranks}:
                if any(NET not in self.nodes[host].routes(d.name) for d in self.nodes[host].devices):
                    raise wrong(
                        self.hosts[host], "no network", "a NIC is wanted where ranks are on several hosts"
                    )

    @classmethod
    def of(
        cls,
        nodes: Sequence[Node],
        *,
        hosts: Sequence[str] = (),
        groups: Sequence[Sequence[str]] = (),
        oversubscription: float = 1.0,
        network: float | None = None,
        round_robin: bool = False,
    ) -> Topology:
        """Hosts with a rank on each device, host after host; or, round robin, rank after rank on the next host.

        network: bytes/s of a NIC for hosts that show none; None: such hosts cannot be joined.
        """
        if network is not None:
            nodes = [with_network(each, network) for each in nodes]
        places = [(h, d) for h, each in enumerate(nodes) for d in range(len(each.devices))]
        if round_robin:
            places.sort(key=lambda place: (place[1], place[0]))
        names = tuple(hosts) or tuple(f"host{number}" for number in range(len(nodes)))
        above = tuple(tuple(each) for each in groups)
        return cls(names, tuple(nodes), tuple(places), above, oversubscription)

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.ranks)

    def device(self, rank: int) -> Device:
        """Where a rank runs."""
        host, local = self.ranks[rank]
        return self.nodes[host].devices[local]


def with_network(each: Node, rate: float) -> Node:
    """The node with a NIC of `rate` bytes/s for each of its devices' common root, if it has no NIC."""
    if any(NET in (link.a, link.b) for link in each.links):
        return each
    inner = {name for link in each.links for name in (link.a, link.b)} - {
        device.name for device in each.devices
    }
    # Nearest to all devices: on a tree that is its root.
    roots = sorted(inner) or [each.devices[0].name]
    root = min(
        roots, key=lambda name: max(each.seconds(each.routes(d.name).get(name, ())) for d in each.devices)
    )
    links = [Link.of("nic0", NET, "NET", rate)]
    if inner:
        links.append(Link.of(root, "nic0", "PCI", max(rate, PCIE_RATE)))
    else:
        links += [Link.of(device.name, "nic0", "PCI", max(rate, PCIE_RATE)) for device in each.devices]
    notes = (*each.notes, f"no NIC was seen: one of {rate / 1e9:.1f} GB/s is assumed at {root}")
    return Node(each.devices, (*each.links, *links), (*each.nics, "nic0"), notes)


def from_rates(rates: Sequence[Sequence[float]], source: str = "measured rates") -> Topology:
    """From the rate between each two ranks, [n][n] bytes/s, as measured; the slower direction counts."""
    n = len(rates)
    if not 1 <= n <= 1024 or any(len(row) != n for row in rates):
        raise TopologyError(source, "shape", f"{n} rows", "a square of 1 to 1024 rows is wanted")
    devices = [Device(f"rank{rank}", "cpu") for rank in range(n)]
    links = [
        Link.of(f"rank{a}", f"rank{b}", "MEASURED", float(min(rates[a][b], rates[b][a])))
        for a in range(n)
        for b in range(a + 1, n)
    ]
    return Topology.of([node(source, devices, links)])


def node_to_json(each: Node) -> str:
    """As JSON with a version; :func:`node_from_json` reads it."""
    return json.dumps({"version": 1, **asdict(each)})


def node_from_json(text: str, source: str = "topology JSON") -> Node:
    """What :func:`node_to_json` wrote. TopologyError for anything else."""
    try:
        found: Any = json.loads(text)
        if not isinstance(found, dict) or found.pop("version", None) != 1:
            raise TopologyError(source, "version", text, "version 1 is wanted")
        devices = [Device(**each) for each in found["devices"]]
        links = [Link(**{**each, "rate": float(each["rate"])}) for each in found["links"]]
        return node(source, devices, links, map(str, found["nics"]), map(str, found["notes"]))
    except TopologyError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TopologyError(source, "content", str(error), "what node_to_json writes is wanted") from error
