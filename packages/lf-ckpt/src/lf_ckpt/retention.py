"""Which steps stay, and which steps are due for a save. Pure: frozen rules over frozen facts.

A rule says which of the candidates it wants; rules given together are joined with "or". Every rule is hereditary: what
it wants among all steps it still wants among those that survived, so running retention again removes nothing more
(also under `AllOf`, where one rule sees what another has removed).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol, TypeAlias, get_args

from .errors import CkptError

Mode: TypeAlias = Literal["min", "max"]


class PolicyError(CkptError, ValueError):
    """A rule that makes no sense, or data that describes none."""


@dataclass(frozen=True)
class Candidate:
    """A committed step as retention sees it.

    parent: folder of its base, if it is a delta. created: seconds since 1970. metrics: as given to `save`.
    """

    folder: str
    step: int
    attempt: int
    parent: str | None = None
    created: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Rule(Protocol):
    """A retention rule."""

    def wanted(self, steps: Sequence[Candidate]) -> Collection[int]:
        """Steps to keep, out of `steps`: ascending, one candidate (the newest attempt) per step."""
        ...


@dataclass(frozen=True)
class Last:
    """Keep the newest `count` steps."""

    count: int

    def __post_init__(self) -> None:
        _require(_whole(self.count) and self.count >= 1, f"Last({self.count!r}): keep at least one step")

    def wanted(self, steps: Sequence[Candidate]) -> Collection[int]:
        """The last `count` of `steps`."""
        return [c.step for c in steps[-self.count :]]


@dataclass(frozen=True)
class Every:
    """Keep each step that is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        good = _whole(self.steps) and self.steps >= 1
        _require(good, f"Every(steps={self.steps!r}): give a positive distance")

    def due(self, step: int) -> bool:
        """Whether to save at `step`."""
        return step % self.steps == 0

    def wanted(self, steps: Sequence[Candidate]) -> Collection[int]:
        """The multiples among `steps`."""
        return [c.step for c in steps if self.due(c.step)]


@dataclass(frozen=True)
class EverySeconds:
    """Keep the first step of each interval of `seconds` on the clock (of `created`, counted from 1970)."""

    seconds: int

    def __post_init__(self) -> None:
        good = _whole(self.seconds) and self.seconds >= 1
        _require(good, f"EverySeconds({self.seconds!r}): give a positive number of whole seconds")

    def wanted(self, steps: Sequence[Candidate]) -> Collection[int]:
        """The lowest step of each interval."""
        first: dict[int, int] = {}
        for candidate in steps:
            first.setdefault(candidate.created // self.seconds, candidate.step)
        return list(first.values())


@dataclass(frozen=True)
class Best:
    """Keep the `count` steps with the best `metric`, of equals the newer. Lacking it or NaN does not count."""

    metric: str
    count: int = 1
    mode: Mode = "min"

    def __post_init__(self) -> None:
        _require(isinstance(self.metric, str) and bool(self.metric), "Best: name a metric")
        good = _whole(self.count) and self.count >= 1
        _require(good, f"Best(count={self.count!r}): keep at least one step")
        _require(self.mode in get_args(Mode), f"Best(mode={self.mode!r}): choose min or max")

    def wanted(self, steps: Sequence[Candidate]) -> Collection[int]:
        """The best `count` of `steps`."""
        sign = 1 if self.mode == "min" else -1
        known = [c for c in steps if not math.isnan(c.metrics.get(self.metric, math.nan))]
        ranked = sorted(known, key=lambda c: (sign * c.metrics[self.metric], -c.step))
        return [c.step for c in ranked[: self.count]]


@dataclass(frozen=True)
class Phases:
    """A distance that grows: `((0, 5), (1000, 20), (10000, 100))` is 5 steps until 1000, then 20, from 10000 on 100.

    Both a schedule for saves (`due`) and a rule that keeps scheduled steps: multiples of the distance of their phase.
    """

    phases: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        try:
            phases = tuple((start, distance) for start, distance in self.phases)
        except (TypeError, ValueError) as error:
            raise PolicyError(f"Phases({self.phases!r}): give pairs (first step, distance)") from error
        object.__setattr__(self, "phases", phases)
        starts = [start for start, _ in phases]
        good = bool(phases) and all(_whole(n) for pair in phases for n in pair)
        _require(good, f"Phases({self.phases!r}): give pairs (first step, distance) of whole numbers")
        _require(starts[0] == 0, "Phases: the first phase begins at step 0")
        _require(all(a < b for a, b in pairwise(starts)), "Phases: each phase begins after the one before")
        _require(all(distance >= 1 for _, distance in phases), "Phases: give positive distances")

    def distance(self, step: int) -> int:
        """Steps between saves in the phase of `step`."""
        return next(distance for start, distance in reversed(self.phases) if step >= start)

    def due(self, step: int) -> bool:
        """Whether to save at `step`."""
        return step % self.distance(step) == 0

    def wanted(self, steps: Sequence[Candidate]) -> Collection[int]:
        """The scheduled ones among `steps`."""
        return [c.step for c in steps if self.due(c.step)]


@dataclass(frozen=True)
class AnyOf:
    """Keep what at least one of `rules` wants."""

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _several(self.rules, "AnyOf"))

    def wanted(self, steps: Sequence[Candidate]) -> Collection[int]:
        """The union."""
        return {step for rule in self.rules for step in rule.wanted(steps)}


