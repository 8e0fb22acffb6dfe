"""gr00t_n16_moe: sizes, the loss contract, auxiliary losses, masks, and training by the command line."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lf_graph import TrainStep
from lf_meta.errors import ConfigError
from lf_meta.models import build_model
from lf_meta.models.gr00t_moe import GR00TMoE, MoEConfig, build

SPARSE: dict[str, Any] = {
    "attention": "block_sparse",
    "sparse_block": 4,
    "sparse_window": 2,
    "sparse_global": 1,
}


def tiny(**args: Any) -> GR00TMoE:
    torch.manual_seed(0)
    return build("tiny", 256, **{"layers": 2, "hidden": 32, "heads": 2, "ffn": 16, **args})


def batch(rows: int = 4, length: int = 33) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 256, (rows, length), generator=generator)
    return tokens, torch.randint(2, length + 1, (rows,), generator=generator)


def parameters(size: str) -> tuple[int, int]:
    with torch.device("meta"):
        model = build(size, 50257)
    return sum(p.numel() for p in model.parameters()), model.active_parameters


def test_base_has_the_parameters_of_its_formula() -> None:
    attention, expert, router, norms = 4 * 2048**2, 3 * 2048 * 1024, 2048 * 32, 2 * 2048
    shared = 2 * 50257 * 2048 + 2048
    total, active = parameters("base")
    assert total == 12 * (attention + 32 * expert + router + norms) + shared
    assert active == 12 * (attention + 2 * expert + router + norms) + shared


def test_13b_has_13_billion_parameters_within_5_percent() -> None:
    total, active = parameters("13b")
    assert total == pytest.approx(13e9, rel=0.05)
    assert active == pytest.approx(2.705e9, rel=1e-3)


def test_small_sizes_are_small() -> None:
    assert parameters("tiny")[0] < 20e6
    assert parameters("small")[0] < 0.2e9


def test_it_is_found_by_its_name() -> None:
    model = build_model("gr00t_n16_moe", "tiny", 256, {"layers": 1, "experts": 4})
    assert isinstance(model, GR00TMoE)
    assert model.config.experts == 4


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    tokens, _ = batch(length=65)
    loss, count = tiny().eval()(tokens, torch.full((4,), 65))
    assert count == 4 * 64
    assert loss.item() / 256 == pytest.approx(math.log(256), abs=0.1)


def test_training_loss_is_cross_entropy_plus_count_times_the_weighted_losses_of_each_layer() -> None:
    model, (tokens, lengths) = tiny(balance_weight=0.3, z_weight=0.2), batch()
    loss, count = model(tokens, lengths)
    aux = model.hidden(tokens[:, :-1], lengths - 1)[1]
    cross_entropy, _ = model.eval()(tokens, lengths)
    torch.testing.assert_close(loss, cross_entropy + count * aux)
    assert aux > 0.3 * 2 * 0.9  # an even load has a balance loss of 1 in each of both layers


def test_without_weights_training_and_eval_losses_are_the_same_bits() -> None:
    model, (tokens, lengths) = tiny(balance_weight=0.0, z_weight=0.0), batch()
    assert torch.equal(model(tokens, lengths)[0], model.eval()(tokens, lengths)[0])


def test_eval_losses_of_the_parts_of_a_batch_add_up() -> None:
    model, (tokens, lengths) = tiny().double().eval(), batch(6)
    whole, count = model(tokens, lengths)
    parts = [model(tokens[i : i + 2], lengths[i : i + 2]) for i in range(0, 6, 2)]
    torch.testing.assert_close(whole, sum(p[0] for p in parts), rtol=1e-12, atol=0)
    assert count == sum(p[1] for p in parts)


@pytest.mark.parametrize("attention", [{}, SPARSE], ids=["causal", "block_sparse"])
def test_padding_changes_neither_loss_nor_gradients(attention: dict[str, Any]) -> None:
    def run(tokens: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
        model = tiny(**attention).double()
        loss, count = model(tokens, lengths)
        (loss / count).backward()
        return loss / count, [p.grad for p in model.parameters() if p.grad is not None]

    tokens, lengths = batch(3, 20)
    loss, grads = run(tokens, lengths)
    longer = torch.full((4, 37), 255)
    longer[:3, :20] = tokens
    padded_loss, padded_grads = run(longer, torch.cat((lengths, torch.tensor([0]))))
    torch.testing.assert_close(padded_loss, loss, rtol=1e-10, atol=0)
    assert len(grads) == len(padded_grads) == len(list(tiny().parameters()))
    for a, b in zip(padded_grads, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("attention", [{}, SPARSE], ids=["causal", "block_sparse"])
def test_no_position_sees_a_later_token(attention: dict[str, Any]) -> None:
    model = tiny(**attention).double().eval()
    tokens, _ = batch(1, 24)
    before = model.logits(tokens)
    changed = tokens.clone()
    changed[0, 15:] = (changed[0, 15:] + 1) % 256
    assert torch.equal(model.logits(changed)[:, :15], before[:, :15])


def test_block_sparse_sees_its_window_and_the_global_block_only() -> None:
    """One layer of blocks of 4, window 2: position 23 (block 5) sees blocks 0, 4 and 5."""
    model = tiny(layers=1, **SPARSE).double().eval()
    tokens, _ = batch(1, 24)
    before = model.logits(tokens)[0, 23]
    for position in range(23):
        changed = tokens.clone()
        changed[0, position] += 1 if changed[0, position] < 255 else -1
        seen = not torch.equal(model.logits(changed)[0, 23], before)
        assert seen == (position // 4 in (0, 4, 5)), position


def test_block_sparse_reuses_its_masks_for_lengths_that_grow() -> None:
    model = tiny(**SPARSE).eval()
    for length in range(1, 40):
        model.logits(torch.zeros(1, length, dtype=torch.int64))
    assert [m.max_len for m in model._masks] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("options", [{}, SPARSE, {"dropout": 0.1}], ids=["causal", "block_sparse", "dropout"])
def test_a_captured_step_trains_like_an_eager_one(options: dict[str, Any]) -> None:
    model = tiny(**options)
    twin = copy.deepcopy(model)
    eager = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses: list[list[float]] = [[], []]
    for i in range(4):
        tokens = torch.randint(0, 256, (3, 21))
        lengths = torch.tensor([[21, 5, 0], [1, 2, 3], [21, 21, 21], [7, 0, 20]][i])
        torch.manual_seed(i)
        losses[0].append(step(tokens, lengths).loss.item())
        torch.manual_seed(i)
        loss, count = twin(tokens, lengths)
        eager.zero_grad()
        (loss / count).backward()
        eager.step()
        losses[1].append((loss / count).item())
    step.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_dimensions_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.args\.top_k"):
        build("tiny", 256, top_k=9)
    with pytest.raises(ConfigError, match=r"model\.args\.attention"):
        build("tiny", 256, attention="dense")
    with pytest.raises(ConfigError, match=r"model\.args\.z_weight"):
        build("tiny", 256, z_weight=-1.0)
    with pytest.raises(ConfigError, match="tiny, small, base, 13b"):
        build("huge", 256)
    assert MoEConfig(vocab_size=8, hidden=8, layers=1, heads=2, ffn=4, experts=2).top_k == 2


def test_residual_outputs_start_smaller() -> None:
    model = build("tiny", 256)
    experts = model.blocks[0].ffn.experts  # type: ignore[union-attr]
    assert float(experts.gate_up.detach().std()) == pytest.approx(0.02, rel=0.05)  # type: ignore[arg-type, union-attr]
    assert float(experts.down.detach().std()) == pytest.approx(0.02 / math.sqrt(8), rel=0.05)  # type: ignore[arg-type, union-attr]


MOE = ["model.name=gr00t_n16_moe", "model.size=tiny", "model.args.experts=4", "run.steps=40", "ckpt.every=10"]


@pytest.mark.slow
def test_the_command_line_trains_it_and_a_killed_run_resumes_bit_for_bit(
    cli: Any, until: Any, small: list[str]
) -> None:
    cli.train("straight", *MOE)
    losses = [loss for _, (loss, _) in sorted(cli.losses("straight").items())]
    assert losses[-1] < losses[0] - 1.0
    process = cli.start("train", "run.name=killed", *small, *MOE)
    until((cli.folder / "runs/killed/ckpt/steps/10/MANIFEST").exists, process)
    process.kill()
    process.wait()
    assert max(cli.losses("killed"), default=0) < 40
    cli.run("resume", "runs/killed")
    assert cli.losses("killed") == cli.losses("straight")
    assert cli.digest("killed") == cli.digest("straight")
