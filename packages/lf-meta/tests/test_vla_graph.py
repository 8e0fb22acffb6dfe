"""gr00t_n16_vla inside lf_graph.TrainStep: captured once, replayed, and equal to the eager step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lf_graph import Chain, Piece, TrainStep
from lf_meta.models import gr00t_vla
from lf_meta.models.gr00t_vla import GR00TVLA
from lf_meta.models.gr00t_vla_batch import random_batch

CONFIG = gr00t_vla.config_for("tiny")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def made(device: str) -> tuple[GR00TVLA, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = gr00t_vla.build("tiny", dropout=0.0).to(device)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def batches(device: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Four batches that differ in every value, with noise and time."""
    found = []
    for seed in range(4):
        batch = random_batch(CONFIG, 4, 12, seed=seed, device=device)
        torch.manual_seed(seed)
        given = {"noise": torch.randn(batch["action"].shape).to(device), "time": torch.rand(4).to(device)}
        found.append((batch, given))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_training_step_follows_the_eager_one(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model, optimizer = made(device)
    expected = []
    for batch, given in batches(device):
        loss, count = model(batch, **given)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append((loss / count).item())
    captured, its_optimizer = made(device)
    step = TrainStep(captured, its_optimizer)
    found = [step(batch, **given).loss.item() for batch, given in batches(device)]
    assert step.stats().captures == 1
    # parameters are not compared: a key bias has no gradient but rounding, which Adam makes whole steps of
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(set(found)) == 4


@pytest.mark.parametrize("device", DEVICES)
def test_what_crosses_the_modalities_is_computed_once_and_named(device: str) -> None:
    """Vision, language and two heads as pieces: the context is one edge that both heads read."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = gr00t_vla.build("tiny", dropout=0.0, state_loss=0.1).to(device)
    sample, batch = ({k: v[:1] for k, v in {**b, **given}.items()} for b, given in batches(device)[:2])
    for each in (sample, batch):
        each["next_state"] = each["state"].repeat(1, 2, 1)
        each["next_state_mask"] = torch.ones_like(each["next_state"], dtype=torch.bool)
    keys = tuple(sample)

    def seeing(*tensors: Tensor) -> Tensor:
        return model.encode_frozen(dict(zip(keys, tensors, strict=True)))

    def head(name: str) -> Piece:
        def loss(context: Tensor, *tensors: Tensor) -> Tensor:
            batch = dict(zip(keys, tensors, strict=True))
            return model.losses(context, batch, batch["noise"], batch["time"])[name][0]

        return Piece(loss, ("context", *keys), (f"{name}_loss",), name)

    chain = Chain(
        [
            Piece(seeing, keys, ("hidden",), "vision"),
            Piece(model.encode_tuned, ("hidden",), ("context",), "language"),
            head("action"),
            head("state"),
        ],
        inputs=keys,
        outputs=("action_loss", "state_loss"),
    ).capture(*sample.values())
    action, state = chain(*batch.values())
    (action + model.config.state_loss * state).backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    assert chain.stats().graphs == 4 + 3  # what is frozen has no backward
    chain.close()
    model.zero_grad()
    model(batch, batch["noise"], batch["time"])[0].backward()

    for name, p in model.named_parameters():
        assert (p.grad is None) == (found[name] is None), name
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, rtol=1e-3, atol=1e-4 * p.grad.abs().max().item())
