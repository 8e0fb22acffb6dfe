"""The tuner: what may win, and choices between implementations. Times come from a fake clock."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
import tune_cases as cases
from tune_cases import (
    CPU,
    DEFAULT,
    FAST,
    KEY,
    NAN,
    RACY,
    RAISES,
    SHORT,
    SLOW,
    WRONG,
    FakeTimer,
    config,
    entry_of,
    first_use,
    reasons,
    tunable,
)

from lf_graph import tune
from lf_graph.kernels._tunable import (
    Choice,
    Tunable,
    alternative_of,
    config_of,
    register,
    register_choice,
)
from lf_graph.tune import _state
from lf_graph.tune._search import Effort, configs_of, search

_fresh = pytest.fixture(autouse=True)(cases.fresh)


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
    assert rejected["absent"] == "does not run: KernelUnavailableError: absent does not exist here"


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


def test_config_prints_and_looks_up() -> None:
    assert str(config(3)) == "WAY=3 warps=4 stages=3"
    assert config(3).keywords() == {"WAY": 3, "num_warps": 4, "num_stages": 3}
