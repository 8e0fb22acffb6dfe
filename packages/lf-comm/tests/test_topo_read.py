"""What parsers make of tools' output, and that anything else is one typed error."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from topo_hosts import a100, hccl, pairs, smi, two_sockets, write_sys, xml

from lf_comm.topo import (
    Topology,
    TopologyError,
    discover,
    distance,
    node_from_json,
    node_to_json,
    parse_hccl,
    parse_nccl_xml,
    parse_nvidia_smi,
    read_sys,
)

ENTITIES = "".join(f'<!ENTITY {chr(98 + i)} "{f"&{chr(97 + i)};" * 10}">' for i in range(9))
BOMB = f'<?xml version="1.0"?><!DOCTYPE system [<!ENTITY a "aaaaaaaaaa">{ENTITIES}]><system>&j;</system>'


def rates(topology: Topology, a: int, b: int) -> tuple[str, float]:
    each = topology.nodes[0]
    start, end = (each.devices[topology.ranks[rank][1]].name for rank in (a, b))
    return distance(topology, a, b), min(each.wires[hop].rate for hop in each.routes(start)[end])


def test_a_matrix_gives_switches_sockets_nvlinks_and_nics() -> None:
    each = parse_nvidia_smi(a100(), nic_rates={"mlx5_3": 25e9})
    topology = Topology.of([each])
    assert [device.name for device in each.devices] == [f"gpu{i}" for i in range(8)]
    assert [device.numa for device in each.devices] == [0] * 4 + [1] * 4
    assert rates(topology, 0, 7) == ("NVLink", 240e9)
    assert each.nics == tuple(f"mlx5_{i}" for i in range(8))
    assert each.wires["mlx5_3", "net"].rate == 25e9
    assert each.routes("gpu6")["net"][-1][0] in ("mlx5_6", "mlx5_7")
    wired = Topology.of([parse_nvidia_smi(pairs([0, 2, 1, 3]))])
    assert rates(wired, 0, 2) == ("NVLink", 80e9)
    assert rates(wired, 0, 1) == ("sockets", 10e9)
    sockets = Topology.of([parse_nvidia_smi(two_sockets([0, 0, 1, 1], nics=1))])
    assert rates(sockets, 0, 1) == ("host bridge", 24e9)
    assert rates(sockets, 0, 2) == ("sockets", 10e9)


def test_nvlinked_gpus_hang_below_the_socket_their_numa_node_names() -> None:
    text = smi([["NV4" if a // 2 == b // 2 else "SYS" for b in range(4)] for a in range(4)], [0, 0, 1, 1])
    wires = parse_nvidia_smi(text).wires
    assert wires["gpu0", "node:gpu0"].kind == wires["gpu3", "node:gpu2"].kind == "PCI"
    assert wires["node:gpu0", "sys:gpu0"].kind == "SYS"
    assert ("gpu0", "sys:gpu0") not in wires


def test_a_matrix_copied_with_blanks_is_read_as_well() -> None:
    assert parse_nvidia_smi(a100().expandtabs(8)) == parse_nvidia_smi(a100())


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "begins with GPU0"),
        ("nvidia-smi: command not found", "begins with GPU0"),
        ("\n".join(a100().splitlines()[:5]), "cut off"),
        (a100()[: a100().index("GPU3\tNV12") + 12], "cut off"),
        (a100().replace("NV12", "NVX"), "NV# or one of"),
        (a100().replace(" X ", "PIX"), "NV# or one of"),
        (a100().replace("NIC0: mlx5_0", "NIC0: net"), "every name once"),
        ("GPU0 GPU0\nGPU0 X X\nGPU0 X X", "each once"),
        ("GPU0 " + "x" * (5 << 20), "characters"),
    ],
)
def test_a_matrix_that_is_none_is_refused(text: str, match: str) -> None:
    with pytest.raises(TopologyError, match=match) as caught:
        parse_nvidia_smi(text)
    assert caught.value.source == "nvidia-smi topo -m"
    assert len(str(caught.value)) < 400
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_xml_gives_buses_sockets_nvlinks_and_nics() -> None:
    (each,) = parse_nccl_xml(xml(wired=False)).values()
    topology = Topology.of([each])
    assert [(device.name, device.bus, device.numa) for device in each.devices] == [
        ("gpu0", "0000:02:00.0", 0),
        ("gpu1", "0000:81:00.0", 1),
    ]
    assert rates(topology, 0, 1) == ("sockets", 16e9)
    assert each.wires["mlx5_0", "net"].rate == 25e9
    assert each.wires["pci:0000:01:00.0", "pci:0000:02:00.0"].rate == 24e9
    assert rates(Topology.of([*parse_nccl_xml(xml()).values()]), 0, 1) == ("NVLink", 80e9)
    switched = xml().replace('tclass="0x030200"', 'tclass="0x068000"')
    assert rates(Topology.of([*parse_nccl_xml(switched).values()]), 0, 1) == ("NVLink", 80e9)
    (unknown,) = parse_nccl_xml(xml(second=-1)).values()
    assert unknown.devices[1].numa is None
    assert any("NUMA" in note for note in unknown.notes)
    hosts = parse_nccl_xml(xml(wired=False).replace("<cpu ", '<cpu host_hash="0x1" ', 1))
    assert sorted(hosts) == ["", "0x1"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "well-formed"),
        (xml()[:-20], "well-formed"),
        (xml()[:400], "well-formed"),
        (BOMB, "without DTD"),
        ('<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><s>&x;</s>', "without DTD"),
        ("<a/>", "<system>"),
        ("<system/>", "<cpu>"),
        ('<system><cpu numaid="0"/></system>', "at least one"),
        ("<system>" + "<cpu>" * 100 + "</cpu>" * 100 + "</system>", "deep"),
        ("<system>" + "<x/>" * 200_001 + "</system>", "elements"),
        (xml(wired=False).replace('dev="1"', 'dev="0"'), "every device once"),
        (xml().replace('dev="1"', 'dev="1e400"'), "number"),
        (xml().replace('dev="1"', 'dev="nan"'), "number"),
        (xml().replace('numaid="1"', 'numaid="0"'), "numaid once"),
        (
            xml().replace("0000:02:00.0", "0000:99:00.0", 1).replace('target="0000:02', 'target="0000:77'),
            "busid",
        ),
        (xml().replace('count="4"', 'count="-4"'), "rate above 0"),
        (xml().replace('<gpu dev="1"', "<gpu "), "number"),
        (xml().replace('name="mlx5_0"', 'name="net"'), "name of its own"),
    ],
)
def test_xml_that_is_no_topology_is_refused(text: str, match: str) -> None:
    with pytest.raises(TopologyError, match=match):
        parse_nccl_xml(text)


def test_rank_tables_give_servers_ranks_and_pods() -> None:
    topology = parse_hccl(hccl([4, 4, 4, 4], "1.2", pods=2))
    assert topology.hosts == tuple(f"10.0.0.{i}" for i in range(4))
    assert topology.groups == (("0",), ("1",), ("0",), ("1",))
    assert topology.ranks[5] == (1, 1)
    assert topology.nodes[0] is topology.nodes[3]
    assert rates(topology, 0, 3) == ("HCCS", 30e9)
    halves = parse_hccl(hccl([8]), mesh=4)
    assert distance(halves, 0, 3) == "HCCS"
    assert distance(halves, 0, 4) == "sockets"
    uneven = parse_hccl(hccl([7, 8]))
    assert uneven.size == 15


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('"1.0"', '"2.0"', "version"),
        ('"completed"', '"initializing"', "still being written"),
        ('"rank_id": "3"', '"rank_id": "9"', "without a gap"),
        ('"rank_id": "3"', '"rank_id": "2"', "once"),
        ('"rank_id": "3"', '"rank_id": 3', "number as text"),
        ('"rank_id": "3"', '"rank_id": "٣"', "number as text"),
        ('"device_id": "3"', '"device_id": "2"', "once"),
        ('"10.0.0.1"', '"10.0.0.0"', "server_id once"),
        ('"server_list"', '"group_list"', "server_list"),
        ("]}", "", "JSON"),
    ],
)
def test_rank_tables_that_are_none_are_refused(old: str, new: str, match: str) -> None:
    with pytest.raises(TopologyError, match=match):
        parse_hccl(hccl([4, 4]).replace(old, new))


def test_a_pod_for_every_server_is_wanted() -> None:
    table = json.loads(hccl([1, 1], "1.2"))
    table["super_pod_list"][0]["server_list"].pop()
    with pytest.raises(TopologyError, match="super pod for every server"):
        parse_hccl(json.dumps(table))
    with pytest.raises(TopologyError, match="JSON"):
        parse_hccl("[" * 100_000)


def cuts(text: str) -> st.SearchStrategy[str]:
    """The text cut, with characters replaced, and with stretches repeated."""
    place = st.integers(0, len(text))
    spoiled = st.tuples(
        place, place, st.text(max_size=8) | st.sampled_from(["NV999", "-1", "\x00", "1e99", '"', "<"])
    )
    return (
        place.map(lambda at: text[:at])
        | spoiled.map(lambda each: text[: each[0]] + each[2] + text[each[1] :])
        | st.text(max_size=200)
    )


@given(cuts(a100(2)))
@settings(max_examples=200, deadline=None)
def test_spoiled_matrices_give_a_host_or_the_typed_error(text: str) -> None:
    with contextlib.suppress(TopologyError):
        assert parse_nvidia_smi(text).devices


@given(cuts(xml()).map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=200))
@example(b'<?xml version="1.0" encoding="idna"?><system/>')
@settings(max_examples=200, deadline=None)
def test_spoiled_xml_gives_hosts_or_the_typed_error(data: bytes) -> None:
    with contextlib.suppress(TopologyError):
        assert parse_nccl_xml(data)


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["version", "status", "server_list", "device", "rank_id", "device_id"]), inner
        )
    ),
    max_leaves=12,
)


@given(cuts(hccl([2, 2], "1.2", 2)) | st.binary(max_size=100) | JSONS.map(json.dumps))
@settings(max_examples=200, deadline=None)
def test_spoiled_rank_tables_give_a_topology_or_the_typed_error(text: bytes | str) -> None:
    with contextlib.suppress(TopologyError):
        assert parse_hccl(text).size


@given(cuts(node_to_json(parse_nvidia_smi(pairs([0, 1])))) | JSONS.map(json.dumps))
@settings(max_examples=100, deadline=None)
def test_hosts_survive_json_and_spoiled_ones_are_the_typed_error(text: str) -> None:
    with contextlib.suppress(TopologyError):
        assert node_from_json(text).devices
    host = parse_nvidia_smi(a100())
    assert node_from_json(node_to_json(host)) == host


SWITCH = "0000:00:01.0/0000:01:00.0"
GPUS = [(f"{SWITCH}/0000:02:00.0", "0"), (f"{SWITCH}/0000:03:00.0", "0"), ("0000:00:08.0/0000:08:00.0", "1")]


def test_sys_gives_bridges_sockets_and_nics(tmp_path: Path) -> None:
    host = read_sys(write_sys(tmp_path, GPUS))
    assert host is not None
    topology = Topology.of([host])
    assert [device.name for device in host.devices] == ["gpu0", "gpu1", "gpu2"]
    assert distance(topology, 0, 1) == "PCIe switch"
    assert rates(topology, 0, 2) == ("sockets", 10e9)
    assert host.nics == ("mlx5_0",)  # eth0 is down
    assert host.wires["mlx5_0", "net"].rate == 25e9


def test_sys_without_numa_nodes_is_one_socket(tmp_path: Path) -> None:
    host = read_sys(write_sys(tmp_path, [(path, "-1") for path, _ in GPUS], nic=False))
    assert host is not None
    assert [device.numa for device in host.devices] == [None] * 3
    assert distance(Topology.of([host]), 0, 2) == "host bridge"
    assert "gpu0 names no NUMA node" in host.notes


def test_a_card_with_half_its_lanes_is_noted(tmp_path: Path) -> None:
    root = write_sys(tmp_path, GPUS)
    (root / "bus/pci/devices/0000:08:00.0/current_link_width").write_text("8\n")
    host = read_sys(root)
    assert host is not None
    assert "gpu2 runs with 8 of its 16 PCIe lanes: look at its slot" in host.notes


def test_without_nvidia_smi_the_host_is_what_sys_shows(tmp_path: Path) -> None:
    root = write_sys(tmp_path, GPUS)
    host, notes = discover(root, smi=str(tmp_path / "missing"))
    assert host == read_sys(root)
    assert "gave no matrix" in notes[0]
    nothing, notes = discover(tmp_path / "empty", smi=str(tmp_path / "missing"))
    assert nothing is None
    assert "no accelerator in /sys" in notes
    assert read_sys(tmp_path / "empty") is None


@pytest.mark.parametrize(
    ("script", "note"),
    [("exit 9", "exit 9"), ("echo nonsense", "not understood"), ("cat matrix", "was read")],
)
def test_nvidia_smi_is_asked_and_its_failure_noted(tmp_path: Path, script: str, note: str) -> None:
    (tmp_path / "matrix").write_text(two_sockets([0, 0, 1], nics=1))
    smi = tmp_path / "smi"
    smi.write_text(f"#!/bin/sh\ncd {tmp_path} && {script}\n")
    smi.chmod(0o755)
    host, notes = discover(write_sys(tmp_path, GPUS), smi=str(smi))
    assert host is not None
    assert len(host.devices) == 3
    assert note in notes[0]
    assert host.wires["mlx5_0", "net"].rate == 25e9
