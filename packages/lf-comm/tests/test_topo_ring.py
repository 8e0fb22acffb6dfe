"""Rings built by real ranks, what NCCL was told by whom, and warnings."""

from __future__ import annotations

from pathlib import Path

import pytest
import topo_jobs as jobs
from comm_ranks import Ranks
from topo_hosts import a100, cluster, from_xml, hccl, two_hosts, two_sockets

from lf_comm.topo import (
    Device,
    Link,
    Setting,
    Topology,
    TopologyAwareRingBuilder,
    TopologyError,
    effective_settings,
    from_rates,
    node,
    parse_hccl,
    parse_nvidia_smi,
    transports,
    warnings,
    with_network,
)
from lf_comm.topo.ring import _local_device


def test_ranks_build_the_same_ring_and_sum_in_its_order(ranks: Ranks) -> None:
    found = ranks.call(jobs.ordered, 4, hosts=2, gpus=True)
    order = found[0]["ranks"]
    assert sorted(order) == [0, 1, 2, 3]
    assert {order[0] % 2, order[1] % 2} in ({0}, {1})  # one host after the other
    for rank, each in enumerate(found):
        assert each["ranks"] == order
        assert each["place"] == order.index(rank)
        assert each["gathered"] == list(order)
        assert each["sum"] == [6.0] * 3
        assert each["hosts"] == ("machine0", "machine1")
        assert each["gain"] > 1.5
        assert sorted(each["via"]) == ["NET/Socket", "NET/Socket", "P2P/NVLink"]
    assert found[0]["launch"] == (
        "machine0: --node-rank 0, CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,1",
        "machine1: --node-rank 1, CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,1",
    )
    assert "no NIC was seen: one of 1.2 GB/s is assumed" in found[0]["text"]


def test_gpus_of_one_host_are_ordered_by_socket(ranks: Ranks) -> None:
    found = ranks.call(jobs.ordered, 4, hosts=1, gpus=True)
    order = found[0]["ranks"]
    assert [rank % 2 for rank in order] in ([0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1])
    shown = ",".join(map(str, order))
    assert found[0]["launch"] == (
        f"machine0: --node-rank 0, CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={shown}",
    )


def test_ranks_without_accelerators_count_as_processes(ranks: Ranks) -> None:
    for world, hosts in [(1, 1), (3, 3), (4, 2)]:
        for rank, each in enumerate(ranks.call(jobs.ordered, world, hosts=hosts, gpus=False)):
            assert each["kind"] == "cpu"
            assert each["place"] == each["ranks"].index(rank)
            assert "ranks count as processes on CPUs" in each["text"]
            assert set(each["via"]) <= {"Gloo/TCP"}


