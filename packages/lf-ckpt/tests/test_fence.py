"""Saves behind the next forward and backward take the values of the save, whatever the loop changes when it may."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ckpt_states import assert_same, copy_of
from torch import nn

import lf_ckpt
import lf_ckpt.fence
from lf_ckpt import staging
from lf_ckpt.fence import Gate, in_order_of_change
from lf_ckpt.plan import make_plan
from lf_ckpt.progress import Progress
from lf_ckpt.slab import Slab, StagingAbortedError

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.1),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), 0.1, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), 0.1, fused=True),
    "sgd momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), torch.tensor(0.1)),
}


class Slow:
    """Copies wait at a gate until `let` is called; `seen` names what has been copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.waited = threading.Event()
        real = staging._copy_in

        def slow(stream: object, *rest: object) -> object:
            if threading.current_thread() is not threading.main_thread() and self.holds(stream):
                self.waited.set()
                assert self.open.wait(30)
            return real(stream, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(staging, "_copy_in", slow)
        self.holds: Callable[[object], bool] = lambda _: True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))


def forward_backward(model: nn.Module) -> None:
    model(torch.randn(8, 64)).square().mean().backward()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_loop_that_only_fences_saves_the_values_of_the_save(tmp_path: Path, kind: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[kind](model)
    saved = {}
    with lf_ckpt.open(tmp_path) as store:
        for step in range(4):
            forward_backward(model)
            optimizer.step()
            optimizer.zero_grad()
            saved[step] = copy_of(lf_ckpt.collect(model, optimizer).tensors)
            store.save(step, *lf_ckpt.collect(model, optimizer), overlap=True, fence=optimizer)
        store.wait()
        for step, wanted in saved.items():
            assert_same(store.load(step).tensors, wanted)


def test_step_waits_for_its_parameters_and_forward_does_not(tmp_path: Path, slow: Slow) -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model)
    forward_backward(model)
    optimizer.step()
    state = lf_ckpt.collect(model, optimizer)
    wanted = copy_of(state.tensors)
    slow.holds = lambda stream: "running" not in stream.name and "batches" not in stream.name  # type: ignore[attr-defined]
    with lf_ckpt.open(tmp_path) as store, ThreadPoolExecutor(1) as pool:
        handle = store.save(1, *state, overlap=True, fence=optimizer)
        assert slow.waited.wait(30)
        forward_backward(model)  # moves the running statistics, which are in the slab already
        stepped = pool.submit(optimizer.step)
        assert not handle.staged
        assert not stepped.done()
        slow.open.set()
        stepped.result(30)
        handle.wait()

        assert_same(store.load().tensors, wanted)
    assert not torch.equal(wanted["model.0.weight"], model[0].weight)  # type: ignore[arg-type,index]


def test_each_optimizer_waits_only_for_what_changes_before_its_own_tensors(
    tmp_path: Path, slow: Slow
) -> None:
    models = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    first, second = (torch.optim.SGD(part.parameters(), 0.1) for part in models)
    wanted = copy_of(lf_ckpt.collect(models).tensors)
    slow.holds = lambda stream: stream.name.startswith("model.0")  # type: ignore[attr-defined]
    for p in models.parameters():
        p.grad = torch.ones_like(p)
    with lf_ckpt.open(tmp_path) as store, ThreadPoolExecutor(1) as pool:
        store.save(1, *lf_ckpt.collect(models), overlap=True, fence=(second, first))
        second.step()  # would hang if it waited for the tensors of `first`
        stepped = pool.submit(first.step)
        assert slow.waited.wait(30)
        slow.open.set()
        stepped.result(30)
        store.wait()

        assert_same(store.load().tensors, wanted)


def test_what_no_optimizer_owns_comes_first_then_the_optimizers_in_order() -> None:
    model = network()
    model.register_buffer("average", torch.zeros(3))
    head, body = torch.optim.AdamW(model[2].parameters()), torch.optim.SGD(model[0].parameters(), 0.1)  # type: ignore[index]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    head.step()
    tensors = {**lf_ckpt.collect(model).tensors, **lf_ckpt.rng_state().tensors}
    moments = {f"m{i}": v for i, s in enumerate(head.state.values()) for v in s.values()}

    plan, ends = in_order_of_change(make_plan({**moments, **tensors}, {"blob": b"x"}), [body, head])

    names = [stream.name for stream in plan.streams]
    assert set(names[ends[0] : ends[1]]) == {"model.0.weight", "model.0.bias"}
    assert set(names[ends[1] : ends[2]]) == {"model.2.weight", "model.2.bias", *moments}
    assert {"model.1.weight", "model.1.running_mean", "model.average"} < set(names[: ends[0]])
    assert names[ends[2] :] == ["blob"]


def test_a_parameter_of_two_optimizers_is_fenced_before_the_first() -> None:
    layer = nn.Linear(2, 2)
    both = [torch.optim.SGD(layer.parameters(), 0.1) for _ in range(2)]

    _, ends = in_order_of_change(make_plan({"w": layer.weight}, {}), both)

    assert ends == [0, 1, 1]