@dataclass(frozen=True)
class AllOf:
    """Keep what every one of `rules` wants, such as the multiples of 100 among the last 50 steps."""

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _several(self.rules, "AllOf"))

    def wanted(self, steps: Sequence[Candidate]) -> Collection[int]:
        """The intersection."""
        return set.intersection(*(set(rule.wanted(steps)) for rule in self.rules))


def doomed(entries: Sequence[Candidate], rules: Sequence[Rule], protect: Collection[str] = ()) -> list[str]:
    """Folders to remove, in the order of removal: a delta always before the step it refers to. Pure; see `reasons`."""
    stay = reasons(entries, rules, protect)
    parents = {c.folder: c.parent for c in entries}
    gone = sorted((c.step, c.attempt, c.folder) for c in entries if c.folder not in stay)
    # Not simply newest first: training that went back may save step 50 as a delta of step 100.
    return sorted((folder for *_, folder in gone), key=lambda f: len(_line(f, parents)), reverse=True)


def reasons(
    entries: Sequence[Candidate], rules: Sequence[Rule], protect: Collection[str] = ()
) -> dict[str, str]:
    """Why each folder stays; the others are doomed. Pure.

    Kept are: what any rule wants (of a step saved twice, the newest attempt), the newest step, `protect` (the step just
    saved, the base of the next delta, pinned steps), and everything that a kept step refers to, directly or through
    others. No rules keep everything.
    """
    order = sorted(entries, key=lambda c: (c.step, c.attempt))
    if not rules or not order:
        return {c.folder: "there are no rules" for c in order}
    newest = {c.step: c for c in order}
    stay = {order[-1].folder: "the newest step"}
    for rule in rules:
        for step in rule.wanted(list(newest.values())):
            if step in newest:
                stay.setdefault(newest[step].folder, repr(rule))
    for folder in protect:
        stay.setdefault(folder, "protected")
    parents = {c.folder: c.parent for c in order}
    for folder in list(stay):
        for above in _line(folder, parents)[1:]:
            stay.setdefault(above, f"{folder} refers to it")
    return stay


def _line(folder: str, parents: Mapping[str, str | None]) -> list[str]:
    """A folder and all it refers to; a damaged store may hold a circle, which ends where it closes."""
    line: list[str] = []
    at: str | None = folder
    while at is not None and at not in line:
        line.append(at)
        at = parents.get(at)
    return line


def _several(rules: Sequence[Rule], name: str) -> tuple[Rule, ...]:
    found = tuple(rules)
    _require(bool(found), f"{name}: give at least one rule")
    return found


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PolicyError(message)
