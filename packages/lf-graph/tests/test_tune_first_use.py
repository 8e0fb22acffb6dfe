"""Tuning at first use: once, before a capture and never inside one, whatever the caller is in the middle of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import tune_cases as cases
from torch._subclasses.fake_tensor import FakeTensorMode
from tune_cases import (
    CPU,
    DEFAULT,
    FAST,
    KEY,
    OTHER_CARD,
    SLOW,
    FakeTimer,
    first_use,
    tunable,
)

from lf_graph import TrainStep, capture, tune
from lf_graph._backend import backend_for
from lf_graph._errors import GraphError
from lf_graph._recorder import as_if_capturing
from lf_graph.kernels._tunable import (
    config_of,
    register,
)
from lf_graph.tune import _state
from lf_graph.tune._resolve import is_capturing
from lf_graph.tune._search import Effort, search
from lf_graph.tune._table import Entry, Table

_fresh = pytest.fixture(autouse=True)(cases.fresh)


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
