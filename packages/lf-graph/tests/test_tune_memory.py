"""What the tuner remembers, in files and between processes, and where a search that was cut short goes on."""

from __future__ import annotations

import math
import multiprocessing
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import tune_cases as cases
from tune_cases import (
    CPU,
    DEFAULT,
    FAST,
    KEY,
    OTHER_CARD,
    RACY,
    SLOW,
    WRONG,
    FakeTimer,
    first_use,
    reasons,
    tunable,
)

from lf_graph import tune
from lf_graph.kernels._tunable import (
    CHOSEN,
    TUNABLES,
    Problem,
    config_of,
    register,
)
from lf_graph.tune import _run, _search, _state
from lf_graph.tune._search import Effort, search
from lf_graph.tune._source import source_hash
from lf_graph.tune._table import Entry, Table, dump, parse

_fresh = pytest.fixture(autouse=True)(cases.fresh)


def test_a_tuned_choice_is_used_and_costs_no_benchmark_again() -> None:
    kernel = register(tunable(FAST, WRONG))
    assert config_of(kernel, KEY) == DEFAULT
    report = tune.run(timer=FakeTimer())  # of what was launched
    assert report.timings > 0
    assert config_of(kernel, KEY) == FAST

    _state._STATE.clear()  # a new process
    CHOSEN.clear()
    _state.use(device=CPU)
    timer = FakeTimer()
    assert config_of(kernel, KEY) == FAST
    again = tune.run(timer=timer)

    assert (again.timings, timer.asked, again.tuned) == (0, [], ())
    assert [e.config for e in again.found] == [FAST]
    assert tune.stats().timings == 0
    assert "1 tuned; 0 timings" in str(tune.stats())


def test_the_hot_path_is_one_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = register(tunable())
    config_of(kernel, KEY)
    monkeypatch.setattr(_state, "_STATE", [])  # reading anything but CHOSEN would make a new one
    monkeypatch.setattr("lf_graph.tune._resolve.resolve", None)

    assert config_of(kernel, KEY) == DEFAULT
    assert _state._STATE == []


def test_rejections_and_their_reasons_are_in_the_file() -> None:
    register(tunable(FAST, WRONG, RACY))
    tune.run(keys={"tests.double": [KEY]}, timer=FakeTimer())

    (entry,) = parse(Path(tune.stats().path).read_text()).entries.values()
    assert set(reasons(entry)) == {3, 4}
    assert [t.us for t in entry.trials if not t.rejected] == [10.0, 8.0]


def test_rebuild_searches_again() -> None:
    register(tunable(FAST))
    tune.run(keys={"tests.double": [KEY]}, timer=FakeTimer())

    slower_now = FakeTimer({0: 10.0, 1: 20.0})
    report = tune.run(timer=slower_now, rebuild=True)

    assert [e.config for e in report.tuned] == [DEFAULT]
    assert slower_now.asked


def test_a_changed_kernel_is_tuned_again() -> None:
    register(tunable(FAST))
    tune.run(keys={"tests.double": [KEY]}, timer=FakeTimer())
    del TUNABLES["tests.double"]
    changed = register(tunable(FAST, version="2"))
    _state.use()

    assert config_of(changed, KEY) == DEFAULT
    assert "tests.double: the source changed" in tune.stats().problems[0]
    assert len(tune.run(timer=FakeTimer()).tuned) == 1
    assert config_of(changed, KEY) == FAST


def test_an_entry_with_other_constants_is_not_launched() -> None:
    kernel = register(tunable(FAST))
    entry = search(kernel, KEY, CPU, Effort(FakeTimer()))
    other = Entry(entry.tunable, KEY, entry.source, cases.Config((("OTHER", 1),)), 1.0, 2.0, True)
    _state.state().keep(other)

    assert config_of(kernel, KEY) == DEFAULT
    assert "other constants" in tune.stats().problems[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "lf-graph tune", "version": 99}', "\x00"])
def test_a_damaged_file_is_reported_and_replaced(content: str) -> None:
    kernel = register(tunable(FAST))
    path = Path(tune.stats().path)
    path.parent.mkdir(parents=True)
    path.write_text(content)

    with pytest.warns(tune.TuneCacheWarning, match="is not used, and is replaced"):
        _state.use()
    assert config_of(kernel, KEY) == DEFAULT
    assert str(path) in tune.stats().problems[0]
    tune.run(timer=FakeTimer())

    assert parse(path.read_text()).entries[kernel.name, KEY].config == FAST
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _state.use()
    assert tune.stats().problems == ()


