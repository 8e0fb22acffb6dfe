"""Placement as plain numbers: units in order, the devices each may run on, values and memories. Pure data.

The model, which :func:`evaluate` computes for a given assignment and :mod:`lf_hal.placement.solve` minimises:

- Units run one after another in the graph's order; nothing overlaps. A unit costs its seconds on its device, and one
  after a unit of another device costs that device's launch besides.
- A value lies in the memory where it is made. Before a unit in another memory reads it for the first time, it is copied
  there, from the memory among those that have it from which that is fastest. Inputs lie in the host's memory, and an
  output is copied there as soon as it is made.
- A value takes its bytes in every memory that has it until its last reader has run, outputs in the host's to the end.
  Stored values (weights) take theirs in every memory that reads them, all the time. What an artefact allocates inside
  is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Evaluated", "Move", "Problem", "Unit", "evaluate"]


@dataclass(frozen=True)
class Unit:
    """Ops that stay together. ``reads`` are values from before, ``makes`` those that others or the caller read;
    ``seconds`` by device, one entry for each that may run it."""

    ops: tuple[str, ...]
    reads: tuple[str, ...]
    stored: tuple[str, ...]
    makes: tuple[str, ...]
    seconds: Mapping[int, float]


@dataclass(frozen=True)
class Problem:
    """Devices and memories are numbered; memory 0 is the host's. ``copy[s][t]`` is latency and seconds per byte, None
    where no way leads from s to t."""

    units: tuple[Unit, ...]
    nbytes: Mapping[str, int]
    inputs: tuple[str, ...]
    outputs: frozenset[str]
    space: tuple[int, ...]
    launch: tuple[float, ...]
    copy: tuple[tuple[tuple[float, float] | None, ...], ...]
    limits: Mapping[int, int]

    def seconds(self, source: int, target: int, nbytes: int) -> float:
        """How long a copy takes; infinite where no way leads."""
        way = self.copy[source][target]
        return float("inf") if way is None else way[0] + way[1] * nbytes

    def fastest(self, held: int, target: int, nbytes: int) -> tuple[float, int]:
        """Seconds and source of the fastest copy from the memories whose bits are set in ``held``."""
        return min((self.seconds(s, target, nbytes), s) for s in range(len(self.copy)) if held >> s & 1)

    def last_reads(self) -> dict[str, int]:
        """The number of the last unit that reads each value; -1 for those that none reads."""
        last = dict.fromkeys(self.nbytes, -1)
        for i, unit in enumerate(self.units):
            last.update(dict.fromkeys(unit.reads, i))
        return last


@dataclass(frozen=True)
class Move:
    """A copy of a value before (or, to the host as an output, after) a unit."""

    value: str
    source: int
    target: int
    seconds: float


@dataclass(frozen=True)
class Evaluated:
    """Time of an assignment, copies ``before`` and ``after`` each unit, most bytes held in each memory."""

    seconds: float
    before: tuple[tuple[Move, ...], ...]
    after: tuple[tuple[Move, ...], ...]
    memory: tuple[int, ...]

    def fits(self, limits: Mapping[int, int]) -> bool:
        return all(self.memory[s] <= limit for s, limit in limits.items())


def evaluate(problem: Problem, assignment: Sequence[int]) -> Evaluated:
    """What the model says of running unit i on device ``assignment[i]``."""
    last = problem.last_reads()
    spaces = range(len(problem.copy))
    held = {name: 1 for name in problem.inputs if last[name] >= 0}
    stored: dict[str, int] = {}
    peak = [sum(problem.nbytes[v] for v in held)] + [0] * (len(spaces) - 1)
    total, before, after, previous = 0.0, [], [], None
    for i, (unit, device) in enumerate(zip(problem.units, assignment, strict=True)):
        space = problem.space[device]
        if device != previous:
            total += problem.launch[device]
        previous = device
        moves = []
        for name in unit.reads:
            if not held[name] >> space & 1:
                seconds, source = problem.fastest(held[name], space, problem.nbytes[name])
                moves.append(Move(name, source, space, seconds))
                held[name] |= 1 << space
        for name in unit.stored:
            stored[name] = stored.get(name, 0) | 1 << space
        held.update(dict.fromkeys(unit.makes, 1 << space))
        returns = []
        for name in unit.makes:
            if name in problem.outputs and space != 0:
                returns.append(Move(name, space, 0, problem.seconds(space, 0, problem.nbytes[name])))
                held[name] |= 1
        total += sum(m.seconds for m in moves) + unit.seconds[device] + sum(m.seconds for m in returns)
        before.append(tuple(moves))
        after.append(tuple(returns))
        for s in spaces:
            peak[s] = max(peak[s], sum(problem.nbytes[v] for v, mask in held.items() if mask >> s & 1))
        held = after_unit(problem, held, last, i)
    resident = [sum(problem.nbytes[v] for v, mask in stored.items() if mask >> s & 1) for s in spaces]
    memory = tuple(p + r for p, r in zip(peak, resident, strict=True))
    return Evaluated(total, tuple(before), tuple(after), memory)


def after_unit(problem: Problem, held: Mapping[str, int], last: Mapping[str, int], i: int) -> dict[str, int]:
    """What is still held once unit ``i`` has run: values with readers to come, and outputs in the host's memory."""
    kept = {}
    for name, mask in held.items():
        if last[name] > i:
            kept[name] = mask
        elif name in problem.outputs:
            kept[name] = mask & 1
    return kept
