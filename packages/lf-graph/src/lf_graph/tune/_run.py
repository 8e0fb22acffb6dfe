"""Tuning many keys ahead of time, within a time budget."""

from __future__ import annotations

import importlib
import math
import pkgutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

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
    """Imports every module of Triton kernels, and others by name, so that their tunables are registered."""
    for module in pkgutil.iter_modules(lf_graph.kernels.__path__):
        if module.name.endswith("_triton"):
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


@dataclass
class _Results:
    found: list[Entry] = field(default_factory=list)
    tuned: list[Entry] = field(default_factory=list)
    failed: list[tuple[str, Key, str]] = field(default_factory=list)
    left: list[tuple[str, Key]] = field(default_factory=list)


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
    results = _Results()
    todo = [job for job in jobs if rebuild or not _is_done(now, job, results)]
    start = time.monotonic()
    effort = Effort(timer or now.timer(now.device), start + budget_s)
    if workers and todo:
        effort.known_faults = check_ahead(todo, now.device, workers, start + _CHECKING * budget_s, imports)
    for job in todo:
        _one(now, job, rebuild, effort, results, progress)
    return _report(now, results, effort)


def _is_done(now: State, job: Job, results: _Results) -> bool:
    """Whether a complete entry is there; it goes to the results."""
    entry = valid_entry(now, now.tuned, *job)
    if entry is None or not entry.complete:
        return False
    results.found.append(entry)
    return True


def _one(
    now: State,
    job: Job,
    rebuild: bool,
    effort: Effort,
    results: _Results,
    progress: Callable[[str], object],
) -> None:
    tunable, key = job
    if time.monotonic() > effort.until:
        results.left.append((tunable.name, key))
        return
    try:
        with now.store.tuning():
            now.refresh()
            if not rebuild and _is_done(now, job, results):
                return  # another process was faster
            started = None if rebuild else now.tuned.entries.get((tunable.name, key))
            entry = tuned(now, tunable, key, effort, started)
    except Exception as e:  # the device may be lost: then every later key fails too, and says so
        results.failed.append((tunable.name, key, f"{type(e).__name__}: {str(e)[:300]}"))
        progress(f"{tunable.name} {key}: FAILED: {e}")
        return
    results.tuned.append(entry)
    progress(entry_line(entry))


def _report(now: State, results: _Results, effort: Effort) -> TuneReport:
    return TuneReport(
        tuple(results.found),
        tuple(results.tuned),
        tuple(results.failed),
        tuple(results.left),
        effort.timings,
        str(now.store.path),
    )
