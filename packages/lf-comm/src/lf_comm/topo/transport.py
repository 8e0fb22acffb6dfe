"""Over what each rank talks to each other one, what NCCL was told and by whom, and what looks slower than it should.

Reads only: nothing here sets a variable. The rules are those of NCCL 2.30 (src/graph/paths.cc, src/misc/param.cc); what
NCCL really chose it prints itself with NCCL_DEBUG=INFO.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lf_comm.topo.graph import NET, Topology
from lf_comm.topo.order import best_order
from lf_comm.topo.simulate import Routes, simulate

# What decides how bytes travel, with what NCCL does when nobody sets it
DEFAULTS = {
    "NCCL_ALGO": "chosen by size",
    "NCCL_CROSS_NIC": "2",
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_HCA": "all",
    "NCCL_NET": "InfiniBand or RoCE where there is, else Socket",
    "NCCL_NET_GDR_LEVEL": "PXB",
    "NCCL_NVLS_ENABLE": "2",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_P2P_LEVEL": "PXB",
    "NCCL_PROTO": "chosen by size",
    "NCCL_SHM_DISABLE": "0",
    "NCCL_SOCKET_IFNAME": "first that is up, not lo or docker",
    "NCCL_TOPO_FILE": "none",
}
_DISTANCE = {"NVLink": 1, "PCIe switch": 4, "host bridge": 6, "sockets": 7}
_LEVELS = {"LOC": 0, "NVL": 1, "PIX": 4, "PXB": 4, "PHB": 6, "SYS": 7}
_OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
_VERBS = re.compile(r"(mlx|ib|roce|bnxt_re|irdma|hns|efa|rdmap|hfi)")
_FAR_BELOW = 0.5


@dataclass(frozen=True)
class Setting:
    """A variable of NCCL. origin: "environment", a file, or "default"."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class Transport:
    """To one peer. via: in NCCL's words, e.g. "P2P/NVLink", "SHM", "NET/Socket"; distance: what lies between; rate: of
    the slowest link on the way, bytes/s, when nobody else uses it; reason."""

    peer: int
    via: str
    distance: str
    rate: float
    reason: str


def effective_settings(
    environ: Mapping[str, str] | None = None, home: Path | None = None, system: Path = Path("/etc/nccl.conf")
) -> tuple[Setting, ...]:
    """Every NCCL_* that is set, and the defaults of those that decide how bytes travel, by name.

    As NCCL reads them: the environment, then NCCL_CONF_FILE or else ~/.nccl.conf, then /etc/nccl.conf; the first that
    names a variable wins. Lines that begin with # or have no = are passed over; bytes that are no UTF-8 are replaced.
    """
    env = os.environ if environ is None else environ
    found = {key: Setting(key, value, "environment") for key, value in env.items() if key.startswith("NCCL_")}
    own = env.get("NCCL_CONF_FILE")
    for path in (Path(own) if own else (home or _home()) / ".nccl.conf", system):
        try:
            lines = path.read_text(errors="replace").split("\n")
        except OSError:
            continue
        for line in lines:
            name, equals, value = line.partition("=")
            if equals and name.startswith("NCCL_"):
                found.setdefault(name, Setting(name, value, str(path)))
    for name, value in DEFAULTS.items():
        found.setdefault(name, Setting(name, value, "default"))
    return tuple(found[name] for name in sorted(found))


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user without an entry in passwd, as in containers
        return Path("/")


def transports(topology: Topology, rank: int, settings: Sequence[Setting] = ()) -> tuple[Transport, ...]:
    """To each other rank, as NCCL would choose (HCCL for NPUs). settings: of :func:`effective_settings`."""
    if not 0 <= rank < topology.size:
        raise ValueError(f"rank={rank}: one below {topology.size} is wanted")
    known = {each.name: each.value for each in settings}
    routes = Routes(topology)
    return tuple(
        _transport(topology, routes, rank, peer, known) for peer in range(topology.size) if peer != rank
    )


def distance(topology: Topology, a: int, b: int, routes: Routes | None = None) -> str:
    """What lies between two ranks: "NVLink", "HCCS", "PCIe switch", "host bridge", "sockets", "network", "measured"."""
    if topology.ranks[a][0] != topology.ranks[b][0]:
        return "network"
    ways = routes or Routes(topology)
    keys, _ = ways.between(a, b)
    kinds = {ways.kind(key) for key in keys}
    for kind, word in (("SYS", "sockets"), ("MEASURED", "measured"), ("NVL", "NVLink"), ("HCCS", "HCCS")):
        if kind in kinds:
            return word
    inner = {key[1] for key in keys[1:]}
    bridge = any(name.startswith(("cpu", "socket", "phb:", "node:")) for name in inner)
    return "host bridge" if bridge else "PCIe switch"


