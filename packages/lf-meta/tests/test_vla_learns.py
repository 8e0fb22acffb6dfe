"""tiny learns to act from real files: LeRobot v3 (parquet, mp4) -> lf-format -> LoongDataLoader -> gr00t_n16_vla."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("av")
pytest.importorskip("pyarrow.parquet")
sys.path.insert(0, str(Path(__file__).parent))
import robot_sim

import lf_format as lff
from lf_iouring import LoongDataLoader
from lf_meta.models import gr00t_vla
from lf_meta.models.gr00t_vla import GR00TVLA
from lf_meta.models.gr00t_vla_batch import check_batch
from lf_meta.models.gr00t_vla_data import RobotInputs

EPISODES, HELD_OUT, STEPS, ROWS, LATER = 40, range(32, 40), 120, 32, [0, 1, 2, 3]
Batch = dict[str, Tensor]
# 11 s alone on one core, nearly all of it training, once: two processes of xdist must not both do it
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("robot")]


@dataclass
class Trained:
    """A trained tiny model, with the training set and held-out episodes as one batch each."""

    model: GR00TVLA
    train: Batch
    held_out: Batch
    noise: Tensor
    time: Tensor

    def mean(self, part: str, changes: Batch | None = None) -> float:
        """Mean loss of one part on the held-out episodes, some of its inputs exchanged."""
        batch = self.held_out | (changes or {})
        with torch.no_grad():
            context = self.model.encode_tuned(self.model.encode_frozen(batch))
            loss, count = self.model.losses(context, batch, self.noise, self.time)[part]
        return (loss / count).item()


def _whole(report: lff.WriteReport, inputs: RobotInputs) -> Batch:
    options: dict[str, Any] = {"epochs": 1, "shuffle": False, "deltas": {"state": LATER}}
    with (
        lff.open_dataset(report.path) as dataset,
        LoongDataLoader(dataset, global_batch=report.records, **options) as loader,
    ):
        return {k: v.clone() for k, v in inputs(next(iter(loader))).items()}


def _batches(path: str, inputs: RobotInputs) -> Iterator[Batch]:
    with (
        lff.open_dataset(path) as dataset,
        LoongDataLoader(dataset, global_batch=ROWS, seed=0, deltas={"state": LATER}) as loader,
    ):
        for _, samples in zip(range(STEPS), loader, strict=False):
            yield inputs(samples)
            samples.release()


def _fit(model: GR00TVLA, batches: Iterator[Batch]) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step, batch in enumerate(batches):
        loss, count = model(batch)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("robot")
    size = (robot_sim.SIZE, robot_sim.SIZE)
    report = lff.preprocess_robot(
        robot_sim.write(folder / "set", EPISODES),
        folder / "out",
        image_size=size,
        action_horizon=8,
        tokenizer="bytes",
        eval_episodes=HELD_OUT,
    )
    assert report.eval is not None
    torch.manual_seed(0)
    model = gr00t_vla.build("tiny", dropout=0.0, state_loss=1.0, binned_loss=0.05)
    with lff.open_dataset(report.output.path) as dataset:
        inputs = RobotInputs(model.config, dataset.meta, max(map(len, robot_sim.TASKS)))
    held_out = _whole(report.eval, inputs)
    check_batch(model.config, held_out)
    noise = torch.randn_like(held_out["action"])
    time = model.sample_time(len(noise), noise.device)
    _fit(model, _batches(report.output.path, inputs))
    return Trained(model.eval(), _whole(report.output, inputs), held_out, noise, time)


def error_of(velocity: Tensor | float, t: Trained) -> float:
    """Mean squared error of a predicted velocity on the real entries of the held-out actions."""
    error = (velocity - (t.held_out["action"] - t.noise)).square()
    return error[t.held_out["action_mask"]].mean().item()


def best_without_looking(t: Trained) -> float:
    """Loss of the best policy that sees the noisy actions but neither images, text nor state.

    That is the posterior mean over all action sequences of the training set, a softmax over their distances:
    E[a | x] with x = (1 - t) noise + t a, and the velocity (E[a | x] - x) / (1 - t).
    """
    time = t.time.double()[:, None]
    known = t.train["action"].double().flatten(1)
    noisy = ((1 - time[..., None]) * t.noise + time[..., None] * t.held_out["action"]).flatten(1)
    distance = (noisy[:, None] - time[..., None] * known).square().sum(-1)
    mean = torch.softmax(-distance / (2 * (1 - time).square()), dim=-1) @ known
    return error_of(((mean - noisy) / (1 - time)).view_as(t.noise), t)


def test_the_action_loss_is_far_below_what_is_possible_without_looking(trained: Trained) -> None:
    t, actions = trained, trained.held_out["action"]
    constant = error_of(actions[t.held_out["action_mask"]].mean(), t)
    blind = best_without_looking(t)
    assert blind < constant / 2  # denoising alone explains that much, so the constant is the easier bar
    assert t.mean("action") < constant / 5
    assert t.mean("action") < blind / 1.5


def test_what_it_learned_comes_from_images_and_text(trained: Trained) -> None:
    t = trained
    four = (
        4 * robot_sim.LENGTH
    )  # four episodes on the task is the other one, one episode on the lamp is elsewhere
    text = {k: t.held_out[k].roll(four, 0) for k in ("input_ids", "lengths")}
    image = {"pixel_values": t.held_out["pixel_values"].roll(robot_sim.LENGTH, 0)}
    assert t.mean("action", text) > 3 * t.mean("action")
    assert t.mean("action", image) > 3 * t.mean("action")


def test_it_acts_as_the_expert_does(trained: Trained) -> None:
    t, mask = trained, trained.held_out["action_mask"]
    known = t.held_out["action"]
    error = (t.model.act(t.held_out, noise=t.noise) - known)[mask].square().mean()
    binned = (t.model.act_binned(t.held_out) - known)[mask].square().mean()
    variance = known[mask].var()
    assert error < variance / 5
    assert binned < variance / 3


def test_the_optional_heads_learn_too(trained: Trained) -> None:
    t, batch = trained, trained.held_out
    stays = (batch["next_state"] - batch["state"])[batch["next_state_mask"]].square().mean().item()
    assert t.mean("state") < 0.8 * stays
    assert t.model.binned_actions is not None
    bins = t.model.binned_actions.bin_of(batch["action"])[batch["action_mask"]]
    share = bins.bincount() / len(bins)
    entropy = -(share * share.clamp(min=1e-9).log()).sum().item()  # the best that one fixed distribution does
    assert t.mean("binned") < 0.8 * entropy
