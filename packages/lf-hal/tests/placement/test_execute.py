"""Plans run on torch devices and C targets: the same bits where all is C, within the bound elsewhere, real copies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import cycle

import numpy as np
import pytest
import torch
from placement_models import Model, decode, detector, of, reader
from tagged import MixedDevicesError, TaggedRunner
from traced import EPS, assert_close, longest_sum

import lf_hal
from lf_hal.errors import InputError
from lf_hal.evidence import Evidence
from lf_hal.lir import Graph, TensorType, Value, make_op, reference
from lf_hal.placement import (
    HOST,
    CostTable,
    Device,
    Execution,
    Executor,
    Link,
    Links,
    Plan,
    Pool,
    c_target,
    execute,
    plan,
    signature,
    torch_device,
)
from lf_hal.placement.errors import EmulationNotAllowedError, PlanMismatchError, PoolError

LINKS = Links.both_ways(Link(HOST, "mlu:0", 1e12), Link(HOST, "npu:0", 1e12))
MODELS = {"detector": detector, "reader": reader}


@cache
def model(name: str) -> Model:
    return MODELS[name]()


@cache
def exact(name: str) -> dict[str, np.ndarray]:
    m = model(name)
    return reference.run(m.graph, m.inputs, m.weights, "float64")


@cache
def one_artefact(name: str) -> dict[str, np.ndarray]:
    """Of the graph before any pass, as a user would compile it."""
    m = model(name)
    with lf_hal.compile(m.traced, m.weights) as made:
        return dict(zip(m.graph.outputs, made.run(m.inputs).values(), strict=True))


def in_turns(graph: Graph, devices: Sequence[Device], rows: int) -> Plan:
    """``rows`` groups of ops in a row, the devices taking turns: a group is free on its own device, dear on others."""
    length = -(-len(graph.ops) // rows)
    groups = [graph.ops[i : i + length] for i in range(0, len(graph.ops), length)]
    costs = CostTable()
    for group, turn in zip(groups, cycle(devices), strict=False):
        for device in devices:
            costs.set(device.name, signature(graph, group), 0.0 if device == turn else 1.0)
    for device in devices:
        for op in graph.ops:
            costs.set(device.name, signature(graph, (op,)), 1.0) if length > 1 else None
    names = [[op.output.name for op in group] for group in groups]
    found = plan(graph, Pool(devices), costs, transfer=LINKS, groups=names)
    assert len(found.segments) == len(groups)
    return found


def held_to_twin(name: str, found: dict[str, np.ndarray]) -> None:
    for output, expected in exact(name).items():
        assert_close(found[output], expected, 4 * longest_sum(model(name).graph) * EPS)


@pytest.mark.parametrize("name", MODELS)
def test_segments_of_c_have_the_bits_of_one_artefact(name: str) -> None:
    m = model(name)
    found = in_turns(m.graph, [c_target(name="first"), c_target(name="second")], 2)
    ran = execute(found, m.graph, m.weights, m.inputs)
    assert ran.report.copies == ()
    for output, expected in one_artefact(name).items():
        assert ran.outputs[output].tobytes() == expected.tobytes()


@cache
def torch_and_c(name: str) -> Execution:
    m = model(name)
    found = in_turns(m.graph, [torch_device("cpu:0"), c_target(name="c")], 4)
    return execute(found, m.graph, m.weights, m.inputs, threads=2)


@pytest.mark.parametrize("name", MODELS)
def test_torch_and_c_in_turns_are_within_the_bound(name: str) -> None:
    ran = torch_and_c(name)
    held_to_twin(name, ran.outputs)
    assert {s.evidence for s in ran.report.segments} == {Evidence.VERIFIED}
    assert ran.report.seconds == pytest.approx(sum(s.seconds for s in ran.report.segments))


@pytest.mark.parametrize("name", MODELS)
def test_simulated_devices_get_every_value_by_a_counted_copy(name: str) -> None:
    m = model(name)
    devices = [torch_device("cpu:0"), torch_device("mlu:0", on="cpu"), torch_device("npu:0", on="cpu")]
    found = in_turns(m.graph, devices, 5)
    runners = {d.name: TaggedRunner(d) for d in devices[1:]}
    with Executor(found, m.graph, m.weights, runners=runners) as ready:
        for runner in runners.values():
            runner.log.clear()  # of the weights
        ran = ready.run(m.inputs)
    held_to_twin(name, ran.outputs)
    report = ran.report
    assert report.copied_bytes == found.copied_bytes > 0
    logged = [row for runner in runners.values() for row in runner.log]
    assert sorted(c.nbytes for c in report.copies) == sorted(n for _, n in logged)
    assert all(c.seconds > 0 for c in report.copies)
    labels = {s.device: s.evidence for s in report.segments}
    assert labels == dict(
        zip(("cpu:0", "mlu:0", "npu:0"), (Evidence.VERIFIED, *[Evidence.CONTRACT_ONLY] * 2), strict=True)
    )
    assert "mlu:0 (contract-only)" in str(report)


def test_a_plan_without_its_copies_is_caught_by_the_simulated_device() -> None:
    x, w = torch.ones(2, 2), TensorType("f32", (2, 2))
    runner = TaggedRunner(torch_device("mlu:0", on="cpu"))
    there = runner.receive(x.numpy(), w)
    with pytest.raises(MixedDevicesError, match=r"host, mlu:0"):
        _ = there + x
    with pytest.raises(MixedDevicesError):
        TaggedRunner(torch_device("npu:0", on="cpu")).give(there)


def test_the_marked_neck_of_the_detector_runs_where_it_is_marked() -> None:
    m = detector(mark="mlu290")
    near, far = torch_device("cpu:0"), torch_device("mlu:0", on="cpu", spec="mlu290")
    costs = CostTable(links=LINKS)
    for op in m.graph.ops:
        costs.set(near.name, signature(m.graph, (op,)), 1e-6)
        costs.set(far.name, signature(m.graph, (op,)), 1.0)
    found = plan(m.graph, Pool([near, far]), costs)
    marked = {op.output.name for op in m.graph.ops if op.hardware_affinity == "mlu290"}
    assert marked
    assert {name for name, device in found.placed.items() if device == "mlu:0"} == marked
    ran = execute(found, m.graph, m.weights, m.inputs)
    held_to_twin("detector", ran.outputs)
    assert {c.target for c in ran.report.copies} == {"mlu:0", HOST}


def test_the_reader_reads_the_same_text_as_torch() -> None:
    m = model("reader")
    with torch.no_grad():
        expected = decode(m.module(torch.from_numpy(next(iter(m.inputs.values())))).numpy())
    assert any(expected)
    (scores,) = torch_and_c("reader").outputs.values()
    assert decode(scores) == expected


def test_plans_of_measured_costs_run_and_tables_serve_again(tmp_path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    )
    m = of(net, torch.randn(1, 3, 8, 8))
    pool = Pool([torch_device("cpu:0"), c_target(name="c"), torch_device("mlu:0", on="cpu")])
    costs = CostTable().measure_links(pool, repeats=2)
    whole = [[op.output.name for op in m.graph.ops]]
    for device in pool.devices:
        costs.measure(m.graph, device, groups=whole, repeats=2)
    costs.save(tmp_path / "costs.json")
    again = CostTable.load(tmp_path / "costs.json")
    assert again == costs
    assert {(k.source, k.target) for k in again.links.links} == {(HOST, "mlu:0"), ("mlu:0", HOST)}
    assert {c.how for (d, _), c in again.costs.items() if d != "mlu:0"} == {"measured"}
    assert {c.how for (d, _), c in again.costs.items() if d == "mlu:0"} == {"simulated"}
    assert all(0 <= c.seconds < 60 for c in again.costs.values())
    known = dict(again.costs)
    again.measure(m.graph, pool.devices[1])
    assert again.costs == known  # nothing was timed anew
    found = plan(m.graph, pool, again)
    assert found.exact
    ran = execute(found, m.graph, m.weights, m.inputs)
    expected = reference.run(m.graph, m.inputs, m.weights, "float64")
    for name, array in ran.outputs.items():
        assert_close(array, expected[name], 4 * 144 * EPS)


def test_the_same_costs_give_the_same_plan() -> None:
    m = model("detector")
    devices = [torch_device("cpu:0"), torch_device("mlu:0"), torch_device("npu:0")]
    assert in_turns(m.graph, devices, 6) == in_turns(m.graph, devices, 6)


def test_a_plan_of_another_graph_is_refused() -> None:
    m = model("reader")
    found = in_turns(m.graph, [torch_device("cpu:0")], 1)
    with pytest.raises(PlanMismatchError):
        Executor(found, model("detector").graph, {})


def test_an_explicit_device_never_falls_back() -> None:
    m = model("reader")
    found = in_turns(m.graph, [torch_device("npu:0")], 1)
    with pytest.raises(PoolError, match="torch cannot use npu:0"):
        Executor(found, m.graph, m.weights)


def test_emulators_are_used_only_where_that_is_allowed() -> None:
    m = model("reader")
    elsewhere = "loongarch64-lasx" if lf_hal.resolve_target("native").machine == "x86_64" else "x86-64-sse2"
    device = c_target(elsewhere)
    assert device.space == elsewhere
    assert device.evidence is Evidence.EMULATED
    costs = CostTable(links=Links.both_ways(Link(HOST, elsewhere, 1e9)))
    for op in m.graph.ops:
        costs.set(elsewhere, signature(m.graph, (op,)), 1.0)
    found = plan(m.graph, Pool([device]), costs)
    assert "(emulated)" in str(found)
    with pytest.raises(EmulationNotAllowedError, match="allow_emulated"):
        Executor(found, m.graph, m.weights)
    with pytest.raises(EmulationNotAllowedError):
        CostTable().measure(m.graph, device)


@pytest.mark.cross
def test_a_head_on_emulated_loongarch_keeps_the_bits_and_is_labelled() -> None:
    m = model("detector")
    far = c_target("loongarch64-lasx")
    links = Links.both_ways(Link(HOST, far.name, 1e9))
    half = len(m.graph.ops) - 12
    costs = CostTable(links=links)
    groups = (m.graph.ops[:half], m.graph.ops[half:])
    for group, cheap in zip(groups, ("c", far.name), strict=True):
        for device in ("c", far.name):
            costs.set(device, signature(m.graph, group), 0.0 if device == cheap else 1.0)
    names = [[op.output.name for op in group] for group in groups]
    found = plan(m.graph, Pool([c_target(name="c"), far]), costs, groups=names)
    ran = execute(found, m.graph, m.weights, m.inputs, allow_emulated=True)
    assert [s.evidence for s in ran.report.segments] == [Evidence.VERIFIED, Evidence.EMULATED]
    assert ran.report.copied_bytes == found.copied_bytes > 0
    for output, expected in one_artefact("detector").items():
        assert ran.outputs[output].tobytes() == expected.tobytes()


def shapes() -> tuple[Graph, np.ndarray]:
    x, w = Value("x", TensorType("f32", (2, 3))), Value("w", TensorType("f32", (2,)))
    y = make_op("reshape", "y", [x], {"shape": (3, 2)})
    z = make_op("permute", "z", [y.output], {"perm": (1, 0)})
    graph = Graph("shapes", (x,), (w,), (), (y, z), ("y", "z", "x", "w"))
    return graph, np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize("device", [torch_device("cpu:0"), torch_device("mlu:0", on="cpu"), c_target()])
def test_outputs_are_the_callers_own(device: Device) -> None:
    graph, x = shapes()
    costs = CostTable(links=LINKS)
    for op in graph.ops:
        costs.set(device.name, signature(graph, (op,)), 1.0)
    weight = np.ones(2, np.float32)
    with Executor(plan(graph, Pool([device]), costs), graph, {"w": weight}) as ready:
        first = ready.run([x]).outputs
        for array in first.values():
            array += 1
        assert x.ravel().tolist() == [0, 1, 2, 3, 4, 5]
        second = ready.run({"x": x}).outputs
    assert second["z"].tolist() == x.reshape(3, 2).T.tolist()
    assert second["w"].tolist() == weight.tolist() == [1, 1]
    assert second["x"].tolist() == x.tolist()


def test_inputs_of_another_form_are_refused() -> None:
    graph, x = shapes()
    costs = CostTable()
    for op in graph.ops:
        costs.set("cpu:0", signature(graph, (op,)), 1.0)
    with Executor(
        plan(graph, Pool([torch_device("cpu:0")]), costs), graph, {"w": np.ones(2, np.float32)}
    ) as ready:
        for bad in ([x.astype(np.float64)], [x[:1]], [], {"q": x}, {}):
            with pytest.raises(InputError):
                ready.run(bad)
