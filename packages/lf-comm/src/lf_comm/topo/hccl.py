"""HCCL rank tables, versions 1.0 and 1.2, as a topology with ranks."""

from __future__ import annotations

import json
from typing import Any

from lf_comm.topo.graph import NET, PCIE_RATE, SOCKET_RATE, Device, Link, Node, Topology, TopologyError, node

SOURCE = "HCCL rank table"
HCCS_RATE = 30e9  # order of magnitude of one HCCS link; the table does not say
ROCE_RATE = 25e9  # 200 Gb/s for each device
_MOST = 64 << 20


def parse_hccl(
    text: bytes | str,
    *,
    mesh: int | None = None,
    hccs_rate: float = HCCS_RATE,
    nic_rate: float = ROCE_RATE,
) -> Topology:
    """Servers, devices and ranks of a table; superpods of version 1.2 become the switches above the servers.

    The table names devices, not wires. mesh: so many devices, in the order of their ids, are wired each to each by
    HCCS, and such sets by PCIe (4 in servers of Ascend 910A); None: all devices of a server are one set.
    hccs_rate: bytes/s of one HCCS link; nic_rate: of a device's own network interface.

    TopologyError for other versions, tables not "completed", ranks that are not 0 to n - 1, devices named twice.
    """
    table = _table(text)
    places: dict[int, tuple[int, int]] = {}
    hosts: list[str] = []
    nodes: list[Node] = []
    built: dict[tuple[int, ...], Node] = {}
    for number, server in enumerate(_list(table, "server_list", "table")):
        where = f"server {number}"
        hosts.append(_text(server, "server_id", where))
        found = {}
        for each in _list(server, "device", where):
            device, rank = (_number(each, key, where) for key in ("device_id", "rank_id"))
            if device in found or rank in places:
                raise TopologyError(
                    SOURCE, where, f"device {device}, rank {rank}", "every device and rank once is wanted"
                )
            found[device] = rank
            places[rank] = (number, -1)
        ids = tuple(sorted(found))
        if ids not in built:
            built[ids] = _server(ids, mesh or max(len(ids), 1), hccs_rate, nic_rate)
        nodes.append(built[ids])
        places.update({rank: (number, ids.index(device)) for device, rank in found.items()})
    if len(set(hosts)) != len(hosts):
        raise TopologyError(SOURCE, "server_list", ", ".join(hosts), "every server_id once is wanted")
    if sorted(places) != list(range(len(places))):
        raise TopologyError(
            SOURCE, "rank_id", f"{len(places)} ranks", "ranks 0 to n - 1 without a gap are wanted"
        )
    ranks = tuple(places[rank] for rank in range(len(places)))
    return Topology(tuple(hosts), tuple(nodes), ranks, _pods(table, hosts), source=SOURCE)


def _table(text: bytes | str) -> dict[str, Any]:
    if len(text) > _MOST:
        raise TopologyError(SOURCE, "size", str(len(text)), f"at most {_MOST} bytes are wanted")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TopologyError(SOURCE, "content", str(error), "JSON is wanted") from error
    if not isinstance(table, dict):
        raise TopologyError(SOURCE, "content", type(table).__name__, "an object is wanted")
    version, status = table.get("version"), table.get("status")
    if version not in ("1.0", "1.2"):
        wanted = 'version "1.0" or "1.2" is wanted; tables with group_list are older, write them anew'
        raise TopologyError(SOURCE, "version", str(version), wanted)
    if status != "completed":
        raise TopologyError(
            SOURCE, "status", str(status), '"completed" is wanted: the table is still being written'
        )
    return table


def _list(has: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    found = has.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise TopologyError(SOURCE, f"{where}, {key}", str(found), "a list of objects, not empty, is wanted")
    return found


def _text(has: dict[str, Any], key: str, where: str) -> str:
    found = has.get(key)
    if not isinstance(found, str) or not found:
        raise TopologyError(SOURCE, f"{where}, {key}", str(found), "a text is wanted")
    return found


def _number(has: dict[str, Any], key: str, where: str) -> int:
    """Written as a text in these tables."""
    found = has.get(key)
    text = found if isinstance(found, str) else ""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise TopologyError(SOURCE, f"{where}, {key}", str(found), 'a number as text, such as "0", is wanted')
    return int(text)


def _server(ids: tuple[int, ...], mesh: int, hccs_rate: float, nic_rate: float) -> Node:
    if mesh < 1:
        raise ValueError(f"mesh={mesh}: a number of devices above 0 is wanted")
    names = [f"npu{device}" for device in ids]
    links = []
    for number, name in enumerate(names):
        socket = f"socket{number // mesh}"
        links += [
            Link.of(name, other, "HCCS", hccs_rate)
            for other in names[number + 1 : mesh * (number // mesh + 1)]
        ]
        links.append(Link.of(name, socket, "PCI", PCIE_RATE))
        links += [Link.of(name, f"roce{ids[number]}", "PCI", PCIE_RATE)]
        links += [Link.of(f"roce{ids[number]}", NET, "NET", nic_rate)]
    sockets = -(-len(names) // mesh)
    links += [
        Link.of(f"socket{a}", f"socket{b}", "SYS", min(SOCKET_RATE.values()))
        for a in range(sockets)
        for b in range(a + 1, sockets)
    ]
    said = f"HCCS is taken as {hccs_rate / 1e9:g} GB/s a link, in sets of {min(mesh, len(names))} devices"
    return node(
        SOURCE, [Device(name, "npu") for name in names], links, [f"roce{device}" for device in ids], [said]
    )


def _pods(table: dict[str, Any], hosts: list[str]) -> tuple[tuple[str, ...], ...]:
    if "super_pod_list" not in table:
        return ()
    pod_of: dict[str, str] = {}
    for number, pod in enumerate(_list(table, "super_pod_list", "table")):
        name = _text(pod, "super_pod_id", f"super pod {number}").replace("/", "_")
        for server in _list(pod, "server_list", f"super pod {number}"):
            pod_of[_text(server, "server_id", f"super pod {number}")] = name
    missing = [host for host in hosts if host not in pod_of]
    if missing:
        raise TopologyError(SOURCE, "super_pod_list", missing[0], "a super pod for every server is wanted")
    return tuple((pod_of[host],) for host in hosts)
