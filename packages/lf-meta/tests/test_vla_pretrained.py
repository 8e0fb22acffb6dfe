"""Published weights in and out: a folder is read completely or refused with everything that is wrong with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

safetensors = pytest.importorskip("safetensors.torch")

from lf_meta.errors import ConfigError  # noqa: E402
from lf_meta.models import gr00t_vla  # noqa: E402
from lf_meta.models.gr00t_vla import GR00TVLA  # noqa: E402
from lf_meta.models.gr00t_vla_batch import random_batch  # noqa: E402
from lf_meta.models.gr00t_vla_names import published_names, slots, unused_shapes  # noqa: E402
from lf_meta.models.pretrained import (  # noqa: E402
    INDEX,
    SINGLE,
    WeightsError,
    check_folder,
    from_pretrained,
    save_pretrained,
)

Tensors = dict[str, Tensor]
QUERY = "backbone.model.language_model.model.layers.0.self_attn.q_proj.weight"
TABLE = "action_head.state_encoder.layer1.W"


def tiny(**args: Any) -> GR00TVLA:
    torch.manual_seed(0)
    return gr00t_vla.build("tiny", **args)


def same_weights(a: GR00TVLA, b: GR00TVLA) -> bool:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return all(n == m and torch.equal(p.detach(), q.detach().to(p.dtype)) for (n, p), (m, q) in pairs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_pretrained(tiny(), tmp_path / "weights")
    return tmp_path / "weights"


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = safetensors.load_file(folder / SINGLE)
    change(tensors)
    safetensors.save_file(tensors, folder / SINGLE)


def test_keys_of_3b_are_as_many_as_were_published() -> None:
    with torch.device("meta"):
        model = gr00t_vla.build("3b")
    keys = [*slots(model), *unused_shapes(model.config)]
    groups = {
        "action_head.action_decoder": 4,
        "action_head.action_encoder": 6,
        "action_head.model": 456,
        "action_head.position_embedding": 1,
        "action_head.state_encoder": 4,
        "action_head.vlln": 2,
        "backbone.model.language_model": 179,
        "backbone.model.mlp1": 6,
        "backbone.model.vision_model": 448,
    }
    for prefix, number in groups.items():
        assert sum(key.startswith(prefix + ".") for key in keys) == number, prefix
    assert len(set(keys)) == len(keys) == 1106
    shapes = {key: slot.shape for key, slot in slots(model).items()}
    assert shapes[TABLE] == (32, 128, 1024)
    assert shapes["action_head.model.transformer_blocks.0.attn1.to_k.weight"] == (1536, 2048)
    assert shapes["action_head.model.timestep_encoder.timestep_embedder.linear_1.weight"] == (1536, 256)
    assert shapes["backbone.model.mlp1.1.weight"] == (2048, 4608)
    assert shapes["backbone.model.language_model.model.layers.0.mlp.down_proj.weight"] == (2048, 6144)


def test_the_keys_fill_every_element_of_the_model_once() -> None:
    model = tiny(state_loss=0.1, binned_loss=0.1, state_dropout=0.1)
    parameters = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for slot in slots(model).values():
        slot.of(parameters).add_(1)
    assert all((p == 1).all() for p in parameters.values())
    assert set(published_names(model)) == set(parameters)


@pytest.mark.parametrize("shard_bytes", [10**9, 200_000])
@pytest.mark.parametrize(
    "extra", [{}, {"state_loss": 0.1, "binned_loss": 0.2, "state_dropout": 0.5, "horizon": 4}]
)
def test_what_is_saved_is_loaded(tmp_path: Path, shard_bytes: int, extra: dict[str, Any]) -> None:
    model = tiny(**extra)
    save_pretrained(model, tmp_path / "w", shard_bytes=shard_bytes)
    torch.manual_seed(9)
    loaded = from_pretrained(tmp_path / "w")
    assert loaded.config == model.config
    assert same_weights(model, loaded)
    assert (tmp_path / "w" / INDEX).exists() == (shard_bytes < 10**9)
    assert all(f.stat().st_size < shard_bytes + 50_000 for f in (tmp_path / "w").glob("*.safetensors"))
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in loaded.parameters()]
    batch = random_batch(model.config, 2, 5)
    noise = torch.randn_like(batch["action"])
    assert torch.equal(model.eval().act(batch, noise=noise), loaded.eval().act(batch, noise=noise))


def test_half_precision_and_the_unused_tensors_of_the_published_file_are_accepted(folder: Path) -> None:
    def like_published(tensors: Tensors) -> None:
        tensors |= {k: v.bfloat16() for k, v in tensors.items() if k.startswith("backbone.")}
        tensors |= {k: torch.ones(s) for k, s in unused_shapes(tiny().config).items()}

    rewrite(folder, like_published)
    loaded = from_pretrained(folder)
    expected = tiny().cast_frozen(torch.bfloat16)
    assert torch.equal(loaded.vision.norm.weight, expected.vision.norm.weight.float())
    assert torch.equal(loaded.language.embed.weight, expected.language.embed.weight.float())
    assert all(p.dtype == torch.float32 for p in loaded.parameters())


def test_a_folder_without_optional_heads_gives_fresh_ones(folder: Path) -> None:
    torch.manual_seed(1)
    loaded = from_pretrained(folder, state_loss=0.1, state_dropout=0.1)
    assert loaded.mask_token is not None
    assert 0 < loaded.mask_token.std() < 0.1
    assert loaded.world_model is not None
    head = loaded.world_model.state_predictor
    assert (head.norm.weight == 1).all()
    assert 0 < head.change.weight.abs().max() <= head.change.in_features**-0.5
    assert torch.equal(loaded.position.weight, tiny().position.weight)


def test_everything_that_is_wrong_is_named_at_once(folder: Path) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors[QUERY], tensors["action_head.vlln.bias"]
        tensors["action_head.mask_token"] = torch.zeros(1, 1, 64)
        tensors[TABLE] = torch.zeros(5, 8, 48)
        tensors["backbone.model.language_model.lm_head.weight"] = torch.zeros(320, 63)
        tensors["backbone.model.mlp1.0.bias"] = torch.zeros(192, dtype=torch.int32)

    rewrite(folder, damage)
    with pytest.raises(WeightsError) as caught:
        from_pretrained(folder)
    error = caught.value
    assert error.missing == ("action_head.vlln.bias", QUERY)
    assert error.unexpected == ("action_head.mask_token",)
    assert error.wrong == {
        TABLE: ("[4, 8, 48]", "[5, 8, 48]"),
        "backbone.model.language_model.lm_head.weight": ("[320, 64]", "[320, 63]"),
        "backbone.model.mlp1.0.bias": ("floating point", "I32"),
    }
    for key in (*error.missing, *error.unexpected, *error.wrong):
        assert key in str(error)


def test_a_model_on_the_meta_device_can_check_a_folder(folder: Path) -> None:
    with torch.device("meta"):
        check_folder(gr00t_vla.build("tiny"), folder)
        other = gr00t_vla.build("tiny", dit_layers=9)
    with pytest.raises(WeightsError) as caught:
        check_folder(other, folder)
    assert len(caught.value.missing) == 14
    assert not caught.value.wrong


def _write(name: str, text: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def _index(names: object) -> Callable[[Path], object]:
    return _write(INDEX, json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / SINGLE).unlink(), "has neither"),
        (_write(SINGLE, b"\xff" * 64), "cannot be read as safetensors"),
        (_write(SINGLE, b""), "cannot be read as safetensors"),
        (_write(INDEX, "{"), "is no index"),
        (_write(INDEX, "[]"), "is no index"),
        (_index([1]), "is no index"),
        (_index({"a": ["b"]}), "is no index"),
        (_write(INDEX, "[" * 100_000), "is no index"),
        (_index({"a": 3}), "outside its folder"),
        (_index({"a": ".."}), "outside its folder"),
        (_index({"a": ""}), "outside its folder"),
        (_index({"a": "../weights/model.safetensors"}), "outside its folder"),
        (_index({"a": "gone.safetensors"}), "cannot be read as safetensors"),
    ],
)
def test_a_damaged_folder_is_one_typed_error(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    with pytest.raises(WeightsError, match=message):
        from_pretrained(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsError, match="cannot be read"):
        from_pretrained(folder)


def test_a_key_in_two_files_is_refused(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "a.safetensors")
    safetensors.save_file({QUERY: torch.zeros(2)}, folder / "b.safetensors")
    _index({"x": "a.safetensors", "y": "b.safetensors"})(folder)
    with pytest.raises(WeightsError, match=r"is in a\.safetensors and in b\.safetensors"):
        from_pretrained(folder)


def test_another_model_is_refused_by_its_type(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"gr00t_n16_vla; save the state_dict\(\) of a Linear"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path / "w")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_written_completely_or_not_at_all(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WeightsError, match="exists"):
        save_pretrained(tiny(), folder)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors, "save_file", full_disk)
    with pytest.raises(WeightsError, match="No space left"):
        save_pretrained(tiny(), tmp_path / "other")
    assert [p.name for p in tmp_path.iterdir()] == ["weights"]


def test_without_safetensors_the_error_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(WeightsError, match=r"lf-meta\[hf\]"):
        from_pretrained(folder)


def nvidia(**changes: Any) -> dict[str, Any]:
    """config.json as Isaac-GR00T writes it, of tiny's action head."""
    c = tiny().config
    dit = {
        "num_layers": c.dit_layers,
        "num_attention_heads": c.dit_heads,
        "attention_head_dim": c.dit_head_dim,
        "output_dim": c.dit_output,
        "dropout": 0.2,
        "norm_type": "ada_norm",
        "final_dropout": True,
        "interleave_self_attention": True,
        "positional_embeddings": None,
    }
    described = {
        "select_layer": c.text_layers,
        "tune_top_llm_layers": 3,
        "max_state_dim": c.state_dim,
        "max_action_dim": c.action_dim,
        "action_horizon": 6,
        "hidden_size": c.mlp_hidden,
        "backbone_embedding_dim": c.text_hidden,
        "max_seq_len": c.positions,
        "max_num_embodiments": c.embodiments,
        "use_vlln": True,
        "noise_s": 0.99,
        "state_dropout_prob": 0.8,
    }
    return {**described, "diffusion_model_cfg": dit | changes.pop("dit", {})} | changes


