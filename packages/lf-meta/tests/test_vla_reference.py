"""gr00t_n16_vla equals a slow float64 formula, and its parts equal the libraries the published model is made of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import vla_reference as reference

from lf_meta.models import gr00t_vla
from lf_meta.models.gr00t_vla import GR00TVLA
from lf_meta.models.gr00t_vla_batch import random_batch
from lf_meta.models.gr00t_vla_names import slots


@pytest.fixture
def model() -> GR00TVLA:
    """tiny, in float64, with no parameter at a value that would hide an error (ones, zeros)."""
    torch.manual_seed(0)
    built = gr00t_vla.build("tiny").double().eval()
    with torch.no_grad():
        for p in built.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return built


@pytest.fixture
def batch(model: GR00TVLA) -> dict[str, Tensor]:
    made = random_batch(model.config, 3, 9, seed=3)
    made["action_mask"] = torch.rand(made["action_mask"].shape) < 0.6
    ids = made["input_ids"]
    made["input_ids"][0] = torch.cat((ids[0, 8:11], ids[0, :4], ids[0, 11:12], ids[0, 4:8], ids[0, 12:]))
    made["lengths"] = torch.tensor([14, 17, 10])
    return {k: v.double() if k in ("state", "action") else v for k, v in made.items()}


def in_float64(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with images as float64 pixel_values; the model makes float32 of uint8 ones."""
    return batch | {"pixel_values": (batch["pixel_values"].double() / 255 - 0.5).movedim(-1, -3) / 0.5}


def published(model: GR00TVLA) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return {key: slot.of(parameters) for key, slot in slots(model).items()}


def test_loss_and_count_equal_the_formula(model: GR00TVLA, batch: dict[str, Tensor]) -> None:
    weights, noise, time = published(model), torch.randn_like(batch["action"]), torch.rand(3)
    rows = [{k: v[i] for k, v in batch.items()} for i in range(3)]
    parts = [reference.row_loss(weights, model.config, rows[i], noise[i], time[i]) for i in range(3)]
    loss, count = model(in_float64(batch), noise=noise, time=time)
    assert count == sum(n for _, n in parts)
    # time features and rotary angles are float32 in both; what is left is the order of float64 sums
    assert loss.item() == pytest.approx(sum(float(s) for s, _ in parts), rel=1e-12)


def test_every_published_weight_takes_part(model: GR00TVLA, batch: dict[str, Tensor]) -> None:
    """A formula that ignored a tensor, or a name filled by the wrong rows, would not follow this change."""
    noise, time = torch.randn_like(batch["action"]), torch.rand(3)
    with torch.no_grad():
        for weight in published(model).values():
            weight.mul_(1 + 0.1 * torch.rand_like(weight))
    weights = published(model)
    rows = [{k: v[i] for k, v in batch.items()} for i in range(3)]
    expected = [reference.row_loss(weights, model.config, rows[i], noise[i], time[i])[0] for i in range(3)]
    loss, _ = model(in_float64(batch), noise=noise, time=time)
    assert loss.item() == pytest.approx(float(sum(expected)), rel=1e-12)


