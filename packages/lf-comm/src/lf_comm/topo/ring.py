"""The class users call: read what connects the ranks of a group, order them, say why, apply it as an order of ranks."""

from __future__ import annotations

import hashlib
import inspect
import os
import socket
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch.distributed as dist

from lf_comm.topo.explain import explain, picture
from lf_comm.topo.graph import (
    Device,
    Link,
    Node,
    Topology,
    node,
    node_from_json,
    node_to_json,
    with_network,
)
from lf_comm.topo.order import RingOrder, best_order
from lf_comm.topo.sysfs import discover
from lf_comm.topo.transport import Transport, effective_settings, transports, warnings

# nvidia-smi and /sys count by bus, CUDA by speed unless told otherwise
_VISIBLE = {"gpu": "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_TCP = 1.25e9  # 10 Gb/s: what a host without a visible NIC is taken to have


class TopologyAwareRingBuilder:
    """Orders the ranks of a topology. Nothing is set or overridden: the order is used by making a group from it."""

    def __init__(self, topology: Topology, nbytes: int = 64 << 20) -> None:
        """nbytes: size of the all-reduces to order for."""
        if nbytes < 1:
            raise ValueError(f"nbytes={nbytes}: at least 1 is wanted")
        self.topology, self.nbytes = topology, nbytes

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        nbytes: int = 64 << 20,
        network: float = _TCP,
        seen: Node | None = None,
        host: str | None = None,
    ) -> TopologyAwareRingBuilder:
        """All ranks of the group call it, and get the same.

        Each rank reads its own host and takes the device LOCAL_RANK of it (of CUDA_VISIBLE_DEVICES when that lists
        numbers); without accelerators, ranks count as processes on CPUs. network: bytes/s of a NIC where none is seen.
        seen, host: this rank's host and its name, instead of what is read here.
        """
        name = socket.gethostname() if host is None else host
        each = discover()[0] if seen is None else seen
        local = _local_device(len(each.devices)) if each is not None else -1
        text = node_to_json(each) if each is not None else ""
        digest = hashlib.sha256(text.encode()).hexdigest() if text else ""
        told: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, (name, digest, local), group=group)
        texts = _exchange([digest for _, digest, _ in told], text, group)
        return cls(_assemble(told, texts, network), nbytes)

    @cached_property
    def order(self) -> RingOrder:
        """The order; found at the first use."""
        return best_order(self.topology, self.nbytes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """By place in the ring, the rank of now."""
        return self.order.ranks

    def explain(self) -> str:
        """In words: what the order gains, why, and what it cannot change."""
        return explain(self.topology, self.order, self.nbytes)

    def picture(self) -> str:
        """The ring and the wires of the hosts, drawn in letters."""
        return picture(self.topology, self.order.ranks)

    def transports(self, rank: int) -> tuple[Transport, ...]:
        """To each other rank, with the settings this process has."""
        return transports(self.topology, rank, effective_settings())

    def warnings(self, measured: float | None = None) -> tuple[str, ...]:
        """What makes, or lets expect, less than the links can; measured: bytes/s that a rank sends in all-reduces."""
        return warnings(self.topology, effective_settings(), measured, self.nbytes)

    def new_group(self, ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
        """A group in the order of the ring, of all ranks of the default group; all of them call it.

        ranks: by rank of the topology, the global rank; None: the same numbers. options: of
        ``torch.distributed.new_group``. RuntimeError where torch cannot make groups in an order of one's own: use
        :meth:`launch` there.
        """
        if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            raise RuntimeError(
                "this torch sorts the ranks of new_group (no sort_ranks): start ranks as launch() says"
            )
        numbers = range(self.topology.size) if ranks is None else ranks
        made: Any = dist.new_group([numbers[rank] for rank in self.order.ranks], sort_ranks=False, **options)
        if not isinstance(made, dist.ProcessGroup):
            raise RuntimeError("this process is no member of the group")
        return made

    def launch(self) -> tuple[str, ...]:
        """For torchrun, by host in the order of the ring: its --node-rank, and which device each local rank gets.

        Text to copy, so that ranks count in the order of the ring from the start. RuntimeError if the ring enters a
        host twice: torchrun numbers the ranks of a host one after the other.
        """
        hosts: list[int] = []
        by_host: dict[int, list[int]] = {}
        for rank in self.order.ranks:
            host, local = self.topology.ranks[rank]
            if host in by_host and hosts[-1] != host:
                raise RuntimeError(
                    f"the ring enters {self.topology.hosts[host]} twice, which torchrun cannot number: use new_group"
                )
            if host not in by_host:
                hosts.append(host)
            by_host.setdefault(host, []).append(local)
        lines = []
        for number, host in enumerate(hosts):
            devices = self.topology.nodes[host].devices
            variable = _VISIBLE.get(devices[0].kind)
            shown = ",".join(devices[local].name.removeprefix(devices[local].kind) for local in by_host[host])
            lines.append(
                f"{self.topology.hosts[host]}: --node-rank {number}"
                + (f", {variable}={shown}" if variable else "")
            )
        return tuple(lines)


def _exchange(digests: Sequence[str], text: str, group: dist.ProcessGroup | None) -> dict[str, str]:
    """Hosts by digest: of equal ones, which is most of a cluster, one rank tells all."""
    members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    texts = {}
    for digest in dict.fromkeys(filter(None, digests)):
        held = [text]
        dist.broadcast_object_list(held, src=members[digests.index(digest)], group=group)
        texts[digest] = held[0]
    return texts


def _local_device(count: int) -> int:
    """Index of the device that this process uses, GPUs counted by bus; -1 where its variables do not tell."""
    local = os.environ.get("LOCAL_RANK", "0")
    listed = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if not local.isdecimal():
        return -1
    number = int(local)
    if listed != [""]:
        # UUIDs and MIG instances are not looked up
        number = int(listed[number]) if number < len(listed) and listed[number].isdecimal() else count
    return number if number < count else -1


def _assemble(told: Sequence[tuple[str, str, int]], texts: Mapping[str, str], network: float) -> Topology:
    """From what each rank saw: its host's name, the host's digest ("": no accelerator), and which device is its own."""
    names = list(dict.fromkeys(name for name, _, _ in told))
    nodes, ranks = [], dict[int, tuple[int, int]]()
    for number, name in enumerate(names):
        here = [rank for rank, (host, _, _) in enumerate(told) if host == name]
        locals_ = [told[rank][2] for rank in here]
        digest = told[here[0]][1]
        if digest and min(locals_) >= 0 and len(set(locals_)) == len(here):
            nodes.append(node_from_json(texts[digest], f"what rank {here[0]} saw"))
            ranks.update({rank: (number, local) for rank, local in zip(here, locals_, strict=True)})
        else:
            nodes.append(_processes(len(here), bool(digest)))
            ranks.update({rank: (number, local) for local, rank in enumerate(here)})
    if len(names) > 1:
        nodes = [with_network(each, network) for each in nodes]
    places = tuple(ranks[rank] for rank in range(len(told)))
    return Topology(tuple(names), tuple(nodes), places, source="group")


def _processes(count: int, devices: bool) -> Node:
    """Ranks on CPUs, or ranks of which it is not known which device each has."""
    why = "it is not known which device each rank has" if devices else "no accelerator is visible"
    names = [f"process{number}" for number in range(count)]
    links = [Link.of(name, "cpu", "PCI", 10e9) for name in names]
    return node(
        "group",
        [Device(name, "cpu") for name in names],
        links,
        (),
        [f"{why}: ranks count as processes on CPUs"],
    )
