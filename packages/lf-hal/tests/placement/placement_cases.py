"""Random graphs, pools and costs, and a brute-force oracle that shares no code with the planner."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from lf_hal.lir import Graph, Op, TensorType, Value, make_op
from lf_hal.placement import HOST, CostTable, Device, Link, Links, Pool, signature, torch_device


def value(name: str, *shape: int) -> Value:
    return Value(name, TensorType("f32", shape))


class Maker:
    """A graph of vectors, whose lengths differ so that copies cost different times."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.inputs = [value("x", self.random.randint(1, 4))]
        self.weights: list[Value] = []
        self.ops: list[Op] = []

    def linear(self, x: Value) -> Value:
        size = self.random.randint(1, 4)
        old = [w for w in self.weights if w.type.shape[1] == x.type.shape[0]]
        if old and self.random.random() < 0.3:
            w = self.random.choice(old)  # read by two ops
        else:
            w = value(f"w{len(self.weights)}", size, x.type.shape[0])
            self.weights.append(w)
        return self.add("linear", [x, w])

    def add(self, kind: str, inputs: list[Value], **attrs: object) -> Value:
        affinity = self.random.choice((None,) * 12 + ("mlu",))
        op = make_op(kind, f"v{len(self.ops)}", inputs, attrs, affinity)  # type: ignore[arg-type]
        self.ops.append(op)
        return op.output


def chain(seed: int, length: int) -> Graph:
    maker = Maker(seed)
    x = maker.inputs[0]
    for _ in range(length):
        x = maker.linear(x) if maker.random.random() < 0.6 else maker.add("unary", [x], fn="relu")
    return Graph("chain", tuple(maker.inputs), tuple(maker.weights), (), tuple(maker.ops), (x.name,))


def dag(seed: int, length: int) -> Graph:
    """Ops read any earlier values, so some are read far away and more than once; several outputs."""
    maker = Maker(seed)
    maker.inputs.append(value("y", maker.random.randint(1, 4)))
    alive = list(maker.inputs)
    for _ in range(length):
        choice = maker.random.random()
        if choice < 0.4:
            alive.append(maker.linear(maker.random.choice(alive)))
        elif choice < 0.8:
            parts = [maker.random.choice(alive) for _ in range(maker.random.randint(2, 3))]
            alive.append(maker.add("concat", parts, axis=0))
        else:
            alive.append(maker.add("unary", [maker.random.choice(alive)], fn="tanh"))
    made = [op.output.name for op in maker.ops]
    outputs = {made[-1], *(n for n in made if maker.random.random() < 0.2)}
    ordered = tuple(n for n in made if n in outputs)
    return Graph("dag", tuple(maker.inputs), tuple(maker.weights), (), tuple(maker.ops), ordered)


@dataclass(frozen=True)
class Setting:
    pool: Pool
    costs: CostTable
    links: Links


def setting(seed: int, graph: Graph, limited: bool) -> Setting:
    """Two devices in the host's memory and two with their own, of which one refuses concat; costs in whole seconds."""
    rng = random.Random(seed)
    devices = [torch_device("cpu:0"), torch_device("mlu:0")]
    if rng.random() < 0.7:
        devices.append(torch_device("npu:0", refuses=["concat"] if rng.random() < 0.5 else []))
    spaces = [HOST, *(d.space for d in devices if d.space != HOST)]
    links = []
    for a, b in itertools.permutations(spaces, 2):
        if HOST in (a, b) or rng.random() < 0.5:  # others go by way of the host
            links.append(Link(a, b, 4.0 / rng.randint(1, 4), float(rng.randint(0, 3))))
    costs = CostTable()
    for device in devices:
        costs.launch[device.name] = float(rng.randint(0, 2))
        for op in graph.ops:
            costs.set(device.name, signature(graph, (op,)), float(rng.randint(0, 12)))
    limits = {s: rng.randint(8, 120) for s in spaces if rng.random() < 0.7} if limited else {}
    return Setting(Pool(devices, limits), costs, Links(tuple(links)))


def _able(op: Op, device: Device) -> bool:
    meant = op.hardware_affinity is None or op.hardware_affinity == device.type
    return meant and op.kind not in device.refuses


def brute_force(graph: Graph, at: Setting) -> float | None:
    """The least time over every assignment of devices to ops that is allowed and fits; None if there is none."""
    choices = [[d for d in at.pool.devices if _able(op, d)] for op in graph.ops]
    runs = (simulate(graph, at, picked) for picked in itertools.product(*choices))
    limits = at.pool.memory.items()
    times = (seconds for seconds, held in runs if all(held[s] <= limit for s, limit in limits))
    return min(times, default=None)


def simulate(graph: Graph, at: Setting, picked: tuple[Device, ...]) -> tuple[float, dict[str, int]]:
    """Run the graph step by step: the time, and the most bytes that each memory held."""
    size = {v.name: 4 * v.type.elements for v in graph.values()}
    flows = {v.name for v in graph.inputs} | {op.output.name for op in graph.ops}
    lies: dict[str, set[str]] = {v.name: {HOST} for v in graph.inputs}
    weights: dict[str, set[str]] = {s: set() for s in at.pool.spaces}
    most = dict.fromkeys(at.pool.spaces, 0)
    clock, before = 0.0, None

    def account() -> None:
        for space in most:
            most[space] = max(most[space], sum(size[v] for v in lies if space in lies[v]))

    def drop_unread(done: int) -> None:
        for name in list(lies):
            if not any(name in op.inputs for op in graph.ops[done:]):
                lies[name] &= {HOST} if name in graph.outputs else set()

    def copy_time(name: str, target: str) -> float:
        direct = {(k.source, k.target): k.latency + size[name] / k.bandwidth for k in at.links.links}
        ways = []
        for source in lies[name]:
            by_host = direct.get((source, HOST), 1e99) + direct.get((HOST, target), 1e99)
            ways.append(direct.get((source, target), by_host))
        return min(ways)

    drop_unread(0)
    account()
    for number, (op, device) in enumerate(zip(graph.ops, picked, strict=True)):
        if device is not before:
            clock += at.costs.launch[device.name]
        before = device
        for name in dict.fromkeys(op.inputs):
            if name not in flows:
                weights[device.space].add(name)
            elif device.space not in lies[name]:
                clock += copy_time(name, device.space)
                lies[name].add(device.space)
        clock += at.costs.costs[device.name, signature(graph, (op,))].seconds
        lies[op.output.name] = {device.space}
        if op.output.name in graph.outputs and device.space != HOST:
            clock += copy_time(op.output.name, HOST)
            lies[op.output.name].add(HOST)
        account()
        drop_unread(number + 1)
    return clock, {space: n + sum(size[w] for w in weights[space]) for space, n in most.items()}