def test_language_layers_equal_transformers_qwen3(model: GR00TVLA) -> None:
    qwen3 = pytest.importorskip("transformers.models.qwen3")
    c = model.config
    config = qwen3.Qwen3Config(
        vocab_size=c.vocab_size,
        hidden_size=c.text_hidden,
        intermediate_size=c.text_ffn,
        num_hidden_layers=c.text_layers,
        num_attention_heads=c.text_heads,
        num_key_value_heads=c.text_kv_heads,
        head_dim=c.text_head_dim,
        rms_norm_eps=c.text_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
        attn_implementation="sdpa",
    )
    theirs = qwen3.Qwen3Model(config).double().eval()
    prefix = "backbone.model.language_model.model."
    weights = {k.removeprefix(prefix): v for k, v in published(model).items() if k.startswith(prefix)}
    theirs.load_state_dict(weights, strict=True)
    x = torch.randn(2, 11, c.text_hidden, dtype=torch.float64)
    expected = theirs(inputs_embeds=x).last_hidden_state
    language = model.language
    found = language.norm(language.run(language.tuned, language.run(language.frozen, x)))
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("image_size", [32, 48])
def test_vision_tower_equals_transformers_siglip2(image_size: int) -> None:
    """Also with more patches than the table has positions, as 252 pixels have on the published one of 16 x 16."""
    siglip2 = pytest.importorskip("transformers.models.siglip2")
    torch.manual_seed(0)
    model = gr00t_vla.build("tiny", image_size=image_size).double().eval()
    c = model.config
    config = siglip2.Siglip2VisionConfig(
        hidden_size=c.vision_hidden,
        intermediate_size=c.vision_ffn,
        num_hidden_layers=c.vision_layers,
        num_attention_heads=c.vision_heads,
        num_patches=c.position_grid**2,
        patch_size=c.patch,
        layer_norm_eps=c.vision_eps,
        vision_use_head=False,
        attn_implementation="sdpa",
    )
    theirs = siglip2.Siglip2VisionModel(config).double().eval()
    names = theirs.state_dict().keys()
    prefix = "backbone.model.vision_model.vision_model."
    weights = {k.removeprefix(prefix): v for k, v in published(model).items() if k.startswith(prefix)}
    inner = "vision_model." if any(n.startswith("vision_model.") for n in names) else ""
    theirs.load_state_dict({inner + k: v for k, v in weights.items()}, strict=True)
    images = torch.rand(2, c.image_size, c.image_size, 3, dtype=torch.float64) * 2 - 1
    p, g = c.patch, c.grid
    cut = [
        image[i * p : i * p + p, j * p : j * p + p].reshape(-1)
        for image in images
        for i in range(g)
        for j in range(g)
    ]
    given: dict[str, Any] = {
        "pixel_values": torch.stack(cut).view(2, g * g, -1),
        "pixel_attention_mask": torch.ones(2, g * g, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[g, g]] * 2),
    }
    expected = theirs(**given).last_hidden_state
    assert torch.allclose(model.vision(images), expected, rtol=1e-6, atol=1e-6)


def test_action_blocks_equal_diffusers(model: GR00TVLA) -> None:
    attention = pytest.importorskip("diffusers.models.attention")
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    c, weights = model.config, published(model)
    d, cross = c.dit_hidden, {0: c.text_hidden, 1: None}

    def loaded(module: torch.nn.Module, prefix: str) -> torch.nn.Module:
        found = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        module.double().load_state_dict(found, strict=True)
        return module.eval()

    step = torch.tensor([0, 250, 999])
    features = embeddings.Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=1)(step).double()
    embedder = loaded(
        embeddings.TimestepEmbedding(256, d), "action_head.model.timestep_encoder.timestep_embedder."
    )
    time = torch.nn.functional.silu(embedder(features))
    assert torch.allclose(model.dit.time(step), time, rtol=1e-9, atol=1e-9)

    x, seen = torch.randn(3, 5, d).double(), torch.randn(3, 7, c.text_hidden).double()
    mask = torch.rand(3, 7) < 0.7
    mask[:, 0] = True
    for i, width in cross.items():
        at = f"action_head.model.transformer_blocks.{i}."
        attn = attention.Attention(
            d, cross_attention_dim=width, heads=c.dit_heads, dim_head=c.dit_head_dim, bias=True
        )
        ff = loaded(attention.FeedForward(d, activation_fn="gelu-approximate"), f"{at}ff.")
        attn = loaded(attn, f"{at}attn1.")
        modulation = torch.nn.functional.linear(time, weights[f"{at}norm1.linear.weight"])
        scale, shift = (modulation + weights[f"{at}norm1.linear.bias"])[:, None].chunk(2, dim=-1)
        norm = torch.nn.LayerNorm(d, eps=1e-5, elementwise_affine=False).double()
        h = norm(x) * (1 + scale) + shift
        given = {"encoder_hidden_states": seen, "attention_mask": mask} if width else {}
        y = x + attn(h, **given)
        ours = model.dit.blocks[i](x, time, *((seen, mask[:, None, None]) if width else ()))
        assert torch.allclose(ours, y + ff(norm(y)), rtol=1e-9, atol=1e-9)
