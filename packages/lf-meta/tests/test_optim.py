"""A step's gradient does not depend on how its tokens are split into micro-batches."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lf_meta.config import OptimSection
from lf_meta.models.gr00t_lm import build
from lf_meta.optim import MicroBatch, accumulate, make_optimizer, normalise_and_clip


def _model() -> nn.Module:
    torch.manual_seed(0)
    return build("tiny", 64, hidden=16, layers=2, heads=2, ffn=24).double()


def _no_sync(model: nn.Module, skip: bool) -> nullcontext[None]:
    return nullcontext()


def _gradient(model: nn.Module, micro_batches: list[MicroBatch], clip: float = 0.0) -> torch.Tensor:
    model.zero_grad()
    totals = accumulate(model, micro_batches, _no_sync, nullcontext)
    normalise_and_clip(model.parameters(), totals[1], 1, clip)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _rows(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 64, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    return tokens, torch.tensor(lengths)


def test_micro_batches_of_128_and_2_tokens_give_the_joint_gradient() -> None:
    # 129 and 3 tokens give 128 and 2 predictions
    tokens, lengths = _rows([129, 3])
    model = _model()
    joint = _gradient(model, [(tokens, lengths, None)])
    split = _gradient(model, [(tokens[:1], lengths[:1], None), (tokens[1:], lengths[1:], None)])
    assert (joint - split).norm() / joint.norm() < 1e-12
    # and the test can fail: averaging the two means, as most trainers do, is far off
    means = (
        _gradient(model, [(tokens[:1], lengths[:1], None)])
        + _gradient(model, [(tokens[1:], lengths[1:], None)])
    ) / 2
    assert (joint - means).norm() / joint.norm() > 0.1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 17), min_size=2, max_size=8).filter(lambda n: max(n) > 1), st.data())
def test_any_split_gives_the_joint_gradient(lengths: list[int], data: st.DataObject) -> None:
    tokens, lens = _rows(lengths)
    cut = data.draw(st.integers(1, len(lengths) - 1))
    model = _model()
    joint = _gradient(model, [(tokens, lens, None)])
    split = _gradient(model, [(tokens[:cut], lens[:cut], None), (tokens[cut:], lens[cut:], None)])
    assert (joint - split).norm() <= 1e-12 * max(joint.norm().item(), 1e-30)


def test_padding_and_masked_tokens_do_not_change_the_gradient() -> None:
    tokens, lengths = _rows([9, 5])
    model = _model()
    wide = torch.cat((tokens, torch.randint(0, 64, (2, 6))), dim=1)
    assert torch.allclose(
        _gradient(model, [(tokens, lengths, None)]),
        _gradient(model, [(wide, lengths, None)]),
        rtol=1e-12,
        atol=1e-15,
    )
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1] = False
    alone = _gradient(model, [(tokens[:1], lengths[:1], None)])
    assert torch.allclose(_gradient(model, [(tokens, lengths, mask)]), alone, rtol=1e-12, atol=1e-15)


def test_clip_limits_the_norm_and_reports_the_norm_before() -> None:
    tokens, lengths = _rows([9, 9])
    model = _model()
    free = _gradient(model, [(tokens, lengths, None)])
    model.zero_grad()
    totals = accumulate(model, [(tokens, lengths, None)], _no_sync, nullcontext)
    norm = normalise_and_clip(model.parameters(), totals[1], 1, free.norm().item() / 4)
    assert norm.item() == pytest.approx(free.norm().item())
    clipped = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert clipped.norm().item() == pytest.approx(free.norm().item() / 4, rel=1e-4)


def test_a_batch_without_any_target_gives_zero_gradients_not_nan() -> None:
    tokens, _ = _rows([4])
    gradient = _gradient(_model(), [(tokens, torch.tensor([0]), None)], clip=1.0)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_weight_decay_is_on_matrices_only() -> None:
    optimizer = make_optimizer(_model(), OptimSection())
    dims = [({p.ndim >= 2 for p in g["params"]}, g["weight_decay"]) for g in optimizer.param_groups]
    assert dims == [({True}, 0.1), ({False}, 0.0)]
