"""What someone meets who uses lf-ckpt for the first time: each mistake says what to do, none passes in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lf_ckpt
from lf_ckpt import cli


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with lf_ckpt.open(tmp_path / "run") as store:
        store.save(1, *lf_ckpt.collect(*model_and_optimizer(), rng=True)).wait()
    return tmp_path / "run"


Act = Callable[[lf_ckpt.Store, nn.Module, torch.optim.Optimizer], object]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda s, m, o: s.save(2, m), r"Sequential is no mapping .* lf_ckpt.collect\(model, optimizer\)"),
        (lambda s, m, o: s.save(2, {"model": m.state_dict()}), r"model: OrderedDict, but names are flat; lf_ckpt"),
        (lambda s, m, o: s.save(2, {}, {"x": torch.ones(1)}), r"item x: Tensor .* `tensors`"),
        (lambda s, m, o: s.load("1"), r"step '1': a whole number, or \"latest\""),
        (lambda s, m, o: s.load(9), r"no step 9; committed steps: \[1\]"),
        (lambda s, m, o: s.load(into=m), "into: Sequential is no mapping; lf_ckpt.restore"),
        (lambda s, m, o: s.load(into=m.state_dict()), r"the saved names begin with 'model\.'"),
        (lambda s, m, o: s.load(into={f"module.{n}": t for n, t in s.load().tensors.items()}),
         r"these names begin with 'module\.'"),
        (lambda s, m, o: s.load(into={"model.0.bias": 3.0}), "model.0.bias: float is not a tensor"),
        (lambda s, m, o: lf_ckpt.collect(o, m), "model: AdamW is no torch.nn.Module"),
        (lambda s, m, o: lf_ckpt.restore(s.load(), m, o), "model: Loaded is no torch.nn.Module"),
        (lambda s, m, o: lf_ckpt.load_file(Path(s.path) / "steps/1/rank-0.lfckpt"), "is read through its store"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_way_out(path: Path, act: Act, words: str) -> None:
    with lf_ckpt.open(path) as store:
        with pytest.raises((lf_ckpt.CkptError, ValueError), match=words):
            act(store, *model_and_optimizer())
        assert store.steps() == (1,)


@pytest.mark.parametrize("keep", ["last:3", [3], [lf_ckpt.Last]])
def test_what_is_no_rule_is_refused_before_a_step_could_be_lost_or_kept(tmp_path: Path, keep: object) -> None:
    """It came to light in the background, step by step, as "old steps not removed"."""
    with pytest.raises(ValueError, match=r"is no rule; give a list, as \[lf_ckpt.Last\(3\)\]"):
        lf_ckpt.open(tmp_path, keep=keep)  # type: ignore[arg-type]


def test_a_rule_alone_is_a_list_of_one(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, keep=lf_ckpt.Last(1), full_every=0) as store:
        for step in (1, 2):
            store.save(step, {"x": torch.ones(2)}).wait()
        assert store.steps() == (2,)


@pytest.mark.parametrize("inside", ["steps", "steps/1", "steps/2"])
def test_a_folder_of_a_store_is_no_store_and_becomes_none(path: Path, inside: str) -> None:
    """A store made in a step's folder by a wrong path kept that step from ever being retired."""
    for read_only in (True, False):
        with pytest.raises(lf_ckpt.CkptError, match=f"a folder of the store {path}; open that"):
            lf_ckpt.open(path / inside, read_only=read_only)
    assert sorted(p.name for p in (path / "steps/1").iterdir()) == ["MANIFEST", "rank-0.lfckpt"]
    assert [p.name for p in (path / "steps").iterdir()] == ["1"]
    assert cli.main(["ls", str(path / inside)]) == 2


def test_a_store_may_be_named_as_a_folder_of_one_is(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "steps/1") as store:
        store.save(1, {"x": torch.ones(2)}).wait()
    with lf_ckpt.open(tmp_path / "steps/1", read_only=True) as store:
        assert store.steps() == (1,)


def test_a_resume_says_what_it_leaves(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = model_and_optimizer()
    with lf_ckpt.open(path) as store, caplog.at_level(logging.WARNING, "lf_ckpt"):
        assert lf_ckpt.resume(store, model, optimizer, rng=True) == 1
        assert not caplog.records
        assert lf_ckpt.resume(store, model) == 1
    assert "step 1 holds the state of optimizer, rng, which was not asked for" in caplog.text


@pytest.mark.parametrize("scheduled", [False, True])
def test_moments_of_another_kind_of_optimizer_are_no_silent_loss(
    path: Path, caplog: pytest.LogCaptureFixture, scheduled: bool
) -> None:
    model, optimizer = model_and_optimizer()
    if scheduled:
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)  # settings of its own in the groups
    with lf_ckpt.open(path) as store, caplog.at_level(logging.WARNING, "lf_ckpt"):
        lf_ckpt.resume(store, model, optimizer, rng=True)
        store.save(2, *lf_ckpt.collect(model, optimizer, rng=True)).wait()
        lf_ckpt.resume(store, *model_and_optimizer(), rng=True)
        assert not caplog.records
        lf_ckpt.resume(store, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rng=True)
    assert "group 0 was saved by another kind of optimizer, with" in caplog.text
    assert "betas, " in caplog.text
    assert "SGD has dampening, momentum" in caplog.text


def test_bench_in_a_directory_that_is_not_there_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", str(tmp_path / "none"), "--gib", "0.001"]) == 2
    assert "none: no such directory" in capsys.readouterr().err


def test_the_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"lf-ckpt {lf_ckpt.__version__}\n"
