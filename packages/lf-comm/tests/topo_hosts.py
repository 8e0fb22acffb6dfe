"""Hosts of the acceptance cases, as what their tools print."""

from __future__ import annotations

import json
from pathlib import Path

from lf_comm.topo import Node, Topology, parse_nccl_xml, parse_nvidia_smi

HEAD = "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"


def smi(cells: list[list[str]], numa: list[int | str], nics: int = 0) -> str:
    """A matrix as nvidia-smi prints it, underlined header and legend included."""
    names = [f"GPU{i}" for i in range(len(cells) - nics)] + [f"NIC{i}" for i in range(nics)]
    lines = ["\t" + "\t".join(f"\x1b[4m{name}" for name in names) + HEAD + "\x1b[0m"]
    for i, (name, row) in enumerate(zip(names, cells, strict=True)):
        ends = f"\t0-31\t{numa[i]}\t\tN/A" if name.startswith("GPU") else ""
        lines.append("\t".join([name, *(" X " if j == i else cell for j, cell in enumerate(row))]) + ends)
    legend = ["", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing a bonded set of # NVLinks"]
    named = ["", "NIC Legend:", "", *(f"  NIC{i}: mlx5_{i}" for i in range(nics))] if nics else []
    return "\n".join(lines + legend + named) + "\n"


def a100(nics: int = 8) -> str:
    """8 GPUs on an NVSwitch, 4 to a socket, a NIC for each below its switch."""
    cells = []
    for i in range(8 + nics):
        row = []
        for j in range(8 + nics):
            if i < 8 and j < 8:
                row.append("NV12")
            elif i % 8 == j % 8 or (i % 8) // 2 == (j % 8) // 2:
                row.append("PXB")
            else:
                row.append("NODE" if (i % 8) // 4 == (j % 8) // 4 else "SYS")
        cells.append(row)
    return smi(cells, [0, 0, 0, 0, 1, 1, 1, 1], nics)


def two_sockets(sockets: list[int], nics: int = 0) -> str:
    """PCIe only: GPU i below socket sockets[i], pairs of one socket across host bridges; NICs at socket 0."""
    where = [*sockets, *[0] * nics]
    cells = [["NODE" if a == b else "SYS" for b in where] for a in where]
    return smi(cells, [*sockets], nics)


def pairs(order: list[int], width: int = 2) -> str:
    """GPUs wired by NVLink in sets of `width`, the rest across host bridges; `order` says who is with whom."""
    n = len(order)
    where = {gpu: place // width for place, gpu in enumerate(order)}
    cells = [["NV4" if where[a] == where[b] else "SYS" for b in range(n)] for a in range(n)]
    return smi(cells, ["N/A"] * n)


XML = """<system version="1">
  <cpu numaid="0" affinity="0000ffff" arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49">
    <pci busid="0000:01:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:02:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="80" rank="0" gdr="1">{nv0}</gpu>
      </pci>
      <pci busid="0000:03:00.0" class="0x020700" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="200000" port="1" gdr="1"/></nic>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="{second}" affinity="ffff0000" arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49">
    <pci busid="0000:81:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
      <gpu dev="1" sm="80" rank="1" gdr="1">{nv1}</gpu>
    </pci>
  </cpu>
</system>
"""


def xml(wired: bool = True, second: int = 1) -> str:
    """Two GPUs on two sockets, a NIC beside the first."""
    if not wired:
        return XML.format(nv0="", nv1="", second=second)
    link = '<nvlink target="{}" count="4" tclass="0x030200"/>'
    return XML.format(nv0=link.format("0000:81:00.0"), nv1=link.format("0000:02:00.0"), second=second)


def hccl(servers: list[int], version: str = "1.0", pods: int = 1) -> str:
    """A rank table; servers: devices of each."""
    rank, made = 0, []
    for number, count in enumerate(servers):
        devices = []
        for device in range(count):
            each = {"device_id": str(device), "device_ip": f"192.168.{number}.{device}", "rank_id": str(rank)}
            devices.append(each | ({"super_device_id": str(rank)} if version == "1.2" else {}))
            rank += 1
        made.append({"server_id": f"10.0.0.{number}", "device": devices})
    table = {
        "version": version,
        "status": "completed",
        "server_count": str(len(servers)),
        "server_list": made,
    }
    if version == "1.2":
        table["super_pod_list"] = [
            {
                "super_pod_id": str(pod),
                "server_list": [{"server_id": f"10.0.0.{i}"} for i in range(len(servers)) if i % pods == pod],
            }
            for pod in range(pods)
        ]
    return json.dumps(table)


def cluster(nodes: int, round_robin: bool, leaf: int = 16) -> Topology:
    """Hosts of 8 A100 below switches of `leaf` hosts that are not numbered by switch."""
    host: Node = parse_nvidia_smi(a100())
    leaves = -(-nodes // leaf)
    groups = [(f"pod{i % leaves // 8}", f"leaf{i % leaves}") for i in range(nodes)]
    return Topology.of([host] * nodes, groups=groups, oversubscription=2.0, round_robin=round_robin)


def write_sys(root: Path, gpus: list[tuple[str, str]], nic: bool = True) -> Path:
    """A /sys with GPUs (path of bridges and bus id, numa_node) and a NIC of two functions. Returns its root."""
    listed = root / "sys/bus/pci/devices"
    listed.mkdir(parents=True)

    def add(chain: str, files: dict[str, str]) -> Path:
        folder = root / "sys/devices/pci0000:00" / chain
        for part in [*folder.parents][::-1]:
            part.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text + "\n")
        (listed / folder.name).symlink_to(folder)
        return folder

    link = {"current_link_speed": "16.0 GT/s PCIe", "current_link_width": "16", "max_link_width": "16"}
    for chain, numa in gpus:
        add(chain, {"vendor": "0x10de", "class": "0x030200", "numa_node": numa} | link)
    if nic:
        folder = add(
            "0000:00:09.0/0000:09:00.0",
            {"vendor": "0x15b3", "class": "0x020700", "numa_node": gpus[0][1]} | link,
        )
        port = folder / "infiniband/mlx5_0/ports/1"
        port.mkdir(parents=True)
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
        down = add("0000:00:0a.0/0000:0a:00.0", {"vendor": "0x8086", "class": "0x020000", "numa_node": "-1"})
        (down / "net/eth0").mkdir(parents=True)
        (down / "net/eth0/speed").write_text("-1\n")
    return root / "sys"


def two_hosts() -> Topology:
    """7 and 8 GPUs."""
    full = parse_nvidia_smi(a100())
    part = Node(full.devices[:7], full.links, full.nics)
    return Topology.of([part, full], round_robin=True)


def from_xml(**options: bool | int) -> Topology:
    """The one host of :func:`xml`."""
    return Topology.of(list(parse_nccl_xml(xml(**options)).values()))  # type: ignore[arg-type]
