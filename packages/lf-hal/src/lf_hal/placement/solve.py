"""The fastest assignment of a :class:`~lf_hal.placement.problem.Problem`, by a dynamic programme over its frontier.

Units are taken in order. All that matters for those to come is the device of the last one and which memories hold the
values that are still to be read (the frontier): of two ways to the same such state the slower is dropped. On a chain
one value is on the frontier, so there are at most devices x memories-sets states a step; on a graph there are as many
as its width allows. With limits on memory a state keeps every way that no other beats in time and in bytes alike.

A narrow search runs first, and ways that cannot end before its result, however fast the rest goes, are dropped too.
While no step is left with more than ``max_states`` ways, the result is the optimum. Beyond that the fastest ways are
kept (a beam search), and the result is at least as fast as the best single device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lf_hal.placement.problem import Problem, Unit, evaluate

__all__ = ["Solved", "solve"]

ALL = -1
"""Every bit."""
State = tuple[int, tuple[int, ...]]
"""Device of the last unit; for each name of the step's frontier, a bit for every memory that holds it."""


@dataclass(frozen=True)
class Solved:
    """A device for each unit; ``exact`` if no other assignment is faster."""

    assignment: tuple[int, ...]
    seconds: float
    exact: bool


@dataclass(slots=True)
class _Way:
    """One way to a state: its time, and for each limited memory the bytes stored and the most bytes of values."""

    seconds: float
    stored: tuple[int, ...]
    peak: tuple[int, ...]
    device: int
    before: _Way | None

    def beats(self, other: _Way) -> bool:
        return (
            self.seconds <= other.seconds
            and all(a <= b for a, b in zip(self.stored, other.stored, strict=True))
            and all(a <= b for a, b in zip(self.peak, other.peak, strict=True))
        )

    def assignment(self) -> tuple[int, ...]:
        found = []
        way: _Way | None = self
        while way is not None and way.before is not None:
            found.append(way.device)
            way = way.before
        return tuple(reversed(found))


def solve(problem: Problem, max_states: int = 512) -> tuple[Solved | None, bool]:
    """The fastest assignment that fits the limits, None if none was found; and whether all were tried."""
    known = list(_single(problem))
    for width in sorted({min(NARROW, max_states), max_states}):
        bound = min((s.seconds for s in known), default=float("inf"))
        search, exact = _Search(problem, bound), True
        for i in range(len(problem.units)):
            search.step(i)
            exact &= search.cut(width)
        ways = [way for ways in search.ways.values() for way in ways]
        known += [Solved(w.assignment(), w.seconds, exact) for w in ways]
        if exact:
            break
    best = min(known, key=lambda s: (s.seconds, s.assignment), default=None)
    return (None if best is None else replace(best, exact=exact)), exact


NARROW = 64
"""Ways a step of the search that only sets a bound for the next."""
SLACK = 1 + 1e-9
"""Sums of the same times in another order may differ in their last bits, which must not drop the best way."""


def _single(problem: Problem) -> Iterator[Solved]:
    """Everything on one device, where it can be and fits."""
    for device in range(len(problem.space)):
        if all(device in unit.seconds for unit in problem.units):
            assignment = (device,) * len(problem.units)
            done = evaluate(problem, assignment)
            if done.seconds < float("inf") and done.fits(problem.limits):
                yield Solved(assignment, done.seconds, False)


