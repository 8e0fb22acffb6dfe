"""The tuner on a GPU: a real race, a kernel that writes nothing, one that breaks its device context, real times."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import tune_sum as made
from tune_sum import BREAKS, KEY, LAZY, RACY, RIGHT, TOO_BIG, TOTAL

from lf_graph import capture, tune
from lf_graph.kernels._tunable import CHOSEN, config_of
from lf_graph.tune import GraphTimer, _state
from lf_graph.tune._ahead import check_ahead
from lf_graph.tune._search import Effort, search

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _tables(tmp_path: Path) -> Iterator[None]:
    _state._STATE.clear()
    _state.use(tmp_path)
    yield
    _state._STATE.clear()
    CHOSEN.clear()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_a_racy_kernel_that_uses_the_whole_card_loses_to_one_program() -> None:
    entry = search(TOTAL, KEY, device(), Effort(GraphTimer(device())))

    assert entry.config == RIGHT
    reasons = {t.config: t.rejected for t in entry.rejected}
    assert "not repeatable" in reasons[RACY]
    # what lies in memory that nobody wrote is wrong, and may differ from run to run
    assert "wrong" in reasons[LAZY] or "not repeatable" in reasons[LAZY]
    assert "does not run" in reasons[TOO_BIG]
    torch.cuda.synchronize()  # the device is alive


def test_a_candidate_that_breaks_its_device_context_costs_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *sys.path]))
    faults = check_ahead([(made.BREAKING, KEY)], device(), 1, math.inf, ["tune_sum"])

    reasons = {config: reason for (_, _, config), reason in faults.items()}
    assert reasons.keys() == {RIGHT, BREAKS}  # the default is always tried
    assert reasons[RIGHT] == ""
    assert "lost the device" in reasons[BREAKS]
    torch.cuda.synchronize()


def test_first_use_tunes_before_a_capture_and_not_inside_it() -> None:
    tune.on_first_use()
    x = torch.randn(1 << 16, device=device())

    def launched(x: torch.Tensor) -> torch.Tensor:
        return made.total(x, config_of(TOTAL, KEY))[0]

    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            with pytest.raises(tune.NotTunedError, match=TOTAL.name):
                launched(x)
        finally:
            graph.capture_end()
    torch.cuda.synchronize()

    captured = capture(launched, x)  # its warm-up tunes
    timings = tune.stats().timings
    torch.testing.assert_close(captured(x), x.double().sum().float().view(1), rtol=1e-3, atol=1e-2)
    assert timings > 0
    assert config_of(TOTAL, KEY) == RIGHT
    assert tune.stats().timings == timings
    captured.close()


def test_a_run_keeps_what_it_found_for_other_processes(tmp_path: Path) -> None:
    report = tune.run(keys={TOTAL.name: [KEY]})
    assert [e.config for e in report.tuned] == [RIGHT]
    _state._STATE.clear()
    _state.use(tmp_path)

    again = tune.run(keys={TOTAL.name: [KEY]})

    assert (again.timings, len(again.found)) == (0, 1)
    assert tune.stats().card == torch.cuda.get_device_name()


def test_a_window_is_one_graph_of_calls_that_take_turns_on_copies() -> None:
    seen: list[int] = []
    x = [torch.randn(1 << 20, device=device()) for _ in range(3)]

    def work(i: int) -> torch.Tensor:
        seen.append(i)
        return x[i] * 2

    timing = GraphTimer(device()).time([lambda i=i: work(i) for i in range(3)], 7)

    assert timing.calls >= 20
    assert seen[-timing.calls :] == [0, 1, 2] * (timing.calls // 3)
    assert timing.us > 0
