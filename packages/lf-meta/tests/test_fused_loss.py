"""model.args.fused_loss: the language models' loss without logits is their loss, in every way they are trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lf_graph import TrainStep
from lf_meta.errors import ConfigError
from lf_meta.models import build_model
from lf_meta.models.gr00t_lm import next_token_labels, token_loss

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
SMALL: dict[str, dict[str, Any]] = {
    "gr00t_n16_lm": {"layers": 2, "hidden": 32, "heads": 2, "ffn": 48},
    "gr00t_n16_moe": {"layers": 2, "hidden": 32, "heads": 2, "ffn": 16, "experts": 4},
}
MODELS = pytest.mark.parametrize("name", list(SMALL))


def twins(name: str, **args: Any) -> tuple[Any, Any]:
    """The same weights, without and with fused_loss."""
    torch.manual_seed(0)
    plain = build_model(name, "tiny", 259, {**SMALL[name], **args})
    fused = build_model(name, "tiny", 259, {**SMALL[name], **args, "fused_loss": True})
    fused.load_state_dict(plain.state_dict())
    return plain, fused


def batch(rows: int = 5, length: int = 33, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, lengths (one row is empty) and a loss mask."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 259, (rows, length), generator=generator)
    lengths = torch.randint(2, length + 1, (rows,), generator=generator)
    lengths[1] = 0
    return tokens, lengths, torch.rand(rows, length, generator=generator) < 0.8


def outcome(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss, count and gradients of the mean loss."""
    loss, count = model(*inputs)
    (loss / count.clamp(min=1)).backward()
    return loss.detach(), count, [p.grad for p in model.parameters() if p.grad is not None]


@MODELS
@pytest.mark.parametrize("masked", [False, True])
def test_loss_count_and_gradients_are_the_same(name: str, masked: bool) -> None:
    plain, fused = (m.double() for m in twins(name))
    inputs = batch()[: 3 if masked else 2]
    expected, actual = outcome(plain, *inputs), outcome(fused, *inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert len(actual[2]) == len(list(plain.parameters()))


@MODELS
def test_a_batch_without_a_target_has_no_loss(name: str) -> None:
    _, fused = twins(name)
    tokens, lengths, _ = batch()
    loss, count, gradients = outcome(fused, tokens, torch.zeros_like(lengths))
    assert (float(loss), int(count)) == (0.0, 0)
    assert not any(g.any() for g in gradients)


@MODELS
def test_evaluation_reports_the_same_loss(name: str) -> None:
    plain, fused = (m.eval() for m in twins(name))
    with torch.no_grad():
        expected, actual = plain(*batch()), fused(*batch())
    torch.testing.assert_close(actual, expected)


@MODELS
def test_logits_are_those_of_the_head(name: str) -> None:
    plain, fused = (m.eval() for m in twins(name))
    tokens, lengths, _ = batch()
    assert torch.equal(fused.logits(tokens), plain.logits(tokens))
    full = torch.full_like(lengths, tokens.shape[1])
    loss, _ = token_loss(plain.logits(tokens[:, :-1]), next_token_labels(tokens, full))
    torch.testing.assert_close(fused(tokens, full)[0], loss)


@MODELS
def test_the_head_never_sees_all_tokens(name: str) -> None:
    calls: list[int] = []
    for model in twins(name):
        model.head.register_forward_hook(lambda *_: calls.append(1))
        model(*batch())
    assert calls == [1]


@MODELS
@pytest.mark.parametrize("device", DEVICES)
def test_under_autocast_it_is_as_near_to_float32(name: str, device: str) -> None:
    plain, fused = (m.to(device) for m in twins(name))
    inputs = [t.to(device) for t in batch(16, 65)]
    exact = outcome(copy.deepcopy(plain).double(), *inputs)[2]
    with torch.autocast(device, torch.bfloat16):
        found = [outcome(m, *inputs) for m in (plain, fused)]
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-3, atol=0)
    errors = [
        sum(float((a - e).norm() / (e.norm() + 1e-9)) for a, e in zip(f[2], exact, strict=True))
        for f in found
    ]
    assert errors[1] <= 1.1 * errors[0]


@MODELS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_captured_step_trains_like_an_eager_one(
    name: str, device: str, autocast: torch.dtype | None
) -> None:
    _, model = twins(name)
    model.to(device)
    twin = copy.deepcopy(model)
    eager = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3), autocast=autocast)
    losses: list[list[float]] = [[], []]
    for i in range(4):
        tokens, lengths = (t.to(device) for t in batch(seed=i)[:2])
        losses[0].append(step(tokens, lengths).loss.item())
        with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
            loss, count = twin(tokens, lengths)
        eager.zero_grad()
        (loss / count).backward()
        eager.step()
        losses[1].append((loss / count).item())
    step.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if autocast is None else 1e-3)


def test_it_compiles_whole() -> None:
    plain, fused = twins("gr00t_n16_lm")
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled, *batch()), outcome(plain, *batch()))


@pytest.mark.slow
def test_the_command_line_trains_with_it_as_without(cli: Any) -> None:
    cli.train("plain", "run.steps=10", "metrics.every=1")
    cli.train("fused", "run.steps=10", "metrics.every=1", "model.args.fused_loss=true")
    plain, fused = ([loss for _, (loss, _) in sorted(cli.losses(n).items())] for n in ("plain", "fused"))
    assert len(plain) == 10
    assert fused == pytest.approx(plain, rel=1e-4)


def test_anything_but_yes_or_no_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build_model("gr00t_n16_lm", "tiny", 259, {"fused_loss": "sometimes"})
    assert caught.value.key == "model.args.fused_loss"
