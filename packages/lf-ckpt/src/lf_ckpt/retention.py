"""Which steps stay. Rules are frozen dataclasses with one pure function; rules are joined with "or"."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


class Rule(Protocol):
    """A retention rule: which of the committed steps (ascending, no repeats) it wants to keep."""

    def wanted(self, steps: Sequence[int]) -> Collection[int]:
        """Steps to keep."""
        ...


@dataclass(frozen=True)
class Last:
    """Keep the newest `count` steps."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"Last({self.count}): keep at least one step")

    def wanted(self, steps: Sequence[int]) -> Collection[int]:
        """The last `count` of `steps`."""
        return steps[-self.count :]


@dataclass(frozen=True)
class Every:
    """Keep each step that is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"Every(steps={self.steps}): give a positive distance")

    def wanted(self, steps: Sequence[int]) -> Collection[int]:
        """The multiples among `steps`."""
        return [step for step in steps if step % self.steps == 0]


@dataclass(frozen=True)
class Kept:
    """A committed step as retention sees it: its directory, step, attempt, and the directory of its base if any."""

    folder: str
    step: int
    attempt: int
    parent: str | None = None


def doomed(entries: Sequence[Kept], rules: Sequence[Rule], protect: Collection[str] = ()) -> list[str]:
    """Directories to remove, oldest first. Pure.

    Kept are: what any rule wants (of a step saved twice, the newest attempt), the newest step, `protect` (the step just
    saved, the base of the next delta), and every base that a kept step names. No rules keep everything.
    """
    if not rules or not entries:
        return []
    order = sorted(entries, key=lambda e: (e.step, e.attempt))
    newest = {entry.step: entry for entry in order}
    wanted = {step for rule in rules for step in rule.wanted(list(newest))} | {order[-1].step}
    alive = {newest[step].folder for step in wanted if step in newest} | set(protect)
    alive |= {entry.parent for entry in order if entry.folder in alive and entry.parent is not None}
    return [entry.folder for entry in order if entry.folder not in alive]
