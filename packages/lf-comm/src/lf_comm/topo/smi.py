"""What `nvidia-smi topo -m` prints, as a host.

The matrix says how far two devices are apart, not what is between them. Devices of one class are hung below one vertex,
class after class (PIX below PXB below PHB below NODE below SYS), so that what shares a switch shares its link.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from lf_comm.topo.graph import (
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

SOURCE = "nvidia-smi topo -m"
CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")
NIC_RATE = 12.5e9  # 100 Gb/s, where nobody says
_MOST_LINKS = 18  # NVLinks that a GPU of any generation up to the fifth has
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NVLINK = re.compile(r"NV(\d{1,3})")
_MOST = 4 << 20


def parse_nvidia_smi(
    text: str, *, nvlink_rate: float = NVLINK_RATE[80], nic_rates: Mapping[str, float] | None = None
) -> Node:
    """The host that printed `text`. nvlink_rate: bytes/s of one NVLink; nic_rates: by name of the NIC, else 100 Gb/s.

    TopologyError for a matrix that is cut off, not square, or has cells that nvidia-smi does not print.
    """
    columns, cells, numa = _matrix(text)
    devices = [Device(f"gpu{name[3:]}", "gpu", numa=numa[name]) for name in columns if name.startswith("GPU")]
    if not devices:
        raise TopologyError(SOURCE, "header", " ".join(columns), "a GPU is wanted")
    spoken = {name: f"gpu{name[3:]}" if name.startswith("GPU") else name for name in columns}
    aliases = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)\s*$", text, re.MULTILINE))
    spoken.update({name: alias for name, alias in aliases.items() if name in spoken})
    if len(set(spoken.values())) != len(spoken) or NET in spoken.values():
        raise TopologyError(SOURCE, "legend", str(sorted(spoken.values())), "every name once is wanted")
    nics = [name for name in columns if not name.startswith("GPU")]
    links = [*_tree(columns, cells, numa, spoken), *_nvlinks(columns, cells, spoken, nvlink_rate)]
    rates = nic_rates or {}
    links += [Link.of(spoken[nic], NET, "NET", rates.get(spoken[nic], NIC_RATE)) for nic in nics]
    notes = [f"NVLinks are taken as {nvlink_rate / 1e9:g} GB/s each, PCIe as generation 4 with 16 lanes"]
    unknown = [spoken[nic] for nic in nics if spoken[nic] not in rates]
    if unknown:
        notes.append(f"the rate of {', '.join(unknown)} was not said: {NIC_RATE / 1e9:g} GB/s is assumed")
    return node(SOURCE, devices, links, [spoken[nic] for nic in nics], notes)


def _matrix(text: str) -> tuple[list[str], dict[tuple[str, str], str], dict[str, int | None]]:
    if len(text) > _MOST:
        raise TopologyError(SOURCE, "size", str(len(text)), f"at most {_MOST} characters are wanted")
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    start = next((i for i, words in enumerate(lines) if words and re.fullmatch(r"GPU\d+", words[0])), None)
    if start is None:
        raise TopologyError(SOURCE, "header", text, "a line that begins with GPU0 is wanted")
    header = lines[start]
    columns = header[: header.index("CPU") if "CPU" in header else len(header)]
    if len(set(columns)) != len(columns) or len(columns) > 1024:
        raise TopologyError(
            SOURCE, f"line {start + 1}", " ".join(columns), "up to 1024 columns, each once, are wanted"
        )
    cells: dict[tuple[str, str], str] = {}
    numa: dict[str, int | None] = {}
    for number, name in enumerate(columns):
        at = start + 1 + number
        words = lines[at] if at < len(lines) else []
        where = f"line {at + 1}, row {name}"
        if not words or words[0] != name or len(words) <= len(columns):
            raise TopologyError(
                SOURCE, where, " ".join(words), f"{len(columns)} cells are wanted: the matrix is cut off"
            )
        for column, cell in zip(columns, words[1:], strict=False):
            wanted = cell == "X" if column == name else cell in CLASSES or _NVLINK.fullmatch(cell)
            if not wanted or cell == "NV0":
                raise TopologyError(
                    SOURCE, f"{where}, column {column}", cell, f"NV# or one of {CLASSES} is wanted"
                )
            cells[name, column] = cell
        rest = words[len(columns) + 1 :]
        numa[name] = int(rest[1]) if len(rest) > 1 and re.fullmatch(r"\d{1,4}", rest[1]) else None
    return columns, cells, numa


def _tree(
    columns: list[str],
    cells: Mapping[tuple[str, str], str],
    numa: Mapping[str, int | None],
    spoken: Mapping[str, str],
) -> Iterable[Link]:
    """Devices below switches, switches below sockets; a vertex for every class that joins something."""
    above = {name: name for name in columns}  # of each device, the highest vertex so far
    top = dict(spoken)  # vertex by member that names it
    for level, kind in enumerate(CLASSES):
        near = set(CLASSES[: level + 1])
        group = {name: name for name in columns}

        def root(name: str, group: dict[str, str] = group) -> str:
            while group[name] != name:
                group[name] = name = group[group[name]]
            return name

        for (a, b), cell in cells.items():
            # NVLinked pairs do not say how they are wired beside it; their NUMA node does.
            same = cell.startswith("NV") and numa[a] is not None and numa[a] == numa[b] and kind == "NODE"
            if cell in near or same or kind == "SYS":
                group[root(a)] = root(b)
        families: dict[str, set[str]] = {}
        for name in columns:
            families.setdefault(root(name), set()).add(above[name])
        for members in families.values():
            if len(members) < 2:
                continue
            first = min(members, key=columns.index)
            vertex = f"{kind.lower()}:{spoken[first]}"
            for member in sorted(members, key=columns.index):
                if kind == "SYS":
                    yield Link.of(top[member], vertex, "SYS", min(SOCKET_RATE.values()))
                else:
                    yield Link.of(top[member], vertex, "PCI", PCIE_RATE)
            for name in columns:
                if above[name] in members:
                    above[name] = first
            top[first] = vertex


def _nvlinks(
    columns: list[str], cells: Mapping[tuple[str, str], str], spoken: Mapping[str, str], rate: float
) -> Iterable[Link]:
    """Direct ones, or to a switch where a GPU shows more of them than it can have."""
    count = {pair: int(cell[2:]) for pair, cell in cells.items() if cell.startswith("NV")}
    total = {name: sum(n for (a, _), n in count.items() if a == name) for name in columns}
    switched = {name for name in columns if total[name] > _MOST_LINKS}
    for name in sorted(switched, key=columns.index):
        most = max(n for (a, _), n in count.items() if a == name)
        yield Link.of(spoken[name], "nvswitch", "NVL", most * rate)
    for (a, b), n in count.items():
        if columns.index(a) < columns.index(b) and not {a, b} <= switched:
            yield Link.of(spoken[a], spoken[b], "NVL", n * rate)
