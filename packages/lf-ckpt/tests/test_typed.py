"""Schedulers, scalers, loaders and any state made of data are kept with their types and without pickle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_states import assert_same, bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as lrs

import lf_ckpt
from lf_ckpt.jsonio import canonical, decode_item, encode_item, parse_canonical

keys = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.tuples(st.integers())
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("$ab.", max_size=3), inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.sets(st.integers() | st.text(max_size=2), max_size=3)
        | st.dictionaries(st.integers(), st.integers(), max_size=2).map(Counter)
    ),
    max_leaves=8,
)


def through_json(value: Any) -> Any:
    """As a manifest does."""
    return decode_item(parse_canonical(canonical(encode_item(value, "x"))))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plain)
def test_plain_data_comes_back_with_its_types(value: Any) -> None:
    packed, tensors = lf_ckpt.pack(value, "x")

    found = lf_ckpt.unpack(through_json(packed), tensors)

    assert repr(found) == repr(value) or found == value
    assert type(found) is type(value)
    assert not tensors


@pytest.mark.parametrize(
    "value",
    [
        {frozenset({1, 2}), frozenset()},
        {(frozenset({"a"}), 1): "key"},
        {(1, (frozenset({frozenset({2})}),))},
        Counter({(frozenset({1}), 2): 3}),
    ],
    ids=["in a set", "in a key", "deep", "counted"],
)
def test_a_frozen_set_that_was_hashed_comes_back_frozen(value: Any) -> None:
    """As a member or in a key it can be nothing else; elsewhere it comes back as a set."""
    packed, tensors = lf_ckpt.pack(value, "x")

    found = lf_ckpt.unpack(through_json(packed), tensors)

    assert found == value
    assert type(found) is type(value)


def test_tensors_and_arrays_inside_are_stored_as_tensors(tmp_path: Path) -> None:
    value = {
        "a": [torch.arange(3), {"b": torch.tensor(2.5, dtype=torch.bfloat16)}],
        "a.0": torch.zeros(2),  # reads like the first element of "a"
        "array": np.arange(6, dtype=np.uint64).reshape(2, 3),
        "scalar": np.int64(7),
        3: (np.zeros((0, 4)), None),
    }
    packed, tensors = lf_ckpt.pack(value, "loader")
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, tensors, {"loader": packed}).wait()
        loaded = store.load()

    found = lf_ckpt.unpack(loaded.items["loader"], loaded.tensors)

    assert bits(found["a"][0]) == bits(value["a"][0])
    assert bits(found["a"][1]["b"]) == bits(value["a"][1]["b"])
    assert bits(found["a.0"]) == bits(value["a.0"])
    assert found["array"].dtype == np.uint64
    np.testing.assert_array_equal(found["array"], value["array"])
    assert type(found["scalar"]) is np.int64
    assert found["scalar"] == 7
    assert found[3][0].shape == (0, 4)
    assert found["a"][0].data_ptr() != loaded.tensors["loader.a.0"].data_ptr()


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [object()]}, "x.a.0: object"),
        ({"a": {(1, 2): {3: lambda: 0}}}, r"x\.a\.\(1, 2\)\.3: function"),
        ({"a": torch.device("cpu")}, "x.a: device"),
        ({frozenset(): 1}, "x: key frozenset"),
        ({"names": np.array(["a"])}, "x.names: a numpy array of <U1"),
        ({"big end": np.zeros(2, ">i4")}, "x.big end: a numpy array of >i4"),
    ],
)
def test_other_objects_are_refused_by_place(value: Any, place: str) -> None:
    with pytest.raises(lf_ckpt.UnsupportedError, match=place):
        lf_ckpt.pack(value, "x")


def test_state_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(lf_ckpt.UnsupportedError, match="contains itself"):
        lf_ckpt.pack(value, "x")


@pytest.mark.parametrize(
    "item",
    [
        {"$call": "os.system"},
        {"$tuple": [], "more": 1},
        {"$tensor": "gone"},
        {"$tensor": ["t"]},
        {"$map": [[1]]},
        {"$map": 3},
        {"$set": [[1]]},
        {"$counter": [[[], 1]]},
        {"$tuple": 1},
    ],
)
def test_forged_items_are_one_typed_error(item: Any) -> None:
    with pytest.raises(lf_ckpt.CkptError):
        lf_ckpt.unpack(item, {"t": torch.ones(1)})


def run(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


SCHEDULERS = {
    "step": lambda o: lrs.StepLR(o, 2),
    "multi step": lambda o: lrs.MultiStepLR(o, [2, 2, 3], 0.5),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=20),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.1, 0.5, 3),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)], [2]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning", "ignore:.*epoch parameter.*")
def test_schedulers_continue(tmp_path: Path, name: str) -> None:
    model, optimizer = run()
    scheduler = SCHEDULERS[name](optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    with lf_ckpt.open(tmp_path) as store:
        store.save(3, *lf_ckpt.collect(model, optimizer, scheduler=scheduler)).wait()
        fresh, new_optimizer = run(1)
        new_scheduler = SCHEDULERS[name](new_optimizer)
        report = lf_ckpt.restore(fresh, new_optimizer, store.load(), scheduler=new_scheduler)

    assert report == lf_ckpt.RestoreReport()
    for _ in range(4):
        assert new_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        optimizer.step(), new_optimizer.step()
        scheduler.step(), new_scheduler.step()
    assert type(new_scheduler.state_dict().get("milestones")) is type(
        scheduler.state_dict().get("milestones")
    )


def test_a_plateau_that_has_seen_nothing_keeps_its_infinity(tmp_path: Path) -> None:
    model, optimizer = run()
    scheduler = lrs.ReduceLROnPlateau(optimizer)
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, *lf_ckpt.collect(model, optimizer, scheduler=scheduler)).wait()
        scheduler.step(3.0)
        lf_ckpt.restore(model, optimizer, store.load(), scheduler=scheduler)

    assert scheduler.best == float("inf")


class Loader:
    """A loader whose position is what loaders hold: numbers by worker, bytes, a generator state."""

    def __init__(self) -> None:
        self.position: dict[Any, Any] = {}

    def state_dict(self) -> dict[Any, Any]:
        return self.position

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.position = state


def test_a_whole_run_resumes_in_three_lines(tmp_path: Path) -> None:
    def parts(seed: int) -> tuple[Any, ...]:
        model, optimizer = run(seed)
        return (
            model,
            optimizer,
            lrs.StepLR(optimizer, 2),
            torch.amp.GradScaler("cpu", init_scale=64.0),
            Loader(),
        )

    def train(parts: tuple[Any, ...], first: int, last: int) -> list[float]:
        model, optimizer, scheduler, scaler, loader = parts
        more = {"scheduler": scheduler, "scaler": scaler, "loader": loader, "rng": True}
        losses = []
        with lf_ckpt.open(tmp_path, keep=[lf_ckpt.Last(2)]) as store:
            start = lf_ckpt.resume(store, model, optimizer, **more)
            assert start == first
            for step in range(start + 1, last + 1):
                loss = model(torch.randn(4, 3)).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
                loader.position = {0: step, "worker": (step, b"\0"), "order": np.arange(step)}
                losses.append(loss.item())
                store.save(step, *lf_ckpt.collect(model, optimizer, **more))
        return losses

    one, other = parts(0), parts(5)
    train(one, 0, 3)
    torch.manual_seed(99)
    resumed = train(other, 3, 6)
    torch.manual_seed(98)
    again = parts(7)
    with lf_ckpt.open(tmp_path / "straight") as straight, lf_ckpt.open(tmp_path, read_only=True) as store:
        assert lf_ckpt.resume(straight, *again[:2]) == 0
        assert (
            lf_ckpt.resume(store, *again[:2], scheduler=again[2], scaler=again[3], loader=again[4], rng=True)
            == 6
        )

    assert len(resumed) == 3
    assert_same(again[0].state_dict(), other[0].state_dict())
    assert again[2].state_dict() == other[2].state_dict()
    assert again[3].state_dict() == other[3].state_dict()
    assert again[4].position[0] == 6
    assert again[4].position["worker"] == (6, b"\0")
    np.testing.assert_array_equal(again[4].position["order"], np.arange(6))


def test_a_store_with_only_damaged_steps_is_no_fresh_start(tmp_path: Path) -> None:
    model, optimizer = run()
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, *lf_ckpt.collect(model, optimizer)).wait()
    (tmp_path / "steps/1/MANIFEST").write_bytes(b"{}")
    with lf_ckpt.open(tmp_path, read_only=True) as store, pytest.raises(lf_ckpt.NoCheckpointError):
        lf_ckpt.resume(store, model, optimizer)


def test_what_is_asked_for_and_not_there_is_missing_before_anything_changes() -> None:
    model, optimizer = run()
    saved = lf_ckpt.collect(run(1)[0])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    with pytest.raises(lf_ckpt.MismatchError) as caught:
        lf_ckpt.restore(model, None, saved, scheduler=lrs.StepLR(optimizer, 2), rng=True)

    assert caught.value.missing == ("scheduler", "rng")
    assert_same(model.state_dict(), before)
    assert lf_ckpt.restore(model, None, saved, False, loader=Loader(), rng=True).missing == ("loader", "rng")


def test_saved_state_that_nobody_asked_for_is_reported() -> None:
    model, optimizer = run()
    saved = lf_ckpt.collect(model, optimizer, scheduler=lrs.StepLR(optimizer, 2), loader=Loader())

    assert lf_ckpt.restore(model, optimizer, saved).unused == ("scheduler", "loader")


def test_a_scaler_that_refuses_its_state_is_named() -> None:
    model, _ = run()
    saved = lf_ckpt.collect(model, scaler=torch.amp.GradScaler("cpu", enabled=False))

    with pytest.raises(lf_ckpt.CkptError, match=r"scaler: GradScaler.load_state_dict failed: .*empty"):
        lf_ckpt.restore(model, None, saved, scaler=torch.amp.GradScaler("cpu"))


def test_a_stateful_that_cannot_be_stored_is_named() -> None:
    loader = Loader()
    loader.position = {"iterator": {"file": open}}
    with pytest.raises(lf_ckpt.UnsupportedError, match=r"loader.iterator.file: builtin_function_or_method"):
        lf_ckpt.collect(run()[0], loader=loader)


def test_lists_of_tensors_in_optimizer_state_are_kept(tmp_path: Path) -> None:
    def lbfgs(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = run(seed)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = lbfgs(0)
    train(model, optimizer)
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, *lf_ckpt.collect(model, optimizer)).wait()
        fresh, new_optimizer = lbfgs(1)
        lf_ckpt.restore(fresh, new_optimizer, store.load())
    train(model, optimizer)
    train(fresh, new_optimizer)

    assert_same(fresh.state_dict(), model.state_dict())
