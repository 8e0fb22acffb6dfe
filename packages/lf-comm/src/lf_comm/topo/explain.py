"""A topology and an order of its ranks, in words and as a drawing of letters."""

from __future__ import annotations

from collections.abc import Sequence

from lf_comm.topo.graph import NET, Node, Topology
from lf_comm.topo.order import RingOrder
from lf_comm.topo.simulate import Routes, Simulation
from lf_comm.topo.transport import distance

_MOST_LINES = 16
_ARROWS = {
    "NVLink": "=NVL=",
    "HCCS": "=HCCS=",
    "PCIe switch": "-PCI-",
    "host bridge": "-CPU-",
    "sockets": "~SYS~",
    "measured": "-",
}
_NAMES = {"NVL": "NVLink", "SYS": "between sockets", "NET": "NIC", "UP": "uplink of a switch", "PCI": "PCIe"}


def explain(topology: Topology, order: RingOrder, nbytes: int) -> str:
    """What the order does, what it gains, and what NCCL decides itself. Plain text of several lines."""
    hosts = {host for host, _ in topology.ranks}
    lines = [
        f"{topology.size} ranks on {len(hosts)} host{'s' * (len(hosts) != 1)}, all-reduce of {_size(nbytes)}"
    ]
    lines.append(f"order 0, 1, 2, ...: {_cost(order.before)}")
    if order.method == "kept":
        known = "no order is quicker" if order.proven else "none of the orders tried is quicker"
        lines.append(f"kept: {known} under the model; expected gain 0")
    else:
        sure = "; nothing is quicker under the model" if order.proven else ""
        lines.append(f"order by {order.method}: {_cost(order.after)}; predicted gain {order.gain:.2f}x{sure}")
        lines.append("crossings: " + _crossings(order.before, order.after))
    if len(hosts) == 1 and _switched(topology.nodes[next(iter(hosts))]):
        lines.append(
            "all GPUs hang on one NVSwitch: every order has the same links, so the expected gain is 0"
        )
    if any(topology.device(rank).kind == "gpu" for rank in range(topology.size)):
        lines.append(
            "NCCL searches the rings inside a host itself; of the order of ranks it keeps that of hosts. "
            "Gloo and rings of point-to-point calls follow the order of ranks throughout."
        )
    notes = sorted({note for host in hosts for note in topology.nodes[host].notes})
    lines += [f"note: {note}" for note in notes[:_MOST_LINES]]
    if len(notes) > _MOST_LINES:
        lines.append(f"and {len(notes) - _MOST_LINES} more notes")
    return "\n".join(lines)


def picture(topology: Topology, ranks: Sequence[int]) -> str:
    """The ring as lines of text, a host a line; then the wires of each kind of host. Long rings are cut, and say so."""
    routes = Routes(topology)
    lines: list[str] = []
    current: list[str] = []
    for place, rank in enumerate(ranks):
        following = ranks[(place + 1) % len(ranks)]
        current.append(f"[{rank}]")
        if topology.ranks[rank][0] == topology.ranks[following][0] and place + 1 < len(ranks):
            current.append(_ARROWS[distance(topology, rank, following, routes)])
        else:
            host = topology.hosts[topology.ranks[rank][0]]
            lines.append(f"{host}: {''.join(current)}")
            current = []
    width = max(map(len, lines[:_MOST_LINES]))
    drawn = [f"{line:<{width}} --> {'back' if line is lines[-1] else 'next'}" for line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        drawn.append(f"... {len(lines) - _MOST_LINES} more lines --> back")
    kinds: dict[Node, list[str]] = {}
    for number, each in enumerate(topology.nodes):
        kinds.setdefault(each, []).append(topology.hosts[number])
    for each, hosts in list(kinds.items())[:3]:
        alike = f" and {len(hosts) - 1} more" if len(hosts) > 1 else ""
        drawn += ["", f"{hosts[0]}{alike}:", *_wires(each)]
    return "\n".join(drawn)


def _wires(each: Node) -> list[str]:
    """A line for every vertex with what hangs on it, by kind and rate."""
    hung: dict[str, dict[str, list[str]]] = {}
    for link in each.links:
        if link.rate >= 1e15:  # a device and its own PCI function
            continue
        hung.setdefault(link.a, {}).setdefault(f"{link.kind} {link.rate / 1e9:.3g} GB/s", []).append(link.b)
    lines = []
    for vertex, kinds in hung.items():
        for kind, ends in kinds.items():
            shown = ", ".join("network" if end == NET else end for end in ends[:8])
            more = f" and {len(ends) - 8} more" if len(ends) > 8 else ""
            lines.append(f"  {vertex} -- {kind} -- {shown}{more}")
    if len(lines) > 2 * _MOST_LINES:
        return [*lines[: 2 * _MOST_LINES], f"  ... {len(lines) - 2 * _MOST_LINES} more"]
    return lines


def _switched(each: Node) -> bool:
    on = {link.a for link in each.links if link.kind == "NVL" and link.b == "nvswitch"}
    return len(on) > 1 and on == {device.name for device in each.devices}


def _cost(simulation: Simulation) -> str:
    if not simulation.flows:
        return "nothing is sent"
    shared = f", shared by {simulation.flows}" if simulation.flows > 1 else ""
    return (
        f"{simulation.seconds * 1e3:.3g} ms, {simulation.bus_rate / 1e9:.3g} GB/s a rank; "
        f"slowest {simulation.bottleneck}{shared}"
    )


def _crossings(before: Simulation, after: Simulation) -> str:
    kinds = [kind for kind in before.crossings | after.crossings if kind != "PCI"] or ["PCI"]
    return ", ".join(
        f"{_NAMES.get(kind, kind)} {before.crossings.get(kind, 0)} -> {after.crossings.get(kind, 0)}"
        for kind in kinds
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.3g} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"
