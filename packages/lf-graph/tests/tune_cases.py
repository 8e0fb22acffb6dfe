"""A kernel made of Python, whose configurations are right, wrong, unrepeatable or broken, and a clock that is told.

Also imported by the tuner's workers, as a module with tunables.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lf_graph.kernels._tunable import CHOSEN, TUNABLES, Config, Key, Problem, Tunable, config_of, register
from lf_graph.tune import Timing, _run, _state
from lf_graph.tune._card import Card
from lf_graph.tune._search import Effort, search
from lf_graph.tune._table import Entry

CPU = torch.device("cpu")
OTHER_CARD = Card("other", "1.2", "3.4")
KEY: Key = ("bfloat16", 64, True)
LAUNCHED: list[int] = []  # WAY of every launch
_COUNTER = itertools.count()


def config(way: int) -> Config:
    return Config((("WAY", way),))


DEFAULT, FAST, SLOW, WRONG, RACY, RAISES, NAN, SHORT, EXITS = map(config, range(9))
# A wrong, a racy and a NaN candidate are the fastest by far, and none of them may win.
MICROSECONDS = {0: 10.0, 1: 8.0, 2: 30.0, 3: 1.0, 4: 5.0, 5: 0.5, 6: 0.5, 7: 0.5, 8: 0.5}


def double(x: Tensor, config: Config) -> tuple[Tensor, ...]:
    way = config["WAY"]
    LAUNCHED.append(way)
    if way == EXITS["WAY"]:
        os._exit(77)
    if way == RAISES["WAY"]:
        raise RuntimeError("out of resource: shared memory")
    result = x * (3 if way == WRONG["WAY"] else 2)
    if way == NAN["WAY"]:
        result[0] = float("nan")
    if way == SHORT["WAY"]:
        return (result[:-1],)
    if way == RACY["WAY"] and next(_COUNTER) % 7 == 3:
        result[1] = torch.nextafter(result[1], torch.tensor(1e9))  # one bit, far within the tolerance
    return (result,)


def problem(key: Key, device: torch.device) -> Problem:
    x = torch.randn(50, device=device)
    return Problem(lambda config: double(x, config), (x.double() * 2,), (1e-3,))


def tunable(*candidates: Config, name: str = "tests.double", **fields: Any) -> Tunable:
    """A tunable with these candidates beside the default."""
    common: dict[str, Any] = {"kernels": (double,), "problem": problem}
    return Tunable(name, default=lambda key: DEFAULT, candidates=lambda key: candidates, **(common | fields))


class FakeTimer:
    """Says what ``MICROSECONDS`` says about the configuration that a call launches, and counts."""

    def __init__(self, times: dict[int, float] | None = None) -> None:
        self.times = times or MICROSECONDS
        self.asked: list[int] = []

    def time(
        self, copies: Sequence[Callable[[], object]], windows: int, give_up_us: float = math.inf
    ) -> Timing:
        copies[0]()
        self.asked.append(LAUNCHED[-1])
        return Timing(self.times[LAUNCHED[-1]], 0.0, 20)


def launch(kernel: Tunable, x: Tensor, key: Key = KEY) -> Tensor:
    """What an operator does: ask for a configuration, then launch."""
    return double(x, config_of(kernel, key))[0]


def first_use(timer: FakeTimer) -> None:
    _state.use(mode="first_use", timer=lambda device: timer)


def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables in a folder of the test's own, no kernels but the test's, and nothing left behind."""
    monkeypatch.setattr(_run, "load_kernels", lambda imports=(): None)
    monkeypatch.setenv("LF_GRAPH_TUNE_DIR", str(tmp_path / "tables"))
    others = dict(TUNABLES)
    TUNABLES.clear()
    _state._STATE.clear()
    _state.use(device=CPU)
    yield
    TUNABLES.clear()
    TUNABLES.update(others)
    _state._STATE.clear()
    CHOSEN.clear()


def entry_of(*candidates: Any, timer: FakeTimer | None = None, **fields: Any) -> Entry:
    return search(tunable(*candidates, **fields), KEY, CPU, Effort(timer or FakeTimer()))


def reasons(entry: Entry) -> dict[int, str]:
    return {t.config["WAY"]: t.rejected for t in entry.rejected}


WORKERS = "tests.workers"
if WORKERS not in TUNABLES:
    register(tunable(WRONG, EXITS, FAST, RAISES, name=WORKERS))
