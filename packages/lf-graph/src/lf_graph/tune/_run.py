"""Tuning many keys ahead of time, within a time budget."""

from __future__ import annotations

import importlib
import math
import pkgutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import lf_graph.kernels
from lf_graph._errors import GraphError
from lf_graph.kernels._tunable import TUNABLES, Key, Tunable
from lf_graph.tune._ahead import check_ahead
from lf_graph.tune._resolve import require_no_capture, tuned, valid_entry
from lf_graph.tune._search import Effort
from lf_graph.tune._state import State, state
from lf_graph.tune._table import Entry
from lf_graph.tune._timer import Timer

Job = tuple[Tunable, Key]
Place = tuple[str, Key]
_CHECKING = 0.5  # of the budget, at most, goes to checks ahead


@dataclass(frozen=True)
class TuneReport:
    """What a run of the tuner did.

    Attributes:
        found: entries that were complete before; nothing was run for them.
        tuned: entries searched now.
        failed: keys whose search raised, with the error.
        left: keys that the budget did not reach.
        timings: how often the timer was asked.
        path: the table's file.
    """

    found: tuple[Entry, ...]
    tuned: tuple[Entry, ...]
    failed: tuple[tuple[str, Key, str], ...]
    left: tuple[tuple[str, Key], ...]
    timings: int
    path: str

    @property
    def broken(self) -> tuple[Entry, ...]:
        """Entries whose default configuration was rejected: a fault of the kernel, not of a candidate."""
        return tuple(e for e in (*self.found, *self.tuned) if e.default_us is None)

    def __str__(self) -> str:
        """One line per entry, and a summary."""
        lines = [entry_line(e) for e in self.tuned]
        lines += [f"{name} {key}: FAILED: {error}" for name, key, error in self.failed]
        lines += [f"{name} {key}: not reached within the budget" for name, key in self.left]
        lines.append(
            f"{len(self.tuned)} tuned, {len(self.found)} known before, {len(self.failed)} failed, {len(self.left)} "
            f"left; {self.timings} timings; {self.path}"
        )
        return "\n".join(lines)


def entry_line(e: Entry) -> str:
    """An entry in one line: choice, time, gain over the default, rejected candidates."""
    tried = f"{len(e.trials)} tried, {len(e.rejected)} rejected{'' if e.complete else ', not complete'}"
    if e.config is None or e.us is None:
        return (
            f"{e.tunable} {e.key}: NO candidate passed ({tried}): {e.trials[0].rejected if e.trials else ''}"
        )
    gain = f"{e.default_us / e.us:.2f}x the default" if e.default_us else "the default was REJECTED"
    return f"{e.tunable} {e.key}: {e.config}, {e.us:.1f} us, {gain} ({tried})"


def load_kernels(extra: Iterable[str] = ()) -> None:
    """Imports every module of kernels, and others by name, so that their tunables are registered.

    Raises:
        ImportError: triton is not installed.
    """
    for module in pkgutil.iter_modules(lf_graph.kernels.__path__):
        importlib.import_module(f"lf_graph.kernels.{module.name}")
    for name in extra:
        importlib.import_module(name)


def known_keys(now: State) -> dict[str, list[Key]]:
    """Keys by tunable: those that this process launched, then those of the tuned and of the shipped table."""
    found: dict[str, dict[Key, None]] = {}
    tables = [now.launched, now.tuned.entries, now.shipped.entries if now.shipped else {}]
    for table in tables:
        for name, key in table:
            found.setdefault(name, {})[key] = None
    return {name: list(keys) for name, keys in found.items()}


def jobs_of(tunables: Iterable[Tunable], keys: dict[str, list[Key]]) -> list[Job]:
    """First the first key of every tunable, then the second of every one: each gets something before one gets all."""
    rounds = [(i, t, key) for t in tunables for i, key in enumerate(keys.get(t.name, []))]
    return [(t, key) for _, t, key in sorted(rounds, key=lambda r: r[0])]


