"""Model, optimizer and generator state go by name and come back bit for bit."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_states import assert_same, bits
from torch import nn

import lf_ckpt


class Tied(nn.Module):
    """Embedding and head share a weight; a persistent buffer; two parameters of equal shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.b(torch.relu(self.a(self.embed(ids))))))


Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "fused adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
    "sgd momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "groups": lambda m: torch.optim.AdamW(
        [
            {"params": m.a.parameters(), "lr": 0.5},
            {"params": [m.embed.weight, *m.b.parameters()], "betas": (0.5, 0.6)},
        ]
    ),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        ids = torch.randint(0, 11, (8,))
        loss = nn.functional.cross_entropy(model(ids), torch.randint(0, 11, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def make(optimizer: Make) -> tuple[Tied, torch.optim.Optimizer]:
    model = Tied()
    return model, optimizer(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_repeats_the_run_bit_for_bit(tmp_path: Path, name: str) -> None:
    model, optimizer = make(OPTIMIZERS[name])
    train(model, optimizer)
    with lf_ckpt.open(tmp_path) as store:
        collected, generators = lf_ckpt.collect(model, optimizer), lf_ckpt.rng_state()
        store.save(2, {**collected.tensors, **generators.tensors}, {**collected.items, **generators.items})
        train(model, optimizer)

        fresh, new_optimizer = make(OPTIMIZERS[name])
        loaded = store.load()
        report = lf_ckpt.restore(fresh, new_optimizer, loaded)
        lf_ckpt.set_rng_state(loaded)
        train(fresh, new_optimizer)

    assert report == lf_ckpt.RestoreReport()
    assert_same(fresh.state_dict(), model.state_dict())
    assert_same(lf_ckpt.collect(fresh, new_optimizer).tensors, lf_ckpt.collect(model, optimizer).tensors)
    assert fresh.head.weight is fresh.embed.weight


def test_restoring_into_a_used_optimizer_leaves_nothing_of_the_old_run() -> None:
    model, optimizer = make(OPTIMIZERS["adamw"])
    fresh_state = lf_ckpt.collect(model, optimizer)
    saved = lf_ckpt.Collected({n: t.clone() for n, t in fresh_state.tensors.items()}, fresh_state.items)
    train(model, optimizer)

    lf_ckpt.restore(model, optimizer, saved)

    assert not optimizer.state
    assert_same(model.state_dict(), {n[6:]: t for n, t in saved.tensors.items()})


def test_moments_follow_names_when_parameters_change_groups() -> None:  # case A7
    model, _ = make(OPTIMIZERS["adamw"])
    one = torch.optim.AdamW(
        [{"params": [model.a.weight], "lr": 0.1}, {"params": [model.b.weight], "lr": 0.2}]
    )
    train(model, one)
    collected = lf_ckpt.collect(model, one)
    moments = {
        name: one.state[p]["exp_avg"].clone() for name, p in (("a", model.a.weight), ("b", model.b.weight))
    }

    swapped = torch.optim.AdamW(
        [{"params": [model.b.weight], "lr": 0.2}, {"params": [model.a.weight], "lr": 0.1}]
    )
    lf_ckpt.restore(model, swapped, collected)
    assert bits(swapped.state[model.a.weight]["exp_avg"]) == bits(moments["a"])
    assert bits(swapped.state[model.b.weight]["exp_avg"]) == bits(moments["b"])
    assert [group["lr"] for group in swapped.param_groups] == [0.2, 0.1]

    joined = torch.optim.AdamW([model.b.weight, model.a.weight], lr=0.7)
    report = lf_ckpt.restore(model, joined, collected)
    assert bits(joined.state[model.a.weight]["exp_avg"]) == bits(moments["a"])
    assert report.groups_kept == (0,)
    assert joined.param_groups[0]["lr"] == 0.7


class Scaled(nn.Module):
    """Extra state that is made when it is asked for, as that of modules in fp8."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear, self.value = nn.Linear(2, 2), value

    def get_extra_state(self) -> Any:
        return self.value.clone() if isinstance(self.value, torch.Tensor) else self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize("value", [torch.arange(5.0), {"scale": [1.5]}], ids=["tensor", "data"])
def test_extra_state_reaches_its_module(tmp_path: Path, value: Any) -> None:
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, *lf_ckpt.collect(nn.Sequential(Scaled(value)))).wait()
        model = nn.Sequential(Scaled(torch.zeros(0)))
        lf_ckpt.restore(model, None, store.load())
    found = model[0].value
    assert bits(found) == bits(value) if isinstance(value, torch.Tensor) else found == value


@pytest.mark.parametrize("value", [torch.ones(3), {"scale": 2}], ids=["tensor", "data"])
def test_extra_state_without_its_other_half_is_a_mismatch_before_anything_changes(value: Any) -> None:
    with_extra, without = nn.ModuleDict({"a": Scaled(value)}), nn.ModuleDict({"a": nn.Module()})
    without["a"].linear = nn.Linear(2, 2)
    for source, target, word in ((with_extra, without, "unexpected"), (without, with_extra, "missing")):
        saved, before = lf_ckpt.collect(source), bits(target["a"].linear.weight)
        with pytest.raises(lf_ckpt.MismatchError, match=f"{word}: model.a._extra_state"):
            lf_ckpt.restore(target, None, saved)
        assert bits(target["a"].linear.weight) == before
        report = lf_ckpt.restore(target, None, saved, strict=False)
        assert getattr(report, word) == ("model.a._extra_state",)
        assert bits(target["a"].linear.weight) == bits(source["a"].linear.weight)
        nn.init.zeros_(target["a"].linear.weight)


def test_moments_keep_their_own_dtype() -> None:
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.randn(parameter.shape)}
    saved = lf_ckpt.collect(model, optimizer)
    fresh = torch.optim.AdamW(model.parameters())

    lf_ckpt.restore(model, fresh, saved)

    assert fresh.state[model.weight]["exp_avg"].dtype == torch.float32
    assert fresh.state[model.weight]["exp_avg"] is not optimizer.state[model.weight]["exp_avg"]


def test_tied_parameters_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    model, optimizer = make(OPTIMIZERS["adamw"])
    train(model, optimizer)
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, *lf_ckpt.collect(model, optimizer)).wait()
        tensors = store.load().tensors

    assert tensors["model.head.weight"] is tensors["model.embed.weight"]
    assert (
        sum(name.startswith(("optim.head", "optim.embed")) and name.endswith("exp_avg") for name in tensors)
        == 1
    )


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_wrappers_do_not_show_in_names(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, optimizer = make(OPTIMIZERS["adamw"])

    assert (
        lf_ckpt.collect(wrap(model), optimizer).tensors.keys()
        == lf_ckpt.collect(model, optimizer).tensors.keys()
    )


def test_a_model_that_does_not_fit_is_refused_whole() -> None:
    model, optimizer = make(OPTIMIZERS["adamw"])
    train(model, optimizer)
    saved = lf_ckpt.collect(model, optimizer)
    other = nn.Sequential(nn.Linear(4, 4))
    other_optimizer = torch.optim.AdamW(other.parameters())
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(lf_ckpt.MismatchError) as caught:
        lf_ckpt.restore(other, other_optimizer, saved)

    assert "model.0.weight" in caught.value.missing
    assert "model.a.weight" in caught.value.unexpected
    assert "optim.a.weight.exp_avg" in caught.value.unexpected
    assert_same(other.state_dict(), before)

    wider = Tied()
    wider.a = nn.Linear(4, 5)
    with pytest.raises(lf_ckpt.MismatchError, match=r"a.weight: float32\[4, 4\] -> float32\[5, 4\]"):
        lf_ckpt.restore(wider, None, saved)
    assert lf_ckpt.restore(wider, None, saved, strict=False).mismatched
    assert torch.equal(wider.b.weight, model.b.weight)


def test_optimizer_parameters_outside_the_model_are_an_error() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7))], lr=0.1)

    with pytest.raises(lf_ckpt.UnsupportedError, match=r"group 0.*\[7\]"):
        lf_ckpt.collect(model, optimizer)


def test_extra_state_of_modules_is_kept(tmp_path: Path) -> None:
    class Counter(nn.Module):
        count = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    model = nn.Sequential(Counter(), nn.Linear(2, 2))
    model[0].count = 7
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, *lf_ckpt.collect(model)).wait()
        fresh = nn.Sequential(Counter(), nn.Linear(2, 2))
        lf_ckpt.restore(fresh, None, store.load())

    assert fresh[0].count == 7


def draws() -> list[float]:
    return [
        torch.rand(()).item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    ]


def test_generators_continue_where_they_were(tmp_path: Path) -> None:
    draws()
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, *lf_ckpt.rng_state()).wait()
        wanted = draws()
        draws()
        lf_ckpt.set_rng_state(store.load())

    assert draws() == wanted
    with pytest.raises(lf_ckpt.CkptError, match="no generator state"):
        lf_ckpt.set_rng_state(lf_ckpt.Collected({}, {}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optim.groups", [1]),
        ("optim.groups", {"params": []}),
        ("optim.groups", [{"params": [3]}]),
        ("optim.scalars", [1]),
        ("optim.scalars", {"weight": 3}),
        ("model.extra", [1]),
        ("rng.python", 3),
        ("rng.python", {"version": 3}),
        ("rng.numpy", {"kind": "other", "position": 0, "has_gauss": 0, "cached": 0.0}),
    ],
)
def test_items_that_nothing_has_collected_are_named_before_anything_changes(name: str, value: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    tensors, items = lf_ckpt.collect(nn.Linear(3, 2), None, rng=True)
    before = {n: v.clone() for n, v in model.state_dict().items()}

    with pytest.raises(lf_ckpt.CkptError, match=r"item|generator states"):
        lf_ckpt.restore(model, optimizer, lf_ckpt.Collected(tensors, {**items, name: value}), rng=True)

    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_what_has_no_shape_or_a_mask_is_refused_by_name() -> None:
    with pytest.raises(lf_ckpt.UnsupportedError, match=r"model\.weight has no shape"):
        lf_ckpt.collect(nn.LazyLinear(3))
    with pytest.raises(lf_ckpt.UnsupportedError, match="MaskedArray"):
        lf_ckpt.pack(np.ma.array([1, 2], mask=[0, 1]), "x")


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (lf_ckpt.import_torch, lf_ckpt.import_any):
        with pytest.raises(lf_ckpt.CkptError, match="not a regular file"):
            read(tmp_path / "pipe")
