"""Dimensions and batches of gr00t_n16_vla that do not fit are refused, and say what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from vla_cases import batch_for, tiny

from lf_meta.errors import ConfigError, DataError
from lf_meta.models import gr00t_vla
from lf_meta.models.gr00t_vla_batch import check_batch, random_batch


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"image_token": 320}, "image_token"),
        ({"patch": 32}, "patch"),
        ({"vision_heads": 5}, "vision_heads"),
        ({"tuned_layers": 4}, "tuned_layers"),
        ({"text_kv_heads": 3}, "text_kv_heads"),
        ({"dit_head_dim": 7}, "dit_head_dim"),
        ({"positions": 4}, "positions"),
        ({"dropout": 1.0}, "dropout"),
        ({"state_loss": -1.0}, "state_loss"),
        ({"colour": 1}, "colour"),
        ({"text_layers": 10**9}, "text_layers"),
        ({"vocab_size": 10**18}, "vocab_size"),
        ({"action_bins": 2**40}, "action_bins"),
        ({"rope_base": float("inf")}, "rope_base"),
    ],
)
def test_dimensions_that_do_not_fit_name_their_key(args: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(**args)
    assert caught.value.key == f"model.args.{key}"
    with pytest.raises(ConfigError, match=r"no size 'huge'"):
        gr00t_vla.build("huge")


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("state", lambda b: None, "lacks state"),
        ("action", lambda b: b["action"][:, :-1], r"action is \[3, 7, 8\], not \[3, 8, 8\]"),
        ("action_mask", lambda b: b["action_mask"].float(), "action_mask is torch.float32, not torch.bool"),
        ("pixel_values", lambda b: b["pixel_values"].movedim(-1, 2), "pixel_values is"),
        ("embodiment_id", lambda b: b["embodiment_id"] + 4, "3 embodiments outside 0..3"),
        ("lengths", lambda b: b["lengths"] * 0 + 21, "3 lengths outside 0..20"),
        ("lengths", lambda b: b["lengths"] * 0 + 5, "3 rows without exactly 8 image placeholders"),
        ("input_ids", lambda b: b["input_ids"] - 400, "60 ids outside 0..319"),
        (
            "state",
            lambda b: b["state"] * float("nan"),
            "24 values of pixels, state or action that are not finite",
        ),
        ("state", lambda b: b["state"].long(), "state is torch.int64, not floating point"),
        (
            "action",
            lambda b: b["action"].to(torch.complex64),
            "action is torch.complex64, not floating point",
        ),
        ("pixel_values", lambda b: b["pixel_values"].short(), "stored frames are torch.uint8"),
        (
            "pixel_values",
            lambda b: b["pixel_values"].movedim(-1, 2) * float("nan"),
            "pixels, state or action",
        ),
        ("input_ids", lambda b: b["input_ids"][0], r"input_ids is \[20\], not \[rows, tokens\]"),
        ("input_ids", lambda b: b["input_ids"][:0], r"input_ids is \[0, 20\], not \[rows, tokens\]"),
        ("input_ids", lambda b: torch.tensor(3), r"input_ids is \[\], not \[rows, tokens\]"),
        ("input_ids", lambda b: b["input_ids"].tolist(), r"no tensor in input_ids \(list\)"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(key: str, change: Any, message: str) -> None:
    model = tiny()
    batch = batch_for(model)
    check_batch(model.config, batch)
    changed = change(batch)
    batch = {k: v for k, v in batch.items() if k != key} | ({} if changed is None else {key: changed})
    with pytest.raises(DataError, match=message):
        check_batch(model.config, batch)


def test_a_world_model_needs_its_states() -> None:
    config = tiny(state_loss=0.1).config
    batch = batch_for(tiny())
    with pytest.raises(DataError, match="needs next_state"):
        check_batch(config, batch)
    check_batch(config, batch_for(tiny(state_loss=0.1)))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(0, 5), st.integers(1, 8), st.integers(1, 8))
def test_random_batches_are_valid(rows: int, text: int, seed: int, real_state: int, real_action: int) -> None:
    config = gr00t_vla.config_for("tiny")
    batch = random_batch(config, rows, text, seed=seed, real_state=real_state, real_action=real_action)
    check_batch(config, batch)
    again = random_batch(config, rows, text, seed=seed, real_state=real_state, real_action=real_action)
    assert all(torch.equal(batch[k], again[k]) for k in batch)
    assert not batch["state"][..., real_state:].any()
    assert batch["action_mask"].sum(-1).unique().tolist() == [real_action]
    assert not batch["action"][..., real_action:].any()
