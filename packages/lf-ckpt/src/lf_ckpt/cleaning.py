"""What garbage collection does with each folder of a store and why: a plan to look at, and its execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .catalog import Catalog
from .errors import CorruptError
from .loading import describe, verify_step
from .reader import StepReader
from .retention import Rule, doomed, reasons


@dataclass(frozen=True)
class Verdict:
    """The fate of one step folder. `leave`: retention neither counts nor touches it."""

    folder: str
    action: Literal["keep", "remove", "leave"]
    why: str


def plan_collection(catalog: Catalog, rules: Sequence[Rule], *, verify: bool = True) -> list[Verdict]:
    """Verdicts on all committed folders, oldest first; those to remove come in the order of removal at the end.

    verify: read and hash the newest step first; a damaged one does not count, so that what stays can be loaded. OSError
    when a step cannot be read just now.
    """
    damaged: dict[str, str] = {}
    while True:
        candidates = catalog.candidates(damaged)
        newest = max(candidates, key=lambda c: (c.step, c.attempt), default=None)
        problem = _problem(catalog, newest.folder) if verify and newest else None
        if newest is None or problem is None:
            break
        damaged[newest.folder] = problem
    held = catalog.held()
    stay = reasons(candidates, rules, held)
    gone = doomed(candidates, rules, held)
    known = {c.folder for c in candidates}
    kept = [_verdict(name, stay, held, known, damaged) for name in catalog.folders() if name not in gone]
    return kept + [Verdict(folder, "remove", "no rule wants it") for folder in gone]


def run_collection(catalog: Catalog, plan: Sequence[Verdict]) -> list[str]:
    """Remove what the plan says; the caller holds the lock since before it was made. Returns the folders removed."""
    return [v.folder for v in plan if v.action == "remove" and catalog.remove(v.folder)]


def _verdict(
    folder: str, stay: dict[str, str], held: list[str], known: set[str], damaged: dict[str, str]
) -> Verdict:
    if folder in held:
        return Verdict(folder, "keep", "pinned, or holds files that are not ours")
    if folder in known:
        return Verdict(folder, "keep", stay[folder])
    why = damaged.get(folder, "damaged, without a sound base, or of another store; `repair` says more")
    return Verdict(folder, "leave", why)


def _problem(catalog: Catalog, folder: str) -> str | None:
    """What is wrong with a step when every byte is read; None when it is good."""
    try:
        with StepReader(catalog.files, catalog.steps, folder) as reader:
            verify_step(reader)
    except CorruptError as error:
        return describe(error)
    return None