def test_nvidias_config_sets_what_shapes_do_not_show(folder: Path) -> None:
    (folder / "loongforge.json").unlink()
    _write("config.json", json.dumps(nvidia()))(folder)
    c = tiny().config
    rest = {
        name: getattr(c, name)
        for name in type(c).model_fields
        if name.startswith(("vision", "text_", "image", "patch", "vocab", "position_grid"))
        and name != "text_layers"
    }
    loaded = from_pretrained(folder, **rest)
    assert loaded.config.state_dropout == 0.8
    assert (loaded.config.horizon, loaded.config.tuned_layers, loaded.config.time_scale) == (6, 3, 0.99)
    assert len(loaded.language.tuned) == 3
    with pytest.raises(WeightsError):  # what it does not say is 3b's
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", nvidia(noise_beta_beta=2.0), "noise_beta_beta is 2.0"),
        (
            "config.json",
            nvidia(dit={"interleave_self_attention": False}),
            "interleave_self_attention is False",
        ),
        ("config.json", nvidia(action_horizon="six"), "horizon"),
        ("config.json", [1], "no JSON object"),
        ("config.json", {"diffusion_model_cfg": [1]}, "diffusion_model_cfg is a list"),
        ("loongforge.json", {"version": 2, "model": "gr00t_n16_vla"}, "version 2, not"),
        ("loongforge.json", {"version": 1, "model": "gr00t_n16_vla"}, "has no config"),
        (
            "loongforge.json",
            {"version": 1, "model": "gr00t_n16_vla", "config": {"patch": 3}},
            "loongforge.json",
        ),
    ],
)
def test_a_description_of_another_model_is_refused(
    folder: Path, name: str, content: object, message: str
) -> None:
    (folder / "loongforge.json").unlink()
    _write(name, json.dumps(content))(folder)
    with pytest.raises(ConfigError, match=message):
        from_pretrained(folder)


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000])
def test_a_damaged_description_is_a_typed_error(folder: Path, content: bytes) -> None:
    _write("loongforge.json", content)(folder)
    with pytest.raises(ConfigError, match="cannot be read"):
        from_pretrained(folder)


def test_a_shard_size_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="shard_bytes=0"):
        save_pretrained(tiny(), tmp_path / "weights", shard_bytes=0)