def _transport(
    topology: Topology, routes: Routes, rank: int, peer: int, known: Mapping[str, str]
) -> Transport:
    what = distance(topology, rank, peer, routes)
    keys, _ = routes.between(rank, peer)
    rate = min(routes.rate(key) for key in keys)
    kind = topology.device(rank).kind
    if kind == "cpu":
        return Transport(peer, "Gloo/TCP", what, rate, "ranks run on CPUs")
    if kind == "npu":
        via = {"network": "RoCE", "HCCS": "HCCS"}.get(what, "PCIe")
        return Transport(peer, f"HCCL/{via}", what, rate, "by the links of the table")
    if what == "network":
        return _over_network(topology, rank, peer, rate, known)
    if known.get("NCCL_P2P_DISABLE") == "1":
        level, why = 0, "NCCL_P2P_DISABLE=1"
    else:
        said = known.get("NCCL_P2P_LEVEL", "PXB")
        if said.isdecimal():
            said = _OLD_LEVELS[min(int(said), 5)]
        level, why = _LEVELS.get(said, _LEVELS["PXB"]), f"NCCL_P2P_LEVEL {said}"
    if _DISTANCE.get(what, 7) <= level:
        return Transport(peer, "P2P/NVLink" if what == "NVLink" else "P2P/PCIe", what, rate, f"within {why}")
    if known.get("NCCL_SHM_DISABLE") == "1":
        return Transport(peer, "NET", what, rate, f"beyond {why}, and NCCL_SHM_DISABLE=1")
    return Transport(peer, "SHM", what, rate, f"beyond {why}: through memory of the host")


def _over_network(
    topology: Topology, rank: int, peer: int, rate: float, known: Mapping[str, str]
) -> Transport:
    host, local = topology.ranks[rank]
    each = topology.nodes[host]
    nic = each.routes(each.devices[local].name)[NET][-1][0]
    if known.get("NCCL_IB_DISABLE") == "1":
        return Transport(peer, "NET/Socket", "network", rate, "NCCL_IB_DISABLE=1")
    if known.get("NCCL_NET", "").lower() == "socket":
        return Transport(peer, "NET/Socket", "network", rate, "NCCL_NET=Socket")
    if _VERBS.match(nic):
        return Transport(peer, "NET/IB", "network", rate, f"{nic} speaks verbs")
    return Transport(peer, "NET/Socket", "network", rate, f"{nic} is no RDMA device by its name")


def warnings(
    topology: Topology,
    settings: Sequence[Setting] = (),
    measured: float | None = None,
    nbytes: int = 64 << 20,
) -> tuple[str, ...]:
    """What makes, or lets expect, less than the links can.

    measured: bytes a rank sends per second in an all-reduce of `nbytes`; of rates by ``measure_rates``, it is
    ``1 / rates.all_reduce``. A warning when it is below half of what the links allow; none for processes on CPUs, of
    whose links nothing is known.
    """
    found = []
    by_name = {each.name: each for each in settings}
    hosts = {host for host, _ in topology.ranks}
    kinds = {link.kind for host in hosts for link in topology.nodes[host].links}
    verbs = sorted({nic for host in hosts for nic in topology.nodes[host].nics if _VERBS.match(nic)})
    gpu = any(topology.device(rank).kind == "gpu" for rank in range(topology.size))
    tcp = [
        each
        for each in (by_name.get("NCCL_IB_DISABLE"), by_name.get("NCCL_NET"))
        if each is not None and each.origin != "default" and each.value.lower() in ("1", "socket")
    ]
    if gpu and len(hosts) > 1 and verbs and tcp:
        said = f"{tcp[0].name}={tcp[0].value} ({tcp[0].origin})"
        found.append(f"{said} sends everything over TCP though {', '.join(verbs[:8])} speak verbs")
    if gpu and len(hosts) > 1 and not verbs:
        found.append("no RDMA device is seen: what goes between hosts goes over TCP")
    closed = by_name.get("NCCL_P2P_DISABLE")
    if "NVL" in kinds and closed is not None and closed.value == "1":
        found.append(f"NCCL_P2P_DISABLE=1 ({closed.origin}) leaves the NVLinks unused")
    known = gpu or not kinds.isdisjoint({"MEASURED", "HCCS"})
    if measured is not None and topology.size > 1 and known:
        allowed = _allowed(topology, nbytes)
        if measured < _FAR_BELOW * allowed:
            found.append(
                f"an all-reduce was measured at {measured / 1e9:.3g} GB/s where the links allow {allowed / 1e9:.3g} "
                "GB/s: look for a fall-back to TCP or through the host (NCCL_DEBUG=INFO says which transport each "
                "channel took)"
            )
    return tuple(found)


def _allowed(topology: Topology, nbytes: int) -> float:
    """Bytes per second that a rank can send in a ring all-reduce, latency aside."""
    hosts = {host for host, _ in topology.ranks}
    if any(topology.device(rank).kind == "cpu" for rank in range(topology.size)):
        ring = simulate(topology, range(topology.size), nbytes)
        return nbytes / topology.size / (ring.step_s - ring.latency_s)
    # NCCL and HCCL order devices and hosts themselves, and run a ring through each NIC of a host.
    order = best_order(topology, nbytes)
    ring = order.after
    rate = nbytes / topology.size / (ring.step_s - ring.latency_s)
    if len(hosts) == 1 or not ring.bottleneck.startswith("NET"):
        return rate
    routes = Routes(topology)
    inside = [
        min(routes.rate(key) for key in routes.between(a, b)[0])
        for a, b in pairwise(order.ranks)
        if topology.ranks[a][0] == topology.ranks[b][0]
    ]
    return min([rate * min(len(topology.nodes[host].nics) for host in hosts), *inside])
