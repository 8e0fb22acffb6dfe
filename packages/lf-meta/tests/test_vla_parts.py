"""Parts of gr00t_n16_vla against what they say they compute, by loops."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
from vla_cases import generator, tiny

from lf_meta.models import gr00t_vla
from lf_meta.models.gr00t_vla_backbone import Connector, as_channels_last, place_images
from lf_meta.models.gr00t_vla_head import (
    EmbodimentLinear,
    _Rows,
    action_time_features,
    split_context,
    time_features,
)
from lf_meta.models.world_model import BinnedActions

IMAGES = 5
rows_of_kinds = st.lists(st.permutations("i" * IMAGES + "t" * 4 + "p" * 2), min_size=1, max_size=3)


def kinds(rows: list[list[str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [B, T] each: image placeholders and real tokens, of rows of i(mage), t(ext) and p(adding)."""
    is_image = torch.tensor([[c == "i" for c in row] for row in rows])
    return is_image, torch.tensor([[c != "p" for c in row] for row in rows])


@settings(max_examples=40, deadline=None)
@given(rows_of_kinds)
def test_images_fill_their_placeholders_in_order(rows: list[list[str]]) -> None:
    is_image, _ = kinds(rows)
    embedded = torch.randn(len(rows), 11, 3)
    images = torch.randn(len(rows), IMAGES, 3)
    placed = place_images(embedded, is_image, images)
    for b, row in enumerate(rows):
        queue = iter(images[b])
        for t, kind in enumerate(row):
            assert torch.equal(placed[b, t], next(queue) if kind == "i" else embedded[b, t])


@settings(max_examples=40, deadline=None)
@given(rows_of_kinds)
def test_a_context_is_sorted_into_images_and_text(rows: list[list[str]]) -> None:
    is_image, is_real = kinds(rows)
    context = torch.randn(len(rows), 11, 3)
    split = split_context(context, is_image, is_real, IMAGES)
    for b in range(len(rows)):
        assert torch.equal(split.image[b], context[b][is_image[b]])
        assert split.image_mask[b].all()
        seen = split.text[b][split.text_mask[b, 0, 0]]
        assert torch.equal(seen, context[b][is_real[b] & ~is_image[b]])


def test_a_side_without_a_real_token_keeps_one_place_open() -> None:
    nothing = torch.zeros(2, 6, dtype=torch.bool)
    split = split_context(torch.randn(2, 6, 3), nothing, nothing, 2)
    assert split.image_mask[:, 0, 0].tolist() == [[True, False]] * 2
    assert split.text_mask[:, 0, 0].tolist() == [[True] + [False] * 3] * 2


def test_gradients_of_a_split_context_go_back_to_their_places() -> None:
    is_image, is_real = kinds([list("titiiptiitp")])
    context = torch.randn(1, 11, 3, requires_grad=True)
    split = split_context(context, is_image, is_real, IMAGES)
    (split.image.sum() * 2 + (split.text * split.text_mask[:, 0, 0, :, None]).sum() * 3).backward()
    assert context.grad is not None
    expected = [2 if i else 3 * r for i, r in zip(is_image[0].tolist(), is_real[0].tolist(), strict=True)]
    assert context.grad[0, :, 0].tolist() == expected


def test_each_sample_uses_the_weights_of_its_embodiment() -> None:
    layer = EmbodimentLinear(4, 5, 3, std=1.0).double()
    nn.init.normal_(layer.bias)
    x, who = torch.randn(6, 2, 5).double(), torch.tensor([3, 0, 3, 1, 0, 2])
    y = layer(x, who)
    for b, e in enumerate(who.tolist()):
        assert torch.allclose(y[b], x[b] @ layer.weight[e] + layer.bias[e])
    y.sum().backward()
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad[3, :, 0], x[[0, 2]].sum((0, 1)))


def test_the_gradient_of_a_table_is_that_of_plain_indexing() -> None:
    layer = EmbodimentLinear(4, 5, 3, std=1.0).double()
    x, who = torch.randn(6, 2, 5).double(), torch.tensor([3, 0, 3, 1, 0, 3])
    weights = torch.randn(6, 2, 3).double()
    plain = layer.weight.detach().clone().requires_grad_()
    ((x @ plain[who]) * weights).sum().backward()
    (layer(x, who) * weights).sum().backward()
    assert layer.weight.grad is not None
    assert plain.grad is not None
    assert torch.allclose(layer.weight.grad, plain.grad)
    assert not layer.weight.grad[2].any()
    assert torch.autograd.gradcheck(lambda w: _Rows.apply(w, who), (plain.detach().requires_grad_(),))


