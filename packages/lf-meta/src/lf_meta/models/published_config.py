"""The dimensions that a folder of weights describes itself: our ``loongforge.json``, or NVIDIA's ``config.json``.

Shapes do not show everything (the action horizon, how times are drawn, which blocks see text), so a fine-tuned
checkpoint is only used right with its description.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lf_meta.config_load import first_problem
from lf_meta.errors import ConfigError
from lf_meta.models.gr00t_vla import config_for
from lf_meta.models.gr00t_vla_config import VLAConfig

OWN_CONFIG, NVIDIA_CONFIG, MODEL = "loongforge.json", "config.json", "gr00t_n16_vla"
VERSION = 1

# Isaac-GR00T gr00t/configs/model/gr00t_n1d6.py -> ours
_FIELDS = {
    "select_layer": "text_layers",
    "tune_top_llm_layers": "tuned_layers",
    "backbone_embedding_dim": "text_hidden",
    "max_state_dim": "state_dim",
    "max_action_dim": "action_dim",
    "action_horizon": "horizon",
    "hidden_size": "mlp_hidden",
    "max_seq_len": "positions",
    "attend_text_every_n_blocks": "text_every",
    "max_num_embodiments": "embodiments",
    "num_inference_timesteps": "denoise_steps",
    "state_dropout_prob": "state_dropout",
    "state_additive_noise_scale": "state_noise",
    "noise_beta_alpha": "time_alpha",
    "noise_s": "time_scale",
    "num_timestep_buckets": "time_buckets",
}
_DIT_FIELDS = {
    "num_layers": "dit_layers",
    "num_attention_heads": "dit_heads",
    "attention_head_dim": "dit_head_dim",
    "output_dim": "dit_output",
    "dropout": "dropout",
}
# what we build is fixed in these; another value is another model
_FIXED = {
    "use_alternate_vl_dit": True,
    "use_vlln": True,
    "add_pos_embed": True,
    "noise_beta_beta": 1.0,
}
_DIT_FIXED = {"norm_type": "ada_norm", "final_dropout": True, "interleave_self_attention": True}


def read_config(folder: Path, args: Mapping[str, int | float | bool | str]) -> VLAConfig:
    """What the folder describes (size 3b if it says nothing), with single dimensions replaced by ``args``.

    Raises:
        ConfigError: a description is damaged, or of another model.
    """
    if (folder / OWN_CONFIG).exists():
        return _own(folder / OWN_CONFIG, args)
    described = _from_nvidia(folder / NVIDIA_CONFIG) if (folder / NVIDIA_CONFIG).exists() else {}
    return config_for("3b", None, {**described, **args})


def write_config(config: VLAConfig, path: Path) -> None:
    """Write ``loongforge.json``."""
    content = {"version": VERSION, "model": MODEL, "config": config.model_dump(mode="json")}
    path.write_text(json.dumps(content, indent=1))


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(str(path), f"cannot be read: {e}") from e
    if not isinstance(content, dict):
        raise ConfigError(str(path), "is no JSON object")
    return content


def _own(path: Path, args: Mapping[str, int | float | bool | str]) -> VLAConfig:
    content = _load(path)
    if (content.get("model"), content.get("version")) != (MODEL, VERSION):
        raise ConfigError(
            str(path),
            f"describes {content.get('model')!r} version {content.get('version')!r}, not {MODEL} version {VERSION}",
        )
    config = content.get("config")
    if not isinstance(config, dict):
        raise ConfigError(str(path), "has no config")
    try:
        return VLAConfig.model_validate({**config, **args})
    except ValidationError as e:
        raise first_problem(e, f"{path}: ") from None


def _from_nvidia(path: Path) -> dict[str, Any]:
    content = _load(path)
    dit = content.get("diffusion_model_cfg") or {}
    if not isinstance(dit, dict):
        raise ConfigError(str(path), f"diffusion_model_cfg is a {type(dit).__name__}, not a JSON object")
    for given, fixed in ((content, _FIXED), (dit, _DIT_FIXED)):
        for key, value in fixed.items():
            if given.get(key, value) != value:
                raise ConfigError(str(path), f"{key} is {given[key]!r}; gr00t_n16_vla is built for {value!r}")
    described = {ours: content[theirs] for theirs, ours in _FIELDS.items() if theirs in content}
    return described | {ours: dit[theirs] for theirs, ours in _DIT_FIELDS.items() if theirs in dit}