@pytest.mark.parametrize(
    ("local", "visible", "device"),
    [
        ("1", None, 1),
        (None, None, 0),
        ("1", "3,2", 2),
        ("1", "", 1),
        ("2", "3,2", -1),
        ("0", "GPU-8f1c", -1),
        ("9", None, -1),
        ("x", None, -1),
    ],
)
def test_the_device_of_a_rank_is_what_its_variables_say(
    local: str | None, visible: str | None, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOCAL_RANK", local), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert _local_device(4) == device


def test_a_ring_that_enters_a_host_twice_cannot_be_launched() -> None:
    kept = TopologyAwareRingBuilder(parse_hccl(hccl([2, 2])))
    assert kept.launch() == (
        "10.0.0.0: --node-rank 0, ASCEND_RT_VISIBLE_DEVICES=0,1",
        "10.0.0.1: --node-rank 1, ASCEND_RT_VISIBLE_DEVICES=0,1",
    )
    one = (
        Link.of("d0", "nic", "PCI", 1e9),
        Link.of("d1", "nic", "PCI", 1e9),
        Link.of("nic", "net", "NET", 1e12),
    )
    host = node("test", [Device("d0", "cpu"), Device("d1", "cpu")], one)
    # Devices talk through their slow links in either case: ranks in turns cost nothing that counts, and are kept.
    builder = TopologyAwareRingBuilder(Topology.of([host, host], round_robin=True), nbytes=1 << 60)
    assert builder.ranks == (0, 1, 2, 3)
    with pytest.raises(RuntimeError, match="twice"):
        builder.launch()
    with pytest.raises(ValueError, match="nbytes=0"):
        TopologyAwareRingBuilder(from_xml(), 0)


def test_settings_name_who_made_them(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_bytes(
        b"# a comment\nNCCL_ALGO=Ring\nNCCL_P2P_LEVEL=SYS\nnonsense\nPATH=/bad\n\xff\xfe=1\n"
    )
    (tmp_path / "nccl.conf").write_text("NCCL_ALGO=Tree\nNCCL_IB_HCA=mlx5_1\n")
    env = {"NCCL_P2P_LEVEL": "NVL", "HOME": "/x"}
    found = {each.name: each for each in effective_settings(env, tmp_path, tmp_path / "nccl.conf")}
    assert found["NCCL_P2P_LEVEL"] == Setting("NCCL_P2P_LEVEL", "NVL", "environment")
    assert found["NCCL_ALGO"] == Setting("NCCL_ALGO", "Ring", str(tmp_path / ".nccl.conf"))
    assert found["NCCL_IB_HCA"].origin == str(tmp_path / "nccl.conf")
    assert found["NCCL_IB_DISABLE"] == Setting("NCCL_IB_DISABLE", "0", "default")
    assert "PATH" not in found
    other = tmp_path / "other"
    other.write_text("NCCL_PROTO=LL")
    env["NCCL_CONF_FILE"] = str(other)
    found = {each.name: each for each in effective_settings(env, tmp_path, tmp_path / "missing")}
    assert found["NCCL_PROTO"].origin == str(other)
    assert found["NCCL_ALGO"].origin == "default"  # ~/.nccl.conf is not read then
    assert env == {"NCCL_P2P_LEVEL": "NVL", "HOME": "/x", "NCCL_CONF_FILE": str(other)}


def told(**values: str) -> list[Setting]:
    return [Setting(f"NCCL_{name}", value, "environment") for name, value in values.items()]


@pytest.mark.parametrize(
    ("text", "said", "via"),
    [
        (a100(), {}, "P2P/NVLink"),
        (a100(), {"P2P_DISABLE": "1"}, "SHM"),
        (a100(), {"P2P_LEVEL": "0"}, "SHM"),
        (two_sockets([0, 1]), {}, "SHM"),
        (two_sockets([0, 1]), {"P2P_LEVEL": "SYS"}, "P2P/PCIe"),
        (two_sockets([0, 1]), {"P2P_LEVEL": "5"}, "P2P/PCIe"),
        (two_sockets([0, 0]), {"P2P_LEVEL": "PHB"}, "P2P/PCIe"),
        (two_sockets([0, 0]), {"SHM_DISABLE": "1"}, "NET"),
    ],
)
def test_peers_of_a_host_are_reached_as_nccl_would(text: str, said: dict[str, str], via: str) -> None:
    found = transports(Topology.of([parse_nvidia_smi(text)]), 0, told(**said))[0]
    assert (found.peer, found.via) == (1, via)
    assert found.reason


def test_peers_elsewhere_are_reached_through_the_nic() -> None:
    near, *_, far = transports(cluster(2, round_robin=False), 0)
    assert (near.via, far.via, far.rate) == ("P2P/NVLink", "NET/IB", 12.5e9)
    assert transports(two_hosts(), 0, told(IB_DISABLE="1"))[0].via == "NET/Socket"
    assert transports(two_hosts(), 0, told(NET="Socket"))[0].reason == "NCCL_NET=Socket"
    assert [each.via for each in transports(parse_hccl(hccl([2, 1])), 0)] == ["HCCL/HCCS", "HCCL/RoCE"]
    with pytest.raises(ValueError, match="rank=99"):
        transports(two_hosts(), 99)


def test_what_is_slower_than_its_links_is_warned_of() -> None:
    topology = two_hosts()
    assert warnings(topology) == ()
    (tcp,) = warnings(topology, told(IB_DISABLE="1"))
    assert "NCCL_IB_DISABLE=1 (environment) sends everything over TCP though mlx5_0" in tcp
    (p2p,) = warnings(topology, told(P2P_DISABLE="1"))
    assert "leaves the NVLinks unused" in p2p
    assert warnings(topology, measured=60e9) == ()  # eight NICs of 12.5 GB/s
    (slow,) = warnings(topology, measured=5e9)
    assert "at 5 GB/s where the links allow 100 GB/s: look for a fall-back to TCP" in slow
    pcie = parse_nvidia_smi(two_sockets([0, 0], nics=4))
    assert warnings(Topology.of([pcie, pcie]), measured=13e9) == ()  # four NICs, but PCIe between the devices
    one_host = Topology.of([parse_nvidia_smi(a100())])
    assert warnings(one_host, measured=200e9) == ()
    assert "240 GB/s" in warnings(one_host, measured=20e9)[0]
    (plain,) = warnings(Topology.of([parse_nvidia_smi(a100(0))] * 2, network=1e9))
    assert "no RDMA device is seen" in plain
    rates = [[0.0, 4e9], [4e9, 0.0]]
    assert warnings(from_rates(rates), measured=3e9) == ()
    assert "allow 4 GB/s" in warnings(from_rates(rates), measured=1e9)[0]
    processes = node("test", [Device("a", "cpu"), Device("b", "cpu")], [Link.of("a", "b", "PCI", 1e12)])
    assert warnings(Topology.of([processes]), measured=1e3) == ()  # nothing is known of what connects them


def test_hosts_that_cannot_reach_each_other_are_refused() -> None:
    lone = parse_nvidia_smi(two_sockets([0, 1]))
    with pytest.raises(TopologyError, match="a NIC is wanted"):
        Topology.of([lone, lone])
    joined = Topology.of([lone, lone], network=1e9)
    assert joined.size == 4
    assert any("no NIC was seen" in note for note in joined.nodes[0].notes)
    assert with_network(joined.nodes[0], 5e9) is joined.nodes[0]
    with pytest.raises(TopologyError, match="a device of a host"):
        Topology(("a",), (lone,), ((0, 5),))
    with pytest.raises(TopologyError, match="of its own"):
        Topology(("a",), (lone,), ((0, 0), (0, 0)))
    with pytest.raises(TopologyError, match="switches above"):
        Topology.of([lone, lone], network=1e9, groups=[["a"]])
    with pytest.raises(TopologyError, match="at least 1"):
        Topology.of([lone], oversubscription=0.5)
    with pytest.raises(TopologyError, match="connected"):
        node("test", [Device("a"), Device("b")], [])