def test_under_autocast_a_table_is_only_read_through_its_cast() -> None:
    torch.manual_seed(0)
    layer = EmbodimentLinear(4, 5, 3, std=1.0)
    x, who = torch.randn(64, 2, 5), torch.zeros(64, dtype=torch.int64)
    readers: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            readers.extend(func.overloadpacket.__name__ for a in args if a is layer.weight)
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16), Watch():
        y = layer(x, who)
    assert y.dtype == torch.bfloat16
    assert readers == ["_to_copy"]
    y.sum().backward()
    assert layer.weight.grad is not None
    # bfloat16 sums of 64 samples, one after another, would be off by several percent
    exact = x.bfloat16().double().sum((0, 1))[:, None].expand(5, 3)
    assert torch.allclose(layer.weight.grad[0].double(), exact, rtol=0.01, atol=0.05)


def test_the_connector_cuts_squares_as_pixel_unshuffle_does() -> None:
    config = gr00t_vla.config_for("tiny")
    connector = Connector(config).double()
    x = torch.randn(2, config.grid**2, config.vision_hidden).double()
    plane = x.transpose(1, 2).reshape(2, -1, config.grid, config.grid)
    squares = nn.functional.pixel_unshuffle(plane, 2).flatten(2).transpose(1, 2)
    expected = connector.down(nn.functional.gelu(connector.up(connector.norm(squares))))
    assert torch.allclose(connector(x), expected)


def test_time_features_span_the_frequencies_they_name() -> None:
    time = torch.tensor([0, 7, 999])
    for t, row in zip(time.tolist(), time_features(time, 8), strict=True):
        angles = [t * 10_000 ** (-i / 3) for i in range(4)]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        assert row.tolist() == pytest.approx(expected, abs=1e-4)
    for t, row in zip(time.tolist(), action_time_features(time, 8), strict=True):
        angles = [t * 10_000 ** (-i / 4) for i in range(4)]
        expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        assert row.tolist() == pytest.approx(expected, abs=1e-4)


def test_stored_frames_are_scaled_and_processed_ones_turned() -> None:
    frame = torch.tensor([0, 255, 51], dtype=torch.uint8).expand(2, 4, 4, 3)
    assert as_channels_last(frame)[1, 2, 3].tolist() == pytest.approx([-1, 1, -0.6])
    values = torch.randn(2, 3, 4, 5)
    assert torch.equal(as_channels_last(values)[1, 2, 3], values[1, :, 2, 3])


def test_one_dropout_behind_attention_has_the_rate_of_the_two_it_replaces() -> None:
    block = tiny(dropout=0.2).dit.blocks[0]
    ones = torch.ones(200_000)
    torch.manual_seed(0)
    ours, theirs = block.drop_attention(ones), block.drop(block.drop(ones))
    assert ours.unique().tolist() == pytest.approx(theirs.unique().tolist())
    # the standard deviation of the kept share of 2e5 is 0.0011
    assert (ours > 0).float().mean().item() == pytest.approx(0.64, abs=0.005)
    assert (theirs > 0).float().mean().item() == pytest.approx(0.64, abs=0.005)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=20))
def test_the_middle_of_a_bin_is_within_half_a_bin(actions: list[float]) -> None:
    head = BinnedActions(gr00t_vla.config_for("tiny"))
    values = torch.tensor(actions)
    bins = head.bin_of(values)
    assert ((bins >= 0) & (bins < head.bins)).all()
    assert ((head.centre_of(bins) - values).abs() <= 1 / head.bins + 1e-6).all()
    assert head.bin_of(torch.tensor([-9.0, 9.0])).tolist() == [0, head.bins - 1]


def test_the_state_predictor_starts_from_the_state_and_ignores_padding() -> None:
    model = tiny(state_loss=0.1).double()
    assert model.world_model is not None
    head = model.world_model.state_predictor
    g = generator(0)
    context, actions, state = (
        torch.randn(s, generator=g).double() for s in ((2, 7, 64), (2, 3, 48), (2, 1, 8))
    )
    is_real = torch.arange(7) < torch.tensor([[7], [4]])
    found = head(context, is_real, actions, state)
    assert torch.allclose(head(context, is_real, actions, state + 1), found + 1)
    changed = torch.where(is_real[..., None], context, 9.0)
    assert torch.equal(head(changed, is_real, actions, state), found)
    nn.init.zeros_(head.change.weight)
    nn.init.zeros_(head.change.bias)
    assert torch.equal(head(context, is_real, actions, state), state.expand(2, 3, 8))
