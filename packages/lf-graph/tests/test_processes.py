"""Fork, spawn, threads and signals, as the README states them."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lf_graph
from lf_graph import Chain, GraphError, Piece, StepResult, TrainStep, capture

X = torch.linspace(-1, 1, 48).view(12, 4)
Y = X.sum(1, keepdim=True).sin()


class Trained:
    """A small model with its step.

    A second one of these is what an undisturbed step must equal: torch's AdamW rounds otherwise on some CPUs.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.model(x) - y).square().mean()

    def step(self, **options: Any) -> TrainStep:
        return TrainStep(self.model, self.optimizer, **{"loss": self.loss} | options)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    lf_graph.close()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_batches_of_loader_workers_started_beside_a_captured_step_train_it(start: str) -> None:
    mine, twin = Trained(), Trained().step()
    step = mine.step()
    step.capture(X[:3], Y[:3])
    loader = DataLoader(TensorDataset(X, Y), 3, num_workers=1, multiprocessing_context=start)

    found = [float(step(x, y).loss) for x, y in loader]

    assert found == [float(twin(x, y).loss) for x, y in zip(X.split(3), Y.split(3), strict=True)]
    assert not torch.equal(mine.model[0].weight, Trained().model[0].weight)


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.deepcopy])
def test_what_is_captured_cannot_be_sent_or_copied(duplicate: Any) -> None:
    mine = Trained()
    step = mine.step()
    step(X, Y)
    square = Chain([Piece(torch.square)]).capture(X.clone().requires_grad_())

    for thing in (step, capture(mine.model, X), square):
        with pytest.raises(GraphError, match="cannot be copied or pickled"):
            duplicate(thing)

    assert float(step(X, Y).loss) < 10  # and is none the worse for the attempt


def test_a_model_can_be_pickled_whole_after_close_and_by_its_state_at_any_time() -> None:
    mine = Trained()
    step = mine.step()
    step(X, Y)
    pickle.dumps(mine.model.state_dict())
    step.close()

    loaded = pickle.loads(pickle.dumps(mine.model))

    assert torch.equal(loaded(X), mine.model(X))


def test_another_thread_may_go_on_with_a_step() -> None:
    step, twin = Trained().step(), Trained().step()
    results: list[StepResult] = [step(X, Y)]
    thread = threading.Thread(target=lambda: results.append(step(X, Y)))
    thread.start()
    thread.join()
    results.append(step(X, Y))

    assert [float(r.loss) for r in results] == [float(twin(X, Y).loss) for _ in range(3)]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_ctrl_c_during_the_first_batch_leaves_everything_as_it_was(call: int) -> None:
    """Whether it hits the dry run, the warm-up or what comes after: the next call captures anew."""
    mine, twin = Trained(), Trained().step()
    calls = 0

    def interrupted(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            signal.raise_signal(signal.SIGINT)
        return mine.loss(x, y)

    step = mine.step(loss=interrupted)
    before = {n: t.clone() for n, t in mine.model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        step(X, Y)

    assert all(torch.equal(before[n], t) for n, t in mine.model.state_dict().items())
    assert step.stats().graphs == 0
    assert all(p.grad is None for p in mine.model.parameters())
    assert [float(step(X, Y).loss) for _ in range(3)] == [float(twin(X, Y).loss) for _ in range(3)]
