"""What connects the ranks of a job: read it, order ranks by it, say why.

    builder = TopologyAwareRingBuilder.from_group()     # all ranks
    print(builder.explain(), builder.picture(), sep="\\n")
    group = builder.new_group()                          # a group in the order of the ring

Reads /sys, ``nvidia-smi topo -m``, NCCL's topology XML and HCCL rank tables into one graph. Sets nothing.
"""

from lf_comm.topo.explain import explain, picture
from lf_comm.topo.graph import (
    Device,
    Link,
    Node,
    Topology,
    TopologyError,
    from_rates,
    node,
    node_from_json,
    node_to_json,
    with_network,
)
from lf_comm.topo.hccl import parse_hccl
from lf_comm.topo.nccl_xml import parse_nccl_xml
from lf_comm.topo.order import RingOrder, best_order
from lf_comm.topo.ring import TopologyAwareRingBuilder
from lf_comm.topo.simulate import Routes, Simulation, simulate
from lf_comm.topo.smi import parse_nvidia_smi
from lf_comm.topo.sysfs import discover, read_sys
from lf_comm.topo.transport import Setting, Transport, distance, effective_settings, transports, warnings

__all__ = [
    "Device",
    "Link",
    "Node",
    "RingOrder",
    "Routes",
    "Setting",
    "Simulation",
    "Topology",
    "TopologyAwareRingBuilder",
    "TopologyError",
    "Transport",
    "best_order",
    "discover",
    "distance",
    "effective_settings",
    "explain",
    "from_rates",
    "node",
    "node_from_json",
    "node_to_json",
    "parse_hccl",
    "parse_nccl_xml",
    "parse_nvidia_smi",
    "picture",
    "read_sys",
    "simulate",
    "transports",
    "warnings",
    "with_network",
]