def test_a_table_of_another_card_is_not_used() -> None:
    kernel = register(tunable(FAST))
    path = Path(tune.stats().path)
    path.parent.mkdir(parents=True)
    path.write_text(dump(Table(OTHER_CARD)))

    with pytest.warns(tune.TuneCacheWarning, match="was measured on"):
        _state.use()
    assert config_of(kernel, KEY) == DEFAULT
    assert str(path) in tune.stats().problems[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_keeps_choices_for_the_process(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    _check_unwritable(closed)


def test_a_file_in_place_of_the_folder_keeps_choices_for_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _check_unwritable(tmp_path / "file" / "tables")


def _check_unwritable(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tune.folder(folder)
        kernel = register(tunable(FAST))
        second = register(tunable(FAST, name="tests.second"))
        tune.run(keys={kernel.name: [KEY], second.name: [KEY]}, timer=FakeTimer())

    assert (config_of(kernel, KEY), config_of(second, KEY)) == (FAST, FAST)
    assert any("cannot be written" in p or "not used" in p for p in tune.stats().problems)


def _put_entry(folder: str, number: int) -> None:
    cases_table = _state.use(Path(folder), CPU)
    for i in range(5):
        cases_table.keep(Entry("tests.double", (number, i), "source", FAST, 1.0, 2.0, True))


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_put_entry, args=(str(tmp_path), n)) for n in range(4)]
    for w in writers:
        w.start()
    for w in writers:
        w.join(60)

    assert [w.exitcode for w in writers] == [0] * 4
    table = _state.use(tmp_path, CPU).store.read()
    assert len(table.entries) == 20


def _use_first(folder: str, started: Any, told: Any) -> None:
    timer = FakeTimer()
    _state.use(Path(folder), CPU, "first_use", lambda device: timer)
    started.wait()
    told.put((config_of(TUNABLES["tests.double"], KEY)["WAY"], len(timer.asked)))


def test_one_process_tunes_at_first_use_and_the_others_wait_for_it(tmp_path: Path) -> None:
    register(tunable(FAST, SLOW))
    context = multiprocessing.get_context("fork")
    started, told = context.Barrier(3), context.SimpleQueue()
    ranks = [context.Process(target=_use_first, args=(str(tmp_path), started, told)) for _ in range(3)]
    for r in ranks:
        r.start()
    for r in ranks:
        r.join(60)

    found = sorted(told.get() for _ in ranks)
    assert [way for way, _ in found] == [FAST["WAY"]] * 3
    assert sorted(asked > 0 for _, asked in found) == [False, False, True]


class _Clock:
    """Time that passes by one second at every question."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def test_a_search_that_ran_out_of_time_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = register(tunable(SLOW, FAST))
    keys = {kernel.name: [KEY, ("float32", 64, True)]}
    clock = _Clock()
    for module in (_run, _search):
        monkeypatch.setattr(module, "time", clock)

    nothing = tune.run(keys=keys, timer=FakeTimer(), budget_s=0.5)
    assert (nothing.tuned, len(nothing.left)) == ((), 2)
    some = tune.run(keys=keys, timer=FakeTimer(), budget_s=2.5)
    assert [(len(e.trials), e.complete) for e in some.tuned] == [(2, False)]
    assert "not complete" in str(some)
    assert len(some.left) == 1

    rest = tune.run(keys=keys, timer=FakeTimer())
    assert (rest.left, rest.found) == ((), ())
    assert [(e.complete, e.config) for e in rest.tuned] == [(True, FAST)] * 2


def test_what_was_tried_is_not_tried_again() -> None:
    kernel = tunable(WRONG, FAST)
    tried = (tune.Trial(DEFAULT, 10.0), tune.Trial(WRONG, None, "wrong: as before"))
    started = Entry(kernel.name, KEY, source_hash(kernel), DEFAULT, 10.0, 10.0, False, tried)
    cases.LAUNCHED.clear()

    entry = search(kernel, KEY, CPU, Effort(FakeTimer()), started)

    assert WRONG["WAY"] not in cases.LAUNCHED
    assert (entry.config, entry.complete) == (FAST, True)
    assert reasons(entry) == {3: "wrong: as before"}


def test_the_default_is_tried_even_without_time() -> None:
    entry = search(tunable(FAST), KEY, CPU, Effort(FakeTimer(), until=-math.inf))

    assert (entry.config, entry.complete, len(entry.trials)) == (DEFAULT, False, 1)


def test_every_tunable_gets_its_first_key_before_one_gets_all() -> None:
    first, second = (register(tunable(name=n)) for n in ("tests.a", "tests.b"))
    jobs = _run.jobs_of([first, second], {"tests.a": [(1,), (2,)], "tests.b": [(3,)]})

    assert [(t.name, k) for t, k in jobs] == [("tests.a", (1,)), ("tests.b", (3,)), ("tests.a", (2,))]


def test_one_search_that_raises_does_not_end_the_run() -> None:
    def impossible(key: Any, device: Any) -> Any:
        raise MemoryError("no room for the inputs")

    register(tunable(name="tests.impossible", problem=impossible))
    register(tunable(FAST))
    report = tune.run(keys={"tests.impossible": [KEY], "tests.double": [KEY]}, timer=FakeTimer())

    assert [(name, error) for name, _, error in report.failed] == [
        ("tests.impossible", "MemoryError: no room for the inputs")
    ]
    assert len(report.tuned) == 1


def test_a_lack_of_memory_is_no_reason_against_a_candidate() -> None:
    def starved(key: Any, device: Any) -> Any:
        inner = cases.problem(key, device)

        def run(c: Any) -> Any:
            if c == FAST:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return inner.run(c)

        return Problem(run, inner.reference, inner.tolerance)

    kernel = register(tunable(FAST, problem=starved))
    report = tune.run(keys={kernel.name: [KEY]}, timer=FakeTimer())
    assert "out of memory" in report.failed[0][2]
    assert _state.state().store.read().entries == {}

    first_use(FakeTimer())
    with pytest.raises(torch.OutOfMemoryError) as caught:
        config_of(kernel, KEY)
    assert caught.value.__notes__ == [f"lf_graph.tune was searching tests.double for {KEY}"]