def test_a_hook_is_registered_once_and_goes_with_its_optimizer(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with lf_ckpt.open(tmp_path) as store:
        for step in range(5):
            store.save(step, {"w": layer.weight}, overlap=True, fence=optimizer)
        store.wait()
    assert len(optimizer._optimizer_step_pre_hooks) == 1

    before = len(lf_ckpt.fence._gates)
    del optimizer
    gc.collect()
    assert len(lf_ckpt.fence._gates) == before - 1


def test_a_failed_save_lets_the_optimizer_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with lf_ckpt.open(tmp_path) as store:
        monkeypatch.setattr(staging, "_copy_in", broken)
        handle = store.save(1, {"w": layer.weight}, overlap=True, fence=optimizer)
        optimizer.step()
        handle.fence()
        with pytest.raises(OSError, match="Input/output"):
            handle.wait()
        monkeypatch.undo()
        store.save(2, {"w": layer.weight}, overlap=True, fence=optimizer)
        optimizer.step()
        store.wait()
        assert store.steps() == (2,)


def test_handle_fence_serves_steps_without_hooks(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(100_000)}
    with lf_ckpt.open(tmp_path) as store:
        handle = store.save(1, tensors, overlap=True)
        handle.fence()
        tensors["w"].fill_(1)
        handle.wait()
        assert not store.load().tensors["w"].any()


def test_a_fence_without_overlap_or_without_hooks_is_refused(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    with lf_ckpt.open(tmp_path) as store:
        with pytest.raises(ValueError, match="overlap"):
            store.save(1, {"w": layer.weight}, fence=torch.optim.SGD(layer.parameters(), 0.1))
        with pytest.raises(lf_ckpt.CkptError, match=r"handle\.fence"):
            store.save(1, {"w": layer.weight}, overlap=True, fence=(object(),))  # type: ignore[arg-type]
        store.save(1, {"w": layer.weight}).wait()


def test_a_fence_that_was_interrupted_holds_the_next_step_too() -> None:
    class Interrupted(Progress):
        calls = 0

        def fence(self, streams: int | None = None) -> None:
            self.calls += 1
            if self.calls == 1:
                raise KeyboardInterrupt

    gate, progress = Gate(), Interrupted()
    gate.arm(progress, 1)
    with pytest.raises(KeyboardInterrupt):
        gate()
    gate()
    gate()
    assert progress.calls == 2


def test_an_optimizer_that_does_not_step_collects_nothing(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lf_ckpt.open(tmp_path, keep=[lf_ckpt.Last(1)]) as store:
        for step in range(5):
            store.save(step, dict(model.state_dict()), overlap=True, fence=optimizer).wait()
    assert len(lf_ckpt.fence.gate_of(optimizer)._pending) == 1


class Event:
    """Stands for a device event of a copy that takes its time."""

    def __init__(self) -> None:
        self.arrived = False

    def synchronize(self) -> None:
        self.arrived = True


def test_copies_that_are_queued_when_staging_fails_have_arrived_before_the_slab_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Event] = []

    def queue(*_: object) -> Event:
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(staging, "_copy_in", queue)
    slab = Slab(4 << 20, False)
    plan = make_plan({"a": torch.zeros(1 << 18), "b": torch.zeros(1 << 18)}, {})

    def deliver(staged: staging.Staged) -> None:
        if staged.chunk.stream == 1:
            slab.abort()
            slab.take(1)

    with pytest.raises(StagingAbortedError):
        staging.Staging(plan, slab, 1 << 20, deliver, Progress()).finish()
    assert len(events) == 2
    assert events[-1].arrived  # the last one of a device is behind the others
    slab.close()


def queued_copies(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> tuple[list[Event], list[staging.Staged], staging.Staging]:
    """A device state of `count` chunks: its events, what the writer was given, and its staging."""
    events: list[Event] = []

    def queue(*_: object) -> Event:
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(staging, "_copy_in", queue)
    plan = make_plan({str(n): torch.zeros(1 << 18) for n in range(count)}, {})
    given: list[staging.Staged] = []
    return events, given, staging.Staging(plan, Slab(32 << 20, False), 1 << 20, given.append, Progress())


def test_a_caller_queues_no_more_than_the_first_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "QUEUED_COPIES", 8)
    events, given, copies = queued_copies(monkeypatch, 20)

    copies.begin()
    assert len(events) == len(given) == 8
    assert not any(event.arrived for event in events)

    assert copies.finish() == [events[-1]]
    assert [staged.chunk.stream for staged in given] == list(range(20))
    assert [event.arrived for event in events] == [True] * 12 + [False] * 8


def test_what_fails_in_the_callers_copies_is_raised_where_the_rest_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, _, copies = queued_copies(monkeypatch, 4)
    monkeypatch.setattr(staging, "_copy_in", lambda *_: 1 / 0)

    copies.begin()
    with pytest.raises(ZeroDivisionError):
        copies.finish()