class _Session:
    """One run: what is to do, what was found."""

    def __init__(self, now: State, effort: Effort, progress: Callable[[str], object]) -> None:
        self.now, self.effort, self.progress = now, effort, progress
        self.todo: list[Job] = []
        self.found: list[Entry] = []
        self.tuned: dict[Place, Entry] = {}
        self.failed: dict[Place, str] = {}
        self._begun: dict[Place, Entry] = {}

    def plan(self, jobs: Iterable[Job], rebuild: bool) -> None:
        """Sorts out what is complete; what an earlier run began is gone on with."""
        for tunable, key in jobs:
            entry = None if rebuild else valid_entry(self.now, self.now.tuned, tunable, key)
            if entry is not None and entry.complete:
                self.found.append(entry)
                continue
            self.todo.append((tunable, key))
            if entry is not None:
                self._begun[tunable.name, key] = entry

    def search(self) -> None:
        """With candidates that workers checked: first those, which are quick to time, for every key; then the rest."""
        for only_checked in (True, False) if self.effort.checked else (False,):
            self.effort.only_checked = only_checked
            for tunable, key in self.todo:
                if not self._is_over((tunable.name, key)):
                    self._one(tunable, key)

    def _is_over(self, place: Place) -> bool:
        complete = place in self.tuned and self.tuned[place].complete
        return complete or place in self.failed or time.monotonic() > self.effort.until

    def _one(self, tunable: Tunable, key: Key) -> None:
        place = tunable.name, key
        try:
            entry = tuned(self.now, tunable, key, self.effort, self.tuned.get(place, self._begun.get(place)))
        except Exception as e:  # the device may be lost: then every later key fails too, and says so
            self.failed[place] = f"{type(e).__name__}: {str(e)[:300]}"
            self.progress(f"{tunable.name} {key}: FAILED: {self.failed[place]}")
            return
        self.tuned[place] = entry
        self.progress(entry_line(entry))

    def report(self) -> TuneReport:
        """What was done."""
        places = [(t.name, key) for t, key in self.todo]
        return TuneReport(
            tuple(self.found),
            tuple(self.tuned.values()),
            tuple((name, key, error) for (name, key), error in self.failed.items()),
            tuple(p for p in places if p not in self.tuned and p not in self.failed),
            self.effort.timings,
            str(self.now.store.path),
        )


def run(
    match: str = "",
    keys: dict[str, list[Key]] | None = None,
    *,
    rebuild: bool = False,
    budget_s: float = math.inf,
    workers: int = 0,
    timer: Timer | None = None,
    imports: Sequence[str] = (),
    progress: Callable[[str], object] = lambda line: None,
) -> TuneReport:
    """Tunes kernels for keys; choices are kept in the table as they are found.

    A candidate wins only if it runs, agrees with a float64 reference and gives the same bits 30 times over; the others
    are kept in the table with the reason.

    Args:
        match: only tunables whose name contains it.
        keys: what for, by tunable; None: what this process launched so far, and what the tables know.
        rebuild: search again what is known.
        budget_s: no candidate is started after so many seconds; a later run goes on from there.
        workers: processes that compile and check candidates beforehand, side by side; a candidate that breaks its
            device context then costs one process.
        timer: how to measure; None: CUDA graphs on the current device.
        imports: modules with more tunables, for the workers too.
        progress: called with one line for every entry.

    Raises:
        NotTunedError: called inside a capture.
        GraphError: there is no GPU, and no timer was given.
    """
    load_kernels(imports)
    now = state()
    if timer is None and now.device.type != "cuda":
        raise GraphError(
            "lf_graph.tune measures on a GPU, and there is none: pass a timer to try the search itself"
        )
    jobs = jobs_of([t for n, t in TUNABLES.items() if match in n], known_keys(now) if keys is None else keys)
    for tunable, key in jobs[:1]:
        require_no_capture(tunable.name, key)
    with now.store.tuning():  # other processes of this machine wait, and then find what this one kept
        now.refresh()
        start = time.monotonic()
        effort = Effort(timer or now.timer(now.device), start + budget_s)
        session = _Session(now, effort, progress)
        session.plan(jobs, rebuild)
        if workers and session.todo:
            until = start + _CHECKING * budget_s
            effort.checked = check_ahead(session.todo, now.device, workers, until, imports)
        session.search()
    return session.report()
