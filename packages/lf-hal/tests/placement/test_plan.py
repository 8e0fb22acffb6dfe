"""The planner against every placement there is, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import Setting, brute_force, chain, dag, setting, simulate, value

from lf_hal.lir import Graph, make_op
from lf_hal.placement import HOST, CostTable, Link, Links, Plan, Pool, c_target, plan, signature, torch_device
from lf_hal.placement.errors import (
    AffinityUnavailableError,
    MemoryLimitError,
    MissingCostError,
    MissingLinkError,
    PlacementError,
    PlanFormatError,
    PoolError,
    UnplaceableError,
)

SEEDS = st.integers(0, 1 << 32)


def planned(graph: Graph, at: Setting, **options: int) -> Plan:
    return plan(graph, at.pool, at.costs, transfer=at.links, **options)


def check(graph: Graph, at: Setting) -> None:
    best = brute_force(graph, at)
    if best is None:
        with pytest.raises(MemoryLimitError) as caught:
            planned(graph, at)
        assert caught.value.exact
        return
    found = planned(graph, at)
    assert found.exact
    assert found.seconds == pytest.approx(best, rel=1e-12)
    picked = tuple(at.pool.device(found.placed[op.output.name]) for op in graph.ops)
    seconds, held = simulate(graph, at, picked)
    assert seconds == pytest.approx(found.seconds, rel=1e-12)
    assert dict(found.memory) == {space: n for space, n in held.items() if n}
    total = sum(s.seconds for s in found.segments) + sum(c.seconds for c in found.copies)
    assert total == pytest.approx(found.seconds, rel=1e-12)


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 6), st.booleans())
def test_chains_are_placed_as_well_as_by_trying_all(seed: int, length: int, limited: bool) -> None:
    graph = chain(seed, length)
    check(graph, setting(seed, graph, limited))


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 6), st.booleans())
def test_graphs_are_placed_as_well_as_by_trying_all(seed: int, length: int, limited: bool) -> None:
    graph = dag(seed, length)
    check(graph, setting(seed, graph, limited))


@settings(max_examples=30)
@given(SEEDS, st.integers(2, 5))
def test_a_memory_just_too_small_for_the_best_gives_the_second_best(seed: int, length: int) -> None:
    graph = dag(seed, length)
    at = setting(seed, graph, limited=False)
    for space, nbytes in planned(graph, at).memory:
        tight = Setting(Pool(at.pool.devices, {space: nbytes - 1}), at.costs, at.links)
        check(graph, tight)


@settings(max_examples=40)
@given(SEEDS, st.integers(3, 12))
def test_a_beam_says_so_and_is_no_worse_than_the_best_single_device(seed: int, length: int) -> None:
    graph = dag(seed, length)
    at = setting(seed, graph, limited=False)
    narrow, best = planned(graph, at, max_states=1), planned(graph, at)
    assert best.exact
    assert narrow.seconds >= best.seconds - 1e-9
    if not any(op.hardware_affinity for op in graph.ops):
        for device in at.pool.devices:
            if not any(op.kind in device.refuses for op in graph.ops):
                alone, _ = simulate(graph, at, (device,) * len(graph.ops))
                assert narrow.seconds <= alone + 1e-9
    if narrow.seconds > best.seconds + 1e-9:
        assert not narrow.exact
        assert "beam" in str(narrow)


@settings(max_examples=20)
@given(SEEDS, st.integers(1, 6))
def test_a_plan_comes_back_from_json(seed: int, length: int) -> None:
    graph = dag(seed, length)
    found = planned(graph, setting(seed, graph, limited=False))
    assert Plan.from_json(found.to_json()) == found


def test_a_chain_of_a_hundred_ops_is_exact() -> None:
    graph = chain(7, 100)
    assert planned(graph, setting(7, graph, limited=False)).exact


def small(affinity: str | None = None) -> Graph:
    x, w = value("x", 2, 4), value("w", 3, 4)
    y = make_op("linear", "y", [x, w], affinity=affinity)
    z = make_op("unary", "z", [y.output], {"fn": "relu"})
    return Graph("small", (x,), (w,), (), (y, z), ("z",))


def costs_of(graph: Graph, **seconds: float) -> CostTable:
    table = CostTable(links=Links.both_ways(Link(HOST, "npu:0", 1e9, 1e-6)))
    for device, each in seconds.items():
        for op in graph.ops:
            table.set(device.replace("_", ":"), signature(graph, (op,)), each)
    return table


def test_copies_are_charged_so_a_fast_device_far_away_is_left_alone() -> None:
    graph = small()
    pool = Pool([torch_device("cpu:0"), torch_device("npu:0")])
    costs = costs_of(graph, cpu_0=1e-3, npu_0=1e-5)
    near, far = costs.links, Links.both_ways(Link(HOST, "npu:0", 1e9, 1e-2))
    assert set(plan(graph, pool, costs, transfer=near).placed.values()) == {"npu:0"}
    assert set(plan(graph, pool, costs, transfer=far).placed.values()) == {"cpu:0"}
    found = plan(graph, pool, costs)
    assert [(c.value, c.source, c.target, c.nbytes) for c in found.copies] == [
        ("x", HOST, "npu:0", 32),
        ("z", "npu:0", HOST, 24),
    ]
    assert found.copied_bytes == 56
    assert "copy x host -> npu:0: 32 bytes" in str(found)
    assert "contract-only" in str(found)


def test_devices_of_one_memory_share_values() -> None:
    graph = small()
    pool = Pool([torch_device("cpu:0"), c_target()])
    costs = CostTable()
    native = pool.devices[1].name
    for device, each in (("cpu:0", (1.0, 9.0)), (native, (9.0, 1.0))):
        for op, seconds in zip(graph.ops, each, strict=True):
            costs.set(device, signature(graph, (op,)), seconds)
    found = plan(graph, pool, costs)
    assert [s.device for s in found.segments] == ["cpu:0", native]
    assert found.copies == ()
    assert found.seconds == 2.0


def test_a_mark_is_obeyed_by_name_type_and_spec_whatever_it_costs() -> None:
    pool = Pool([torch_device("cpu:0"), torch_device("npu:0", spec="ascend910b"), torch_device("npu:1")])
    for affinity in ("npu", "ascend910b"):
        graph = small(affinity)
        costs = costs_of(graph, cpu_0=1e-6, npu_0=1.0, npu_1=2.0)
        costs.links = Links.both_ways(Link(HOST, "npu:0", 1e9), Link(HOST, "npu:1", 1e9))
        assert plan(graph, pool, costs).placed == {"y": "npu:0", "z": "cpu:0"}


def test_a_mark_for_an_absent_device_is_an_error_and_never_another_device() -> None:
    graph = small("mlu290")
    with pytest.raises(AffinityUnavailableError, match=r"'y'.*mlu290.*cpu:0") as caught:
        plan(graph, Pool([torch_device("cpu:0")]), costs_of(graph, cpu_0=1.0))
    assert (caught.value.what, caught.value.affinity, caught.value.pool) == ("y", "mlu290", ("cpu:0",))


def test_a_marked_op_that_its_device_cannot_run_is_an_error() -> None:
    graph = small("npu")
    pool = Pool([torch_device("cpu:0"), torch_device("npu:0", dtypes=["f16"])])
    with pytest.raises(UnplaceableError, match="npu:0: has no f32") as caught:
        plan(graph, pool, costs_of(graph, cpu_0=1.0, npu_0=1.0))
    assert caught.value.reasons == {"npu:0": "has no f32"}


def test_what_a_c_target_has_no_form_of_goes_elsewhere() -> None:
    x = value("x", 2, 3, 4, 4)
    stats = [value(f"w{i}", 3) for i in range(4)]
    op = make_op("batch_norm", "y", [x, *stats], {"eps": 1e-5})
    graph = Graph("bn", (x,), tuple(stats), (), (op,), ("y",))
    with pytest.raises(UnplaceableError, match="no C form"):
        plan(graph, Pool([c_target()]), CostTable())
    pool = Pool([c_target(), torch_device("cpu:0")])
    assert plan(graph, pool, costs_of(graph, cpu_0=1.0)).placed == {"y": "cpu:0"}


def test_types_of_a_spec_hold_and_index_types_pass() -> None:
    graph = small()
    pool = Pool([torch_device("mlu:0", spec="mlu370")])
    costs = costs_of(graph, mlu_0=1.0)
    costs.links = Links.both_ways(Link(HOST, "mlu:0", 1e9))
    assert plan(graph, pool, costs).placed["y"] == "mlu:0"
    with pytest.raises(PoolError, match="refused"):
        torch_device("npu:0", spec="ascend910a")


def test_what_is_not_known_is_named() -> None:
    graph = small()
    pool = Pool([torch_device("cpu:0"), torch_device("npu:0")])
    with pytest.raises(MissingCostError, match=r"'y' on npu:0 \(linear\(f32\[2,4\], \*f32\[3,4\]\)"):
        plan(graph, pool, costs_of(graph, cpu_0=1.0))
    marked = small("npu")
    with pytest.raises(MissingLinkError, match="host to npu:0"):
        plan(marked, pool, costs_of(marked, cpu_0=1.0, npu_0=1.0), transfer=Links())


def test_groups_stay_together_at_the_cost_measured_for_them() -> None:
    graph = small()
    pool = Pool([torch_device("cpu:0"), torch_device("npu:0")])
    costs = costs_of(graph, cpu_0=1.0, npu_0=5.0)
    assert plan(graph, pool, costs, groups=[["y", "z"]]).placed["y"] == "cpu:0"
    costs.set("npu:0", signature(graph, graph.ops), 0.5, "measured")
    found = plan(graph, pool, costs, groups=[["y", "z"]])
    assert found.placed == {"y": "npu:0", "z": "npu:0"}
    assert found.how == ("measured",)
    with pytest.raises(PlacementError, match="no row"):
        plan(graph, pool, costs, groups=[["z", "y"]])


def test_pools_that_do_not_hold_together_are_refused() -> None:
    cpu = torch_device("cpu:0")
    for devices, memory, words in (
        ([], {}, "at least one"),
        ([cpu, cpu], {}, "twice"),
        ([cpu], {"npu:0": 1}, "no memory of the pool"),
        ([cpu], {HOST: -1}, "integer from 0"),
    ):
        with pytest.raises(PoolError, match=words):
            Pool(devices, memory)
    with pytest.raises(PoolError, match="bandwidth above 0"):
        Links((Link("a", "b", 0.0),))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "lf-hal-plan", "version": 2}', "[" * 9999])
def test_text_that_is_no_plan_is_one_error(text: str) -> None:
    with pytest.raises(PlanFormatError):
        Plan.from_json(text)
    with pytest.raises(PlanFormatError):
        CostTable.from_json(text)


def test_a_plan_with_a_segment_on_a_strange_device_is_refused() -> None:
    graph = small()
    found = plan(graph, Pool([torch_device("cpu:0")]), costs_of(graph, cpu_0=1.0))
    with pytest.raises(PlanFormatError, match="npu:9"):
        Plan.from_json(found.to_json().replace('"device": "cpu:0"', '"device": "npu:9"'))


def test_costs_come_back_from_a_file(tmp_path) -> None:
    graph = small()
    table = costs_of(graph, cpu_0=1.5, npu_0=0.25)
    table.launch["npu:0"] = 1e-4
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == table
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite number"):
            table.set("cpu:0", "x", bad)
