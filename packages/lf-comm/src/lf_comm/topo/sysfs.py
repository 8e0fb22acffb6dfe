"""What the kernel shows of this host in /sys, and what nvidia-smi adds when it is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from lf_comm.topo.graph import (
    LATENCY,
    NET,
    PCIE_RATE,
    SOCKET_RATE,
    Device,
    Link,
    Node,
    TopologyError,
    node,
)
from lf_comm.topo.nccl_xml import pcie_rate
from lf_comm.topo.smi import parse_nvidia_smi

_BUS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# vendor of PCI, first digits of its class -> kind
_ACCELERATORS = {("0x10de", "0x0302"): "gpu", ("0x10de", "0x0300"): "gpu", ("0x19e5", "0x1200"): "npu"}
_ACCELERATORS |= {("0x1002", "0x0380"): "gpu", ("0x1002", "0x1200"): "gpu", ("0xcabc", "0x1200"): "npu"}
_SMI_PATIENCE_S = 30.0


def read_sys(root: Path = Path("/sys")) -> Node | None:
    """The host as /sys shows it: accelerators and NICs on their PCI bridges, below sockets; None without accelerator.

    /sys has no NVLink and no HCCS: use :func:`discover`, or the XML of NCCL, where there are any. A numa_node of -1, as
    virtual machines write it, puts the device below a socket "cpu?" shared by all such devices.
    """
    found = _Bus(root)
    for path in sorted((root / "bus/pci/devices").glob("*")):
        found.add(path)
    return found.node() if found.devices else None


def discover(root: Path = Path("/sys"), smi: str = "nvidia-smi") -> tuple[Node | None, tuple[str, ...]]:
    """(this host, what was looked at and what was missing). None: no accelerator is visible.

    The matrix of nvidia-smi is preferred, as it has the NVLinks; rates of NICs are from /sys. Nothing that is missing
    is an error: each is a note.
    """
    seen = read_sys(root)
    text, note = _ask_smi(smi)
    if text is None:
        return seen, (
            note,
            "no accelerator in /sys" if seen is None else "the host is as /sys shows it, without NVLink",
        )
    rates = {} if seen is None else {link.a: link.rate for link in seen.links if link.kind == "NET"}
    try:
        return parse_nvidia_smi(text, nic_rates=rates), (note, *(() if seen is None else seen.notes))
    except TopologyError as error:
        return seen, (f"nvidia-smi was not understood ({error}): the host is as /sys shows it",)


def _ask_smi(command: str) -> tuple[str | None, str]:
    try:
        done = subprocess.run(
            [command, "topo", "-m"], capture_output=True, text=True, timeout=_SMI_PATIENCE_S, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{command} gave no matrix: {error}"
    if done.returncode:
        return (
            None,
            f"{command} gave no matrix: exit {done.returncode}, {(done.stderr or done.stdout).strip()[:120]}",
        )
    return done.stdout, f"{command} topo -m was read"


def _read(path: Path) -> str:
    """Some files of /sys are there and cannot be read, such as the speed of an interface that is down."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


class _Bus:
    """Gathers the devices of interest and the bridges above them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.devices: list[Device] = []
        self.nics: list[str] = []
        self.links: dict[tuple[str, str], Link] = {}
        self.cpus: set[str] = set()
        self.notes: list[str] = []

    def add(self, path: Path) -> None:
        kind = _ACCELERATORS.get((_read(path / "vendor"), _read(path / "class")[:6]))
        nics = self._nics_of(path)
        if kind is None and not nics:
            return
        numa = _read(path / "numa_node")
        number = int(numa) if re.fullmatch(r"\d{1,4}", numa) else None
        bus = self._climb(path, number)
        if kind is not None:
            name = f"{kind}{sum(device.kind == kind for device in self.devices)}"
            self.devices.append(Device(name, kind, bus, number))
            self._wire(Link(name, f"pci:{bus}", "PCI", 1e15, 0.0))
            if number is None:
                self.notes.append(f"{name} names no NUMA node")
            self._narrow(path, name)
        for nic, rate in nics.items():
            self.nics.append(nic)
            self._wire(Link(f"pci:{bus}", nic, "PCI", 1e15, 0.0))
            self._wire(Link.of(nic, NET, "NET", rate))

    def _wire(self, link: Link) -> None:
        self.links.setdefault((link.a, link.b), link)

    def _climb(self, path: Path, numa: int | None) -> str:
        """Links from the socket down to the device; its bus id."""
        real = path.resolve()
        chain = [part for part in real.parts if _BUS.fullmatch(part.lower())] or [path.name]
        cpu = "cpu?" if numa is None else f"cpu{numa}"
        self.cpus.add(cpu)
        above = cpu
        for bus in chain:
            folder = Path(*real.parts[: real.parts.index(bus) + 1]) if bus in real.parts else real
            has = {key: _read(folder / key) for key in ("current_link_speed", "current_link_width")}
            rate = pcie_rate(has, "current_link_speed", "current_link_width") or PCIE_RATE
            self._wire(Link.of(above, f"pci:{bus.lower()}", "PCI", rate))
            above = f"pci:{bus.lower()}"
        return chain[-1].lower()

    def _narrow(self, path: Path, name: str) -> None:
        now, most = (_read(path / f"{which}_link_width") for which in ("current", "max"))
        if now.isdecimal() and most.isdecimal() and 0 < int(now) < int(most):
            self.notes.append(f"{name} runs with {now} of its {most} PCIe lanes: look at its slot")

    def _nics_of(self, path: Path) -> dict[str, float]:
        """Bytes per second by name; RDMA devices hide the Ethernet interfaces of the same function."""
        found = {}
        for nic in sorted((path / "infiniband").glob("*")):
            rates = [
                re.match(r"(\d{1,5}(?:\.\d+)?) Gb/sec", _read(port / "rate")) for port in nic.glob("ports/*")
            ]
            gbits = sum(float(rate[1]) for rate in rates if rate)
            if gbits > 0:
                found[nic.name] = gbits * 1e9 / 8
            else:
                self.notes.append(f"{nic.name} has no active port: left out")
        if found:
            return found
        for nic in sorted((path / "net").glob("*")):
            speed = _read(nic / "speed")
            if speed.isdecimal() and 0 < int(speed) < 10**8:
                found[nic.name] = int(speed) * 1e6 / 8
        return found

    def node(self) -> Node:
        links = list(self.links.values())
        cpus = sorted(self.cpus)
        vendor = re.search(r"^vendor_id\s*:\s*(\S+)", _read(self.root.parent / "proc/cpuinfo"), re.MULTILINE)
        rate = SOCKET_RATE.get(vendor[1] if vendor else "", min(SOCKET_RATE.values()))
        links += [
            Link(a, b, "SYS", rate, LATENCY["SYS"])
            for number, a in enumerate(cpus)
            for b in cpus[number + 1 :]
        ]
        return node("/sys", self.devices, links, self.nics, self.notes)
