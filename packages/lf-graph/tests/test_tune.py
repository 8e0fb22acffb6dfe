"""The tuner: what may win, what is remembered, what happens inside a capture. Times come from a fake clock."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import tune_cases as cases
from torch._subclasses.fake_tensor import FakeTensorMode
from tune_cases import DEFAULT, FAST, KEY, NAN, RACY, RAISES, SHORT, SLOW, WRONG, FakeTimer, config, tunable

from lf_graph import TrainStep, capture, tune
from lf_graph._backend import backend_for
from lf_graph._errors import GraphError
from lf_graph._recorder import as_if_capturing
from lf_graph.kernels._tunable import (
    CHOSEN,
    TUNABLES,
    Choice,
    Problem,
    Tunable,
    alternative_of,
    config_of,
    register,
    register_choice,
)
from lf_graph.tune import _run, _search, _state
from lf_graph.tune.__main__ import main
from lf_graph.tune._ahead import check_ahead
from lf_graph.tune._card import Card
from lf_graph.tune._resolve import is_capturing
from lf_graph.tune._search import Effort, configs_of, search
from lf_graph.tune._source import source_hash
from lf_graph.tune._table import Entry, Table, dump, parse

CPU = torch.device("cpu")
OTHER_CARD = Card("other", "1.2", "3.4")


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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


# -- what may win --------------------------------------------------------------------------------------------


def test_the_fastest_candidate_that_passes_wins() -> None:
    entry = entry_of(SLOW, FAST)

    assert (entry.config, entry.us, entry.default_us) == (FAST, 8.0, 10.0)
    assert entry.complete
    assert entry.rejected == ()


def test_a_wrong_candidate_that_is_ten_times_faster_does_not_win_and_is_never_timed() -> None:
    timer = FakeTimer()
    entry = entry_of(WRONG, FAST, timer=timer)

    assert entry.config == FAST
    assert WRONG["WAY"] not in timer.asked
    assert "wrong: output 0 is 5.0e-01 from its reference, and 1e-03 is allowed" in reasons(entry)[3]


def test_a_racy_candidate_that_is_twice_as_fast_does_not_win() -> None:
    timer = FakeTimer()
    entry = entry_of(RACY, timer=timer)

    assert entry.config == DEFAULT
    assert RACY["WAY"] not in timer.asked
    assert "not repeatable" in reasons(entry)[4]
    assert "of 30 runs" in reasons(entry)[4]


def test_thirty_runs_prove_that_a_candidate_repeats() -> None:
    cases.LAUNCHED.clear()
    entry_of()

    assert cases.LAUNCHED.count(DEFAULT["WAY"]) >= 30


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (RAISES, "does not run: RuntimeError: out of resource: shared memory"),
        (NAN, "wrong: output 0 is nan"),
        (SHORT, r"wrong: outputs of shape \[\(49,\)\]"),
    ],
)
def test_other_rejections_keep_their_reason(bad: Any, why: str) -> None:
    entry = entry_of(bad, FAST)

    assert entry.config == FAST
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(reasons(entry)[bad["WAY"]])


def test_a_gain_within_noise_leaves_the_default() -> None:
    assert entry_of(FAST, timer=FakeTimer({0: 10.0, 1: 9.95})).config == DEFAULT
    assert entry_of(FAST, timer=FakeTimer({0: 10.0, 1: 9.8})).config == FAST


def test_a_default_that_is_wrong_is_no_choice_and_is_named() -> None:
    broken = Tunable("tests.broken", (), lambda key: WRONG, lambda key: (FAST,), cases.problem)
    entry = search(broken, KEY, CPU, Effort(FakeTimer()))

    assert (entry.config, entry.default_us) == (FAST, None)
    register(broken)
    report = tune.run(keys={"tests.broken": [KEY]}, timer=FakeTimer())
    assert [e.tunable for e in report.broken] == ["tests.broken"]
    assert "the default was REJECTED" in str(report)


def test_when_nothing_passes_the_default_runs_and_this_is_said() -> None:
    hopeless = register(Tunable("tests.hopeless", (), lambda key: WRONG, lambda key: (RACY,), cases.problem))
    report = tune.run(keys={"tests.hopeless": [KEY]}, timer=FakeTimer())

    assert report.tuned[0].config is None
    assert "NO candidate passed" in str(report)
    assert config_of(hopeless, KEY) == WRONG
    assert tune.stats().chosen[0].origin == "default"


def test_every_candidate_is_tried_once() -> None:
    entry = entry_of(FAST, DEFAULT, FAST)

    assert [t.config for t in entry.trials] == [DEFAULT, FAST]


def test_candidates_are_tried_in_an_order_of_their_own_the_default_first() -> None:
    grid = [config(i) for i in range(40)]
    order = configs_of(tunable(*grid), KEY)

    assert order[0] == DEFAULT
    assert order != grid
    assert sorted(c["WAY"] for c in order) == list(range(40))
    assert order == configs_of(tunable(*grid), KEY)


def test_a_slow_candidate_may_be_given_up() -> None:
    class Noting(FakeTimer):
        limits: ClassVar[list[float]] = []

        def time(self, copies: Any, windows: int, give_up_us: float = math.inf) -> tune.Timing:
            self.limits.append(give_up_us)
            return super().time(copies, windows, give_up_us)

    entry_of(FAST, timer=Noting())

    assert Noting.limits == [math.inf, 20.0, math.inf, math.inf]


def test_a_candidate_that_cannot_be_captured_is_rejected() -> None:
    class Refuses(FakeTimer):
        def time(self, copies: Any, windows: int, give_up_us: float = math.inf) -> tune.Timing:
            copies[0]()
            if cases.LAUNCHED[-1] == FAST["WAY"]:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().time(copies, windows, give_up_us)

    entry = entry_of(FAST, timer=Refuses())

    assert entry.config == DEFAULT
    assert "cannot be captured" in reasons(entry)[1]


# -- what is remembered --------------------------------------------------------------------------------------


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
    path = Path(tune.stats().path)
    path.parent.mkdir(parents=True)
    path.write_text(dump(Table(OTHER_CARD)))

    with pytest.warns(tune.TuneCacheWarning, match="was measured on"):
        _state.use()


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


# -- budget ---------------------------------------------------------------------------------------------------


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


# -- first use and captures ----------------------------------------------------------------------------------


def first_use(timer: FakeTimer) -> None:
    _state.use(mode="first_use", timer=lambda device: timer)


def test_first_use_tunes_once() -> None:
    kernel, timer = register(tunable(FAST)), FakeTimer()
    first_use(timer)
    x = torch.ones(3)
    cases.launch(kernel, x)
    asked = len(timer.asked)
    cases.launch(kernel, x)

    assert asked > 0
    assert len(timer.asked) == asked == tune.stats().timings
    assert config_of(kernel, KEY) == FAST
    assert tune.stats().chosen[0].origin == "tuned"


def test_first_use_inside_a_capture_is_refused_by_name() -> None:
    kernel, timer = register(tunable(FAST)), FakeTimer()
    first_use(timer)
    x, backend = torch.ones(3), backend_for(CPU)

    with pytest.raises(tune.NotTunedError, match=r"tests\.double is not tuned for") as caught:
        backend.capture(lambda: cases.launch(kernel, x), backend.new_pool())
    assert (caught.value.kernel, caught.value.key) == ("tests.double", KEY)
    assert timer.asked == []

    cases.launch(kernel, x)  # as a warm-up does
    asked = len(timer.asked)
    graph, out = backend.capture(lambda: cases.launch(kernel, x), backend.new_pool())
    graph.replay()
    assert torch.equal(out, x * 2)
    assert len(timer.asked) == asked


def test_the_warm_up_of_a_capture_is_a_first_use() -> None:
    kernel, timer = register(tunable(FAST)), FakeTimer()
    first_use(timer)

    captured = capture(lambda x: cases.launch(kernel, x), torch.ones(3))

    asked = len(timer.asked)
    assert asked > 0
    assert cases.LAUNCHED[-1] == FAST["WAY"]  # what the graph holds
    assert torch.equal(captured(torch.full((3,), 4.0)), torch.full((3,), 8.0))
    assert len(timer.asked) == asked
    captured.close()


def test_a_train_step_tunes_at_its_first_batch_and_never_again() -> None:
    kernel, timer = register(tunable(FAST)), FakeTimer()
    first_use(timer)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainStep(model, optimizer, loss=lambda x: cases.launch(kernel, model(x)).square().mean()) as step:
        step(torch.ones(2, 4))
        asked = len(timer.asked)
        step(torch.ones(2, 4))

    assert 0 < asked == len(timer.asked)


def test_run_inside_a_capture_is_refused() -> None:
    register(tunable(FAST))
    backend, timer = backend_for(CPU), FakeTimer()

    with pytest.raises(tune.NotTunedError):
        backend.capture(lambda: tune.run(keys={"tests.double": [KEY]}, timer=timer), backend.new_pool())
    assert timer.asked == []


def test_without_first_use_a_capture_takes_the_default() -> None:
    kernel, backend = register(tunable(FAST)), backend_for(CPU)
    _, out = backend.capture(lambda: cases.launch(kernel, torch.ones(3)), backend.new_pool())

    assert torch.equal(out, torch.full((3,), 2.0))


def test_a_dry_run_neither_tunes_nor_decides() -> None:
    kernel, timer = register(tunable(FAST)), FakeTimer()
    first_use(timer)
    with as_if_capturing():
        assert not is_capturing()
        assert config_of(kernel, KEY) == DEFAULT
    assert timer.asked == []

    assert config_of(kernel, KEY) == FAST


def test_first_use_is_not_disturbed_by_the_modes_of_its_caller() -> None:
    kernel, timer = register(tunable(FAST)), FakeTimer()
    first_use(timer)
    state = torch.get_rng_state()

    with FakeTensorMode(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert config_of(kernel, KEY) == FAST

    assert torch.equal(torch.get_rng_state(), state)


def test_a_shipped_choice_needs_no_tuning_at_first_use() -> None:
    kernel, timer = register(tunable(FAST)), FakeTimer()
    entry = search(kernel, KEY, CPU, Effort(FakeTimer()))
    first_use(timer)
    now = _state.state()
    now.shipped = Table(OTHER_CARD).with_entry(entry)

    assert config_of(kernel, KEY) == FAST
    assert timer.asked == []
    assert tune.stats().chosen[0].origin == "shipped"


def test_a_tuned_choice_comes_before_a_shipped_one() -> None:
    kernel = register(tunable(FAST))
    entry = search(kernel, KEY, CPU, Effort(FakeTimer()))
    now = _state.state()
    now.shipped = Table(OTHER_CARD).with_entry(entry)
    now.keep(Entry(kernel.name, KEY, entry.source, SLOW, 1.0, 2.0, True))

    assert config_of(kernel, KEY) == SLOW


def test_first_use_takes_what_another_process_found_meanwhile() -> None:
    kernel, timer = register(tunable(FAST)), FakeTimer()
    first_use(timer)
    other = _state.Store(Path(tune.stats().path).parent, _state.state().card)
    other.put(search(kernel, KEY, CPU, Effort(FakeTimer())))

    assert config_of(kernel, KEY) == FAST
    assert timer.asked == []


@pytest.mark.parametrize("value", ["on", "First_use"])
def test_an_unknown_mode_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LF_GRAPH_TUNE", value)
    _state._STATE.clear()
    with pytest.raises(ValueError, match="one of off, first_use"):
        tune.stats()


def test_the_environment_turns_first_use_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LF_GRAPH_TUNE", "first_use")
    _state._STATE.clear()
    assert tune.stats().mode == "first_use"
    tune.on_first_use(False)
    assert tune.stats().mode == "off"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_only_a_given_timer_runs() -> None:
    with pytest.raises(GraphError, match="measures on a GPU"):
        tune.run()


# -- choices between implementations ---------------------------------------------------------------------------


def choice_of(times: dict[str, float], calls: dict[str, Any]) -> tuple[Choice, Any]:
    reference = torch.arange(4.0).double()
    last: list[str] = []

    def noted(name: str) -> Any:
        def call() -> tuple[torch.Tensor, ...]:
            last.append(name)
            return (calls[name](),)

        return call

    class Timer:
        def time(self, copies: Any, windows: int, give_up_us: float = math.inf) -> tune.Timing:
            copies[0]()
            return tune.Timing(times[last[-1]], 0.0, 20)

    offered = {name: noted(name) for name in calls}
    choice = Choice(
        "tests.choice", ("ours", "library", "wrong", "absent"), lambda k, d: (offered, (reference,), (1e-6,))
    )
    return register_choice(choice), Timer()


def test_the_fastest_implementation_that_is_right_is_chosen() -> None:
    right = lambda: torch.arange(4.0)  # noqa: E731
    choice, timer = choice_of(
        {"ours": 5.0, "library": 3.0, "wrong": 1.0},
        {"ours": right, "library": right, "wrong": lambda: torch.zeros(4)},
    )
    assert alternative_of(choice, KEY) == "ours"

    report = tune.run(timer=timer)

    assert alternative_of(choice, KEY) == "library"
    rejected = {choice.alternatives[t.config["alternative"]]: t.rejected for t in report.tuned[0].rejected}
    assert rejected["wrong"].startswith("wrong: output 0")
    assert rejected["absent"] == "does not run: NotImplementedError: absent does not exist here"


def test_a_choice_inside_a_search_may_tune_its_own_kernel() -> None:
    kernel, timer = register(tunable(FAST)), FakeTimer()

    def ours() -> torch.Tensor:
        return cases.launch(kernel, torch.arange(4.0) / 2)

    choice, choosing = choice_of({"ours": 5.0}, {"ours": ours})
    first_use(timer)
    _state.use(timer=lambda device: _Both(timer, choosing))

    assert alternative_of(choice, KEY) == "ours"
    assert config_of(kernel, KEY) == FAST


class _Both:
    """The kernel's clock for its launches, the choice's for its calls."""

    def __init__(self, kernel: FakeTimer, choice: Any) -> None:
        self.kernel, self.choice = kernel, choice

    def time(self, copies: Any, windows: int, give_up_us: float = math.inf) -> tune.Timing:
        before = len(cases.LAUNCHED)
        copies[0]()
        launched = cases.LAUNCHED[before:]
        return tune.Timing(self.kernel.times[launched[-1]] if launched else 1.0, 0.0, 20)


# -- workers ---------------------------------------------------------------------------------------------------


def test_workers_check_ahead_and_survive_a_candidate_that_ends_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *sys.path]))
    kernel = register(
        tunable(WRONG, cases.EXITS, FAST, RAISES, name=cases.WORKERS),
    )
    faults = check_ahead([(kernel, KEY)], CPU, 1, math.inf, ["tune_cases"])

    by_way = {c["WAY"]: reason for (_, _, c), reason in faults.items()}
    assert {way for way, reason in by_way.items() if not reason} == {DEFAULT["WAY"], FAST["WAY"]}
    assert "out of resource" in by_way[RAISES["WAY"]]
    assert by_way[cases.EXITS["WAY"]] == "ended its process: exit status 77"
    assert by_way[WRONG["WAY"]].startswith("wrong: output 0")
    effort = Effort(FakeTimer(), checked=faults)
    entry = search(kernel, KEY, CPU, effort)
    assert entry.config == FAST
    assert len(entry.rejected) == 3
    assert effort.checks == 2  # the default and the one that passed, once more here


def test_what_workers_checked_is_timed_for_every_key_before_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = register(tunable(FAST, SLOW, WRONG))
    keys: list[Any] = [(1,), (2,)]
    checked = {
        (kernel.name, key, c): r for key in keys for c, r in ((FAST, ""), (WRONG, "wrong: said a worker"))
    }
    monkeypatch.setattr(_run, "check_ahead", lambda *args: checked)
    order: list[tuple[Any, bool]] = []
    searched = _run.tuned

    def noting(now: Any, t: Any, key: Any, effort: Any, started: Any) -> Entry:
        entry = searched(now, t, key, effort, started)
        order.append((key, entry.complete))
        return entry

    monkeypatch.setattr(_run, "tuned", noting)
    report = tune.run(keys={kernel.name: keys}, timer=FakeTimer(), workers=2)

    assert order == [((1,), False), ((2,), False), ((1,), True), ((2,), True)]
    assert [e.config for e in report.tuned] == [FAST, FAST]
    assert reasons(report.tuned[0]) == {3: "wrong: said a worker"}
    assert [len(e.trials) for e in report.tuned] == [4, 4]


def test_workers_blame_no_candidate_for_inputs_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *sys.path]))
    unknown = tunable(FAST, name="tests.nobody_registers_this")

    assert check_ahead([(unknown, KEY)], CPU, 1, math.inf, ["tune_cases"]) == {}


# -- the command -----------------------------------------------------------------------------------------------


def test_the_command_lists_shows_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = register(tunable(FAST, WRONG))
    tune.run(keys={kernel.name: [KEY]}, timer=FakeTimer())

    assert main(["--list"]) == 0
    assert "tests.double: 1 known keys, 1 tuned, 0 shipped" in capsys.readouterr().out
    assert main(["--show"]) == 0
    shown = capsys.readouterr().out
    assert "WAY=1 warps=4 stages=3, 8.0 us, 1.25x the default (3 tried, 1 rejected)" in shown
    assert "WAY=3 warps=4 stages=3: wrong: output 0" in shown
    assert main(["--export", str(tmp_path / "ship")]) == 0
    (entry,) = parse((tmp_path / "ship" / "cpu.json").read_text()).entries.values()
    assert (entry.config, entry.trials) == (FAST, ())


def test_the_command_rebuilds_and_its_status_tells(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(tunable(FAST))
    tune.run(keys={"tests.double": [KEY]}, timer=FakeTimer())
    if not torch.cuda.is_available():
        assert main(["--rebuild"]) == 1
        assert "measures on a GPU" in capsys.readouterr().err
    monkeypatch.setattr(
        "lf_graph.tune.__main__.run", lambda *a, **k: tune.run(*a, **{**k, "timer": FakeTimer()})
    )

    assert main(["--rebuild"]) == 0
    assert "1 tuned, 0 known before" in capsys.readouterr().out
    assert main([]) == 0
    assert "0 tuned, 1 known before" in capsys.readouterr().out


def test_exporting_keeps_what_was_shipped_and_not_measured_now(tmp_path: Path) -> None:
    kernel = register(tunable(FAST))
    entry = search(kernel, KEY, CPU, Effort(FakeTimer()))
    older = Entry(kernel.name, ("older",), entry.source, SLOW, 1.0, 1.0, True)
    now = _state.state()
    now.shipped = Table(now.card).with_entry(older)
    now.keep(entry)

    main(["--export", str(tmp_path)])

    table = parse((tmp_path / "cpu.json").read_text())
    assert {k for _, k in table.entries} == {KEY, ("older",)}


def test_config_prints_and_looks_up() -> None:
    assert str(config(3)) == "WAY=3 warps=4 stages=3"
    assert config(3).keywords() == {"WAY": 3, "num_warps": 4, "num_stages": 3}