class _Search:
    """The frontier as it moves over the units: ways by state, for those that may end within ``bound`` seconds."""

    def __init__(self, problem: Problem, bound: float) -> None:
        self.problem, self.bound = problem, bound * SLACK
        self.last = problem.last_reads()
        self.copies: dict[tuple[str, int, int], float] = {}
        self.limited = tuple(sorted(problem.limits))
        self.rest = [0.0]  # the least that the units from i on can take
        for unit in reversed(problem.units):
            self.rest.append(self.rest[-1] + min(unit.seconds.values()))
        self.rest.reverse()
        readers: dict[str, list[int]] = {}
        for i, unit in enumerate(problem.units):
            for name in unit.stored:
                readers.setdefault(name, []).append(i)
        self.shared = {name: at for name, at in readers.items() if len(at) > 1 and self.limited}
        self.names = tuple(v for v in problem.inputs if self.last[v] >= 0)
        start = tuple(sum(problem.nbytes[v] for v in self.names) if s == 0 else 0 for s in self.limited)
        first = _Way(0.0, (0,) * len(self.limited), start, -1, None)
        self.ways: dict[State, list[_Way]] = {(-1, (1,) * len(self.names)): [first]}

    def step(self, i: int) -> None:
        """Move the frontier over unit ``i``."""
        unit = self.problem.units[i]
        fresh = dict.fromkeys((*(n for n in unit.stored if n in self.shared), *unit.makes))
        names = (*self.names, *(n for n in fresh if n not in self.names))
        at = {name: j for j, name in enumerate(names)}
        kept = [(at[n], self._left(n, i)) for n in names if self._left(n, i)]
        padding = (0,) * (len(names) - len(self.names))
        reached: dict[State, list[_Way]] = {}
        for (previous, masks), ways in self.ways.items():
            for device in unit.seconds:
                now = [*masks, *padding]
                seconds, stored = self._run(unit, device, previous, now, at)
                if seconds == float("inf"):
                    continue
                late = self.bound - self.rest[i + 1] - seconds
                state = (device, tuple([now[j] & left for j, left in kept]))
                into = reached.setdefault(state, [])
                if not self.limited:
                    (way,) = ways
                    if way.seconds <= late and (not into or way.seconds + seconds < into[0].seconds):
                        into[:] = [_Way(way.seconds + seconds, (), (), device, way)]
                    continue
                used = self._used(names, now)
                for way in ways:
                    if way.seconds <= late:
                        self._add(into, self._extended(way, seconds, stored, used, device))
        self.names = tuple(names[j] for j, _ in kept)
        self.ways = {state: ways for state, ways in reached.items() if ways}

    def _left(self, name: str, i: int) -> int:
        """Bits of the memories in which ``name`` may still lie once unit ``i`` has run; 0 if it is no longer asked."""
        if name in self.shared:
            return ALL if self.shared[name][-1] > i else 0
        if self.last[name] > i:
            return ALL
        return 1 if self.limited and name in self.problem.outputs else 0

    def _run(
        self, unit: Unit, device: int, previous: int, now: list[int], at: Mapping[str, int]
    ) -> tuple[float, tuple[int, ...]]:
        """Seconds of the unit with its copies, and bytes newly stored by memory. ``now`` becomes what is held then."""
        problem, space = self.problem, self.problem.space[device]
        bit = 1 << space
        seconds = unit.seconds[device] + (problem.launch[device] if device != previous else 0.0)
        for name in unit.reads:
            if not now[at[name]] & bit:
                seconds += self._copy(name, now[at[name]], space)
                now[at[name]] |= bit
        new = 0
        for name in unit.stored:
            if name not in self.shared:
                new += problem.nbytes[name]
            elif not now[at[name]] & bit:
                new += problem.nbytes[name]
                now[at[name]] |= bit
        for name in unit.makes:
            now[at[name]] = bit
            if name in problem.outputs and space != 0:
                seconds += problem.seconds(space, 0, problem.nbytes[name])
                now[at[name]] |= 1
        return seconds, tuple(new if s == space else 0 for s in self.limited)

    def _copy(self, name: str, held: int, space: int) -> float:
        key = (name, held, space)
        if key not in self.copies:
            self.copies[key] = self.problem.fastest(held, space, self.problem.nbytes[name])[0]
        return self.copies[key]

    def _used(self, names: Sequence[str], now: Sequence[int]) -> tuple[int, ...]:
        """Bytes of values in each limited memory."""
        if not self.limited:
            return ()
        sizes = [
            (0 if n in self.shared else self.problem.nbytes[n], m) for n, m in zip(names, now, strict=True)
        ]
        return tuple(sum(nbytes for nbytes, mask in sizes if mask >> s & 1) for s in self.limited)

    def _extended(
        self, way: _Way, seconds: float, stored: tuple[int, ...], used: tuple[int, ...], device: int
    ) -> _Way:
        total = tuple(map(sum, zip(way.stored, stored, strict=True)))
        peak = tuple(map(max, zip(way.peak, used, strict=True)))
        return _Way(way.seconds + seconds, total, peak, device, way)

    def _add(self, into: list[_Way], way: _Way) -> None:
        limits = self.problem.limits
        full = (limits[s] < b + p for s, b, p in zip(self.limited, way.stored, way.peak, strict=True))
        if any(full) or any(known.beats(way) for known in into):
            return
        into[:] = [known for known in into if not way.beats(known)]
        into.append(way)

    def cut(self, most: int) -> bool:
        """Keep the ``most`` fastest ways; whether that were all."""
        ranked: list[tuple[Any, ...]] = [
            (way.seconds, state, way) for state, ways in self.ways.items() for way in ways
        ]
        if len(ranked) <= most:
            return True
        ranked.sort(key=lambda row: row[:2])
        self.ways = {}
        for _, state, way in ranked[:most]:
            self.ways.setdefault(state, []).append(way)
        return False
