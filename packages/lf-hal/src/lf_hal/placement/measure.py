"""Timing ops, segments and copies on the devices themselves."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lf_hal.errors import UnsupportedOpError
from lf_hal.lir.graph import FLOATS, Graph, TensorType, Value
from lf_hal.lir.ops import make_op
from lf_hal.placement.costs import signature
from lf_hal.placement.cut import cut
from lf_hal.placement.planning import refusal
from lf_hal.placement.pool import HOST, Device, Link, Links, Pool
from lf_hal.placement.runners import Runner, runner_for
from lf_hal.targets import resolve_target
from lf_hal.weights import NUMPY_DTYPES

if TYPE_CHECKING:
    from lf_hal.placement.costs import CostTable

__all__ = ["measure", "measure_links"]

Array = npt.NDArray[Any]
SMALL, LARGE = 1 << 12, 1 << 22
"""Bytes of the two copies that a link's latency and bandwidth follow from."""


def measure(
    table: CostTable,
    graph: Graph,
    device: Device,
    groups: Iterable[Sequence[str]],
    repeats: int,
    allow_emulated: bool,
    threads: int,
) -> None:
    """As :meth:`CostTable.measure` says."""
    runner = runner_for(device, threads=threads, allow_emulated=allow_emulated)
    how = _how(device)
    try:
        if device.name not in table.launch:
            table.launch[device.name] = _launch(runner, device, repeats)
        ops = {op.output.name: op for op in graph.ops}
        for names in (*((name,) for name in ops), *map(tuple, groups)):
            chosen = tuple(ops[name] for name in names)
            key = signature(graph, chosen)
            if table.get(device.name, key) is not None or any(refusal(graph, o, device) for o in chosen):
                continue
            try:
                seconds = _time(runner, device, cut(graph, names), repeats)
            except UnsupportedOpError:
                continue
            table.set(device.name, key, max(0.0, seconds - table.launch[device.name]), how)
    finally:
        runner.close()


def _how(device: Device) -> str:
    if device.runs == "c":
        here = resolve_target(device.where).machine == platform.machine()
        return "measured" if here else "emulated"
    return "measured" if device.where == device.name else "simulated"


def _fastest(run: Callable[[], object], repeats: int) -> float:
    """The least of ``repeats`` times, after one run that does not count: what disturbs a run only adds to it."""
    run()
    best = float("inf")
    for _ in range(max(1, repeats)):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def _time(runner: Runner, device: Device, graph: Graph, repeats: int) -> float:
    rng = np.random.default_rng(0)
    stored = {v.name: random_array(rng, v.type) for v in graph.weights}
    run = runner.prepare(graph, stored)
    inputs: dict[str, Any] = {v.name: random_array(rng, v.type) for v in graph.inputs}
    if device.space != HOST:
        inputs = {v.name: runner.receive(inputs[v.name], v.type) for v in graph.inputs}

    def once() -> None:
        run(inputs)
        runner.wait()

    return _fastest(once, repeats)


def random_array(rng: np.random.Generator, kind: TensorType) -> Array:
    """Normal floats, of at least 0.01 so that they may be divisors and variances; indices are all 0."""
    if kind.dtype == "bf16":
        wide = np.abs(rng.standard_normal(kind.shape, np.float32)) + np.float32(0.01)
        return np.asarray((wide.view(np.uint32) >> 16).astype(np.uint16))
    if kind.dtype in FLOATS:
        array = np.abs(rng.standard_normal(kind.shape, np.float32)) + np.float32(0.01)
        return np.asarray(array, NUMPY_DTYPES[kind.dtype])
    return np.zeros(kind.shape, NUMPY_DTYPES[kind.dtype])


def _launch(runner: Runner, device: Device, repeats: int) -> float:
    """Seconds that a segment takes besides its ops, from one of one op and one of two."""
    x = Value("x", TensorType("f32", (16,)))
    one = make_op("unary", "y", [x], {"fn": "neg"})
    two = make_op("unary", "z", [one.output], {"fn": "neg"})
    times = []
    for ops in ((one,), (one, two)):
        graph = Graph("launch", (x,), (), (), ops, (ops[-1].output.name,))
        times.append(_time(runner, device, graph, max(20, repeats)))
    return max(0.0, 2 * times[0] - times[1])


def measure_links(pool: Pool, repeats: int) -> Links:
    """Links between the host and every other memory of the pool, timed in both directions.

    Copies to the memory of an emulated target are copies within this machine: they say nothing of a board's network.
    """
    found: list[Link] = []
    for space in pool.spaces:
        if space == HOST:
            continue
        runner = runner_for(next(d for d in pool.devices if d.space == space), allow_emulated=True)
        to = [_copy_time(runner, nbytes, repeats, back=False) for nbytes in (SMALL, LARGE)]
        back = [_copy_time(runner, nbytes, repeats, back=True) for nbytes in (SMALL, LARGE)]
        runner.close()
        found += [_link(HOST, space, *to), _link(space, HOST, *back)]
    return Links(tuple(found))


def _copy_time(runner: Runner, nbytes: int, repeats: int, back: bool) -> float:
    kind = TensorType("f32", (nbytes // 4,))
    array = np.ones(kind.shape, np.float32)
    there = runner.receive(array, kind)

    def once() -> None:
        if back:
            runner.give(there)
        else:
            runner.receive(array, kind)
        runner.wait()

    return _fastest(once, repeats)


def _link(source: str, target: str, small: float, large: float) -> Link:
    per_byte = max((large - small) / (LARGE - SMALL), 1e-15)
    return Link(source, target, 1 / per_byte, max(0.0, small - per_byte * SMALL))
