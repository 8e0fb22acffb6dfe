"""The search for one key: every candidate is checked, those that pass are timed, the fastest three once more."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from lf_graph.kernels._tunable import Config, Key, Problem, Tunable
from lf_graph.tune._source import source_hash
from lf_graph.tune._table import Entry, Trial
from lf_graph.tune._timer import Timer
from lf_graph.tune._verify import DeviceLostError, fault

_WINDOWS, _FINAL_WINDOWS, _FINALISTS = 3, 15, 3
_GAIN = 0.99  # a choice that gains less than 1 % over the default is noise, and the default stays
SEED = 0


@dataclass
class Effort:
    """What a search may cost, and what all searches did cost.

    Attributes:
        timer: measures; see :class:`lf_graph.tune._timer.GraphTimer`.
        until: no candidate is started after this time (``time.monotonic``).
        checked: what other processes found beforehand: reasons, or "", by (tunable, key, configuration).
        only_checked: leave out candidates that are not among them, except the default.
        timings: how often the timer was asked.
        checks: how many candidates were checked.
    """

    timer: Timer
    until: float = float("inf")
    checked: Mapping[tuple[str, Key, Config], str] = field(default_factory=dict)
    only_checked: bool = False
    timings: int = 0
    checks: int = 0

    def time(self, problem: Problem, config: Config, windows: int, give_up_us: float = math.inf) -> float:
        """Microseconds of one call."""
        self.timings += 1
        return self.timer.time([lambda: problem.run(config)], windows, give_up_us).us

    def leaves_out(self, tunable: Tunable, key: Key, config: Config) -> bool:
        """Whether a candidate is not for this time."""
        if not self.only_checked or config == tunable.default(key):
            return False
        return (tunable.name, key, config) not in self.checked


def configs_of(tunable: Tunable, key: Key) -> list[Config]:
    """The default, then every other candidate once, shuffled: a search cut short has seen all corners of a grid."""
    default = tunable.default(key)
    others = [c for c in dict.fromkeys(tunable.candidates(key)) if c != default]
    random.Random(f"{tunable.name} {key}").shuffle(others)
    return [default, *others]


def search(
    tunable: Tunable,
    key: Key,
    device: torch.device,
    effort: Effort,
    started: Entry | None = None,
    keep: Callable[[Entry], object] = lambda entry: None,
) -> Entry:
    """The best configuration of a key.

    Args:
        tunable: what is tuned.
        key: for what.
        device: where.
        effort: its limits.
        started: an earlier entry that is not complete; what it tried is not tried again.
        keep: called with what is known when the device is lost, so that the next process goes on from there.

    Raises:
        DeviceLostError: a candidate broke the device context.
    """
    source = source_hash(tunable)
    torch.manual_seed(SEED)
    problem = tunable.problem(key, device)
    done = {t.config: t for t in started.trials} if started and started.source == source else {}
    configs = configs_of(tunable, key)
    for config in configs:
        if done and time.monotonic() > effort.until:
            break
        if config in done or effort.leaves_out(tunable, key, config):
            continue
        try:
            done[config] = _try(tunable.name, key, problem, config, device, effort, _fastest(done))
        except DeviceLostError as e:
            done[config] = Trial(config, None, f"lost the device: {e}")
            keep(_entry(tunable, key, source, done, {}, complete=False))
            raise
    finals = _finals(problem, tunable.default(key), done, effort)
    return _entry(tunable, key, source, done, finals, complete=all(c in done for c in configs))


def _fastest(done: Mapping[Config, Trial]) -> float:
    return min((t.us for t in done.values() if t.us is not None), default=math.inf)


def _try(
    name: str,
    key: Key,
    problem: Problem,
    config: Config,
    device: torch.device,
    effort: Effort,
    fastest_us: float,
) -> Trial:
    reason = effort.checked.get((name, key, config), "")
    if not reason:
        effort.checks += 1
        reason = fault(problem, config, device)
    if reason:
        return Trial(config, None, reason)
    try:
        return Trial(config, effort.time(problem, config, _WINDOWS, 2 * fastest_us))
    except RuntimeError as e:
        return Trial(config, None, f"cannot be captured: {str(e).splitlines()[0][:200]}")


def _finals(
    problem: Problem, default: Config, done: Mapping[Config, Trial], effort: Effort
) -> dict[Config, float]:
    """Careful times of the fastest few and of the default."""
    times = {c: t.us for c, t in done.items() if t.us is not None}
    chosen = sorted(times, key=lambda c: times[c])[:_FINALISTS]
    if default in times and default not in chosen:
        chosen.append(default)
    if len(chosen) == 1:
        return {chosen[0]: times[chosen[0]]}
    return {c: effort.time(problem, c, _FINAL_WINDOWS) for c in chosen}


def _entry(
    tunable: Tunable,
    key: Key,
    source: str,
    done: Mapping[Config, Trial],
    finals: Mapping[Config, float],
    complete: bool,
) -> Entry:
    default = tunable.default(key)
    best = min(finals, key=lambda c: finals[c], default=None)
    if best is not None and default in finals and finals[best] > _GAIN * finals[default]:
        best = default
    trials = tuple(Trial(c, finals.get(c, t.us), t.rejected) for c, t in done.items())
    us = None if best is None else finals[best]
    return Entry(tunable.name, key, source, best, us, finals.get(default), complete, trials)
