"""What NCCL writes with NCCL_TOPO_DUMP_FILE, or is given as NCCL_TOPO_FILE, as hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.parsers import expat

from lf_comm.topo.graph import (
    LATENCY,
    NET,
    NVLINK_RATE,
    PCIE_RATE,
    SOCKET_RATE,
    Device,
    Link,
    Node,
    TopologyError,
    node,
)

SOURCE = "NCCL topology XML"
# A lane carries three quarters of its bits as payload: 12 GB/s for generation 3 with 16 lanes, as NCCL counts.
PAYLOAD = 0.75 / 8
_DEEP, _MANY = 64, 200_000
_SWITCH_CLASS = "0x068"
_GPU_CLASS = "0x03"


@dataclass
class _Element:
    tag: str
    line: int
    has: dict[str, str]
    inside: list[_Element] = field(default_factory=list)

    def number(self, name: str, default: float | None = None) -> float:
        text = self.has.get(name)
        if text is None and default is not None:
            return default
        try:
            value = float(text or "")
        except ValueError:
            value = float("nan")
        if not abs(value) < 1e15:
            raise TopologyError(
                SOURCE, f"line {self.line}, {self.tag} {name}", str(text), "a number is wanted"
            )
        return value


def _elements(data: bytes) -> _Element:
    """The tree. Documents with a DTD are refused: entities may grow without end."""
    top = _Element("", 0, {})
    stack = [top]
    count = 0
    parser = expat.ParserCreate("utf-8")

    def refuse(*_: object) -> None:
        raise TopologyError(
            SOURCE, f"line {parser.CurrentLineNumber}", "<!DOCTYPE", "a document without DTD is wanted"
        )

    def start(tag: str, has: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if len(stack) > _DEEP or count > _MANY:
            raise TopologyError(
                SOURCE,
                f"line {parser.CurrentLineNumber}",
                f"element {count} at depth {len(stack)}",
                f"at most {_MANY} elements, {_DEEP} deep, are wanted",
            )
        made = _Element(tag, parser.CurrentLineNumber, has)
        stack[-1].inside.append(made)
        stack.append(made)

    def end(_: str) -> None:
        stack.pop()

    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise TopologyError(
            SOURCE, f"line {error.lineno}", str(error), "well-formed XML is wanted"
        ) from error
    system = top.inside[0]
    if system.tag != "system":
        raise TopologyError(SOURCE, f"line {system.line}", system.tag, "<system> is wanted")
    return system


def parse_nccl_xml(data: bytes | str) -> dict[str, Node]:
    """Hosts by their ``host_hash`` ("" where the file has none). GPUs are named by ``dev``: gpu0, gpu1.

    TopologyError for anything but a well-formed document of cpu, pci, gpu, nvlink, c2c, nic and net with their numbers,
    without DTD, at most 64 deep. Elements of other names are passed over.
    """
    system = _elements(data.encode() if isinstance(data, str) else data)
    hosts: dict[str, _Host] = {}
    for cpu in system.inside:
        if cpu.tag == "cpu":
            hosts.setdefault(cpu.has.get("host_hash", ""), _Host()).cpu(cpu)
    if not hosts:
        raise TopologyError(SOURCE, f"line {system.line}", "no cpu", "<cpu> elements are wanted")
    return {name: host.node() for name, host in hosts.items()}


class _Host:
    """Gathers what one host has."""

    def __init__(self) -> None:
        self.devices: list[Device] = []
        self.links: list[Link] = []
        self.nics: list[str] = []
        self.cpus: dict[str, str] = {}  # vertex -> vendor
        self.gpu_at: dict[str, str] = {}
        self.nvlinks: list[tuple[str, _Element, float]] = []
        self.notes: list[str] = []

    def cpu(self, element: _Element) -> None:
        numa = int(element.number("numaid", -1))
        vertex = f"cpu{numa}"
        if vertex in self.cpus:
            raise TopologyError(
                SOURCE, f"line {element.line}", f"numaid {numa}", "every numaid once is wanted"
            )
        self.cpus[vertex] = element.has.get("vendor", "")
        if numa < 0:
            self.notes.append("the system names no NUMA node: its devices count as below one socket")
        for inner in element.inside:
            self._below(inner, vertex, vertex, None if numa < 0 else numa)

    def _below(self, element: _Element, above: str, cpu: str, numa: int | None) -> None:
        if element.tag == "pci":
            bus = element.has.get("busid", "").lower()
            if not bus:
                raise TopologyError(
                    SOURCE, f"line {element.line}, pci", str(element.has), "a busid is wanted"
                )
            self.links.append(Link.of(above, f"pci:{bus}", "PCI", _pcie(element)))
            for inner in element.inside:
                self._below(inner, f"pci:{bus}", cpu, numa)
        elif element.tag == "gpu":
            self._gpu(element, above, cpu, numa)
        elif element.tag == "nic":
            for inner in element.inside:
                self._below(inner, above, cpu, numa)
        elif element.tag == "net":
            self._net(element, above)

    def _gpu(self, element: _Element, above: str, cpu: str, numa: int | None) -> None:
        name = f"gpu{int(element.number('dev'))}"
        sm = element.number("sm", 80)
        each = NVLINK_RATE[max((known for known in NVLINK_RATE if known <= sm), default=60)]
        bus = above.removeprefix("pci:")
        self.devices.append(Device(name, "gpu", bus, numa))
        # The GPU is its PCI function: no wire between the two.
        self.links.append(Link(name, above, "PCI", 1e15, 0.0))
        self.gpu_at[bus] = name
        for inner in element.inside:
            if inner.tag == "nvlink":
                self.nvlinks.append((name, inner, each * inner.number("count", 1)))
            elif inner.tag == "c2c":
                rate = inner.number("bw") * inner.number("count", 1) * 1e6
                self.links.append(Link.of(name, cpu, "C2C", rate))

    def _net(self, element: _Element, above: str) -> None:
        name = element.has.get("name", "")
        if not name or name == NET or name in self.nics:
            raise TopologyError(SOURCE, f"line {element.line}, net", name, "a name of its own is wanted")
        mbits = element.number("speed", 10_000)
        if mbits <= 0:
            self.notes.append(f"{name} tells no speed: 10 Gb/s is assumed, as NCCL does")
            mbits = 10_000
        self.nics.append(name)
        self.links.append(Link(above, name, "PCI", 1e15, 0.0))
        self.links.append(Link.of(name, NET, "NET", mbits * 1e6 / 8))

    def _wire_nvlinks(self) -> None:
        switched: dict[str, float] = {}
        direct: dict[tuple[str, str], float] = {}
        for name, element, rate in self.nvlinks:
            target, kind = element.has.get("target", "").lower(), element.has.get("tclass", "")
            peer = self.gpu_at.get(target)
            if kind.startswith(_SWITCH_CLASS):
                switched[name] = switched.get(name, 0.0) + rate
            elif peer is not None and peer != name:
                direct[name, peer] = direct.get((name, peer), 0.0) + rate
            elif peer == name or kind.startswith(_GPU_CLASS) or not target:
                where = f"line {element.line}, nvlink"
                raise TopologyError(SOURCE, where, target, "the busid of another GPU of the host is wanted")
        self.links += [Link.of(name, "nvswitch", "NVL", rate) for name, rate in switched.items()]
        self.links += [Link.of(a, b, "NVL", rate) for (a, b), rate in direct.items()]

    def node(self) -> Node:
        self._wire_nvlinks()
        cpus = sorted(self.cpus)
        for number, a in enumerate(cpus):
            for b in cpus[number + 1 :]:
                rate = min(SOCKET_RATE.get(self.cpus[cpu], min(SOCKET_RATE.values())) for cpu in (a, b))
                self.links.append(Link(a, b, "SYS", rate, LATENCY["SYS"]))
        return node(SOURCE, self.devices, self.links, self.nics, self.notes)


def _pcie(element: _Element) -> float:
    """Bytes per second of a PCI device's upper link; generation 4 with 16 lanes where the file does not say."""
    return pcie_rate(element.has, "link_speed", "link_width") or PCIE_RATE


def pcie_rate(has: Mapping[str, str], speed: str, width: str) -> float | None:
    """From "16.0 GT/s PCIe" and "16" as the kernel writes them; None where it writes neither or Unknown."""
    found = re.match(r"\s*(\d{1,4}(?:\.\d{1,3})?)\s*GT/s", has.get(speed, ""))
    lanes = re.fullmatch(r"\s*(\d{1,3})\s*", has.get(width, ""))
    if found is None or lanes is None or float(found[1]) <= 0 or not 1 <= int(lanes[1]) <= 64:
        return None
    return float(found[1]) * 1e9 * PAYLOAD * int(lanes[1])
