"""``plan``: from a graph, a pool and costs to a :class:`~lf_hal.placement.plans.Plan`. A pure function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

from lf_hal.codegen.lower import lower
from lf_hal.errors import UnsupportedOpError
from lf_hal.lir import verify
from lf_hal.lir.graph import FLOATS, Graph, Op
from lf_hal.placement.costs import CostTable, signature
from lf_hal.placement.cut import cut, reads_of
from lf_hal.placement.errors import (
    AffinityUnavailableError,
    MemoryLimitError,
    MissingCostError,
    MissingLinkError,
    PlacementError,
    UnplaceableError,
)
from lf_hal.placement.plans import Copy, Plan, Segment, digest_of
from lf_hal.placement.pool import HOST, Device, Links, Pool
from lf_hal.placement.problem import Evaluated, Move, Problem, Unit, evaluate
from lf_hal.placement.solve import solve

__all__ = ["plan", "problem_of", "refusal"]


def plan(
    graph: Graph,
    pool: Pool,
    costs: CostTable,
    *,
    transfer: Links | None = None,
    groups: Iterable[Sequence[str]] = (),
    max_states: int = 512,
) -> Plan:
    """Where each op of ``graph`` should run so that one run, with its copies, takes the least time.

    The graph is placed as it stands: ``optimize`` it first, as the executor fuses nothing across ops.

    Args:
        costs: of every op on every device that may run it.
        transfer: links between memories; those of ``costs`` if None.
        groups: ops (by results) that stand in a row in the graph and stay on one device. A group costs what was
            measured for it as a whole, else the sum of its ops.
        max_states: how many ways the search keeps a step. While there are no more, the plan is the optimum by the model
            of :mod:`lf_hal.placement.problem`; else it is one of a beam search, and ``exact`` is False.

    Raises:
        InvalidGraphError: the graph is not sound.
        AffinityUnavailableError: an op is marked for hardware that the pool has not.
        UnplaceableError: an op runs on no device, or not on the one it is marked for.
        MissingCostError, MissingLinkError: something is not known that the choice depends on.
        MemoryLimitError: nothing fits.
    """
    verify(graph)
    links = costs.links if transfer is None else transfer
    problem, how = problem_of(graph, pool, costs, links, groups)
    solved, exact = solve(problem, max_states)
    if solved is None:
        raise _cause(problem, pool, links, max_states, exact)
    done = evaluate(problem, solved.assignment)
    used = {how[i, d] for i, d in enumerate(solved.assignment)}
    segments = _segments(graph, pool, links, problem, solved.assignment, done)
    memory = tuple((s, n) for s, n in zip(pool.spaces, done.memory, strict=True) if n)
    return Plan(
        graph.name,
        digest_of(graph),
        pool.devices,
        segments,
        done.seconds,
        solved.exact,
        memory,
        tuple(sorted({word for words in used for word in words})),
    )


def refusal(graph: Graph, op: Op, device: Device) -> str:
    """Why ``device`` cannot run ``op`` of ``graph``; "" if it can."""
    if op.kind in device.refuses:
        return f"refuses {op.kind}"
    types = graph.types()
    for found in (op.output.type, *(types[name] for name in op.inputs)):
        counts = found.dtype in FLOATS or found.dtype == "i8"
        if (
            device.runs == "torch"
            and counts
            and device.dtypes is not None
            and found.dtype not in device.dtypes
        ):
            return f"has no {found.dtype}"
    return _c_refusal(cut(graph, (op.output.name,))) if device.runs == "c" else ""


@cache
def _c_refusal(graph: Graph) -> str:
    try:
        lower(graph, {w.name: 0 for w in graph.weights}, 0)
    except UnsupportedOpError as error:
        return error.reason
    return ""


def _allowed(graph: Graph, op: Op, pool: Pool) -> tuple[int, ...]:
    """Devices that may run ``op`` and can."""
    meant = tuple(range(len(pool.devices)))
    if op.hardware_affinity is not None:
        meant = tuple(i for i in meant if pool.devices[i].answers_to(op.hardware_affinity))
        if not meant:
            raise AffinityUnavailableError(op.output.name, op.hardware_affinity, pool.names)
    reasons = {i: refusal(graph, op, pool.devices[i]) for i in meant}
    able = tuple(i for i in meant if not reasons[i])
    if not able:
        raise UnplaceableError(op.output.name, op.kind, {pool.devices[i].name: r for i, r in reasons.items()})
    return able


def problem_of(
    graph: Graph, pool: Pool, costs: CostTable, links: Links, groups: Iterable[Sequence[str]] = ()
) -> tuple[Problem, dict[tuple[int, int], frozenset[str]]]:
    """The numbers of a placement, and for each unit and device how its cost was got. Raises as :func:`plan`."""
    grouped = _units(graph, groups)
    inputs = {v.name for v in graph.inputs}
    made = graph.producers()
    units, how = [], {}
    for i, ops in enumerate(grouped):
        able = set.intersection(*(set(_allowed(graph, op, pool)) for op in ops))
        if not able:
            reasons = dict.fromkeys(pool.names, "not all of them")
            raise UnplaceableError(ops[0].output.name, f"a group of {len(ops)} ops", reasons)
        seconds = {}
        for d in sorted(able):
            seconds[d], how[i, d] = _cost(graph, ops, pool.devices[d].name, costs)
        names = tuple(op.output.name for op in ops)
        reads, makes = reads_of(graph, names)
        values = tuple(n for n in reads if n in made or n in inputs)
        units.append(
            Unit(names, values, tuple(n for n in reads if n not in values), makes or names[-1:], seconds)
        )
    spaces = pool.spaces
    problem = Problem(
        tuple(units),
        {v.name: v.type.nbytes for v in graph.values()},
        tuple(v.name for v in graph.inputs),
        frozenset(n for n in graph.outputs if n in made),
        tuple(spaces.index(d.space) for d in pool.devices),
        tuple(costs.launch.get(d.name, 0.0) for d in pool.devices),
        tuple(tuple(_way(links, a, b) for b in spaces) for a in spaces),
        {spaces.index(s): limit for s, limit in pool.memory.items()},
    )
    return problem, how


def _units(graph: Graph, groups: Iterable[Sequence[str]]) -> list[tuple[Op, ...]]:
    at = {op.output.name: i for i, op in enumerate(graph.ops)}
    start: dict[int, int] = {}
    taken: set[int] = set()
    for group in groups:
        places = [at.get(name, -1) for name in group]
        row = list(range(places[0], places[0] + len(places))) if places else []
        if not row or places != row or -1 in places or taken & set(row):
            raise PlacementError(
                f"group {list(group)} is no row of ops of the graph, or shares one with another"
            )
        start[row[0]] = len(row)
        taken.update(row)
    units, i = [], 0
    while i < len(graph.ops):
        length = start.get(i, 1)
        units.append(graph.ops[i : i + length])
        i += length
    return units


def _cost(graph: Graph, ops: Sequence[Op], device: str, costs: CostTable) -> tuple[float, frozenset[str]]:
    whole = costs.get(device, signature(graph, ops))
    if whole is not None:
        return whole.seconds, frozenset((whole.how,))
    total, how = 0.0, set()
    for op in ops:
        found = costs.get(device, signature(graph, (op,)))
        if found is None:
            raise MissingCostError(op.output.name, device, signature(graph, (op,)))
        total += found.seconds
        how.add(found.how)
    return total, frozenset(how)


def _way(links: Links, source: str, target: str) -> tuple[float, float] | None:
    if source == target:
        return 0.0, 0.0
    try:
        hops = links.route(source, target)
    except MissingLinkError:
        return None
    return sum(k.latency for k in hops), sum(1 / k.bandwidth for k in hops)


def _cause(problem: Problem, pool: Pool, links: Links, max_states: int, exact: bool) -> PlacementError:
    """What stood in the way of every placement."""
    free, _ = solve(replace(problem, limits={}), max_states)
    if free is not None:
        return MemoryLimitError(pool.memory, exact)
    ways = [(a, b) for a in pool.spaces for b in pool.spaces if _way(links, a, b) is None]
    return MissingLinkError(*ways[0])


def _segments(
    graph: Graph, pool: Pool, links: Links, problem: Problem, assignment: Sequence[int], done: Evaluated
) -> tuple[Segment, ...]:
    spaces = pool.spaces

    def copies(moves: Iterable[Move]) -> tuple[Copy, ...]:
        found = []
        for m in moves:
            a, b = spaces[m.source], spaces[m.target]
            via = HOST if len(links.route(a, b)) > 1 else ""
            found.append(Copy(m.value, a, b, problem.nbytes[m.value], m.seconds, via))
        return tuple(found)

    segments: list[Segment] = []
    i = 0
    while i < len(assignment):
        end = i
        while end < len(assignment) and assignment[end] == assignment[i]:
            end += 1
        device, rows = assignment[i], range(i, end)
        ops = tuple(name for r in rows for name in problem.units[r].ops)
        reads, makes = reads_of(graph, ops)
        stored = {name for r in rows for name in problem.units[r].stored}
        segments.append(
            Segment(
                pool.devices[device].name,
                ops,
                tuple(n for n in reads if n not in stored),
                makes,
                problem.launch[device] + sum(problem.units[r].seconds[device] for r in rows),
                copies(m for r in rows for m in done.before[r]),
                copies(m for r in rows for m in done.after[r]),
            )
        )
        i = end
    return tuple(segments)
