"""Dimensions of ``gr00t_n16_vla`` and its named sizes.

The numbers of size 3b are those of NVIDIA's GR00T N1.6 3B: Isaac-GR00T ``gr00t/configs/model/gr00t_n1d6.py`` (head)
and ``gr00t/model/modules/nvidia/Eagle-Block2A-2B-v2/config.json`` (backbone, from the forks that keep it). State,
action and horizon are those of the published weights (128, 128, 50), not the smaller defaults of that class.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from lf_meta.config import Section
from lf_meta.models.gr00t_lm import Dimension, Layers

Count = Annotated[int, Field(ge=0, strict=True)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class VLAConfig(Section):
    """One model; every field can be overridden by ``model.args``."""

    vocab_size: Dimension
    image_token: Count = Field(description="placeholder id: the k-th one of a row becomes image token k")
    # vision tower (SigLIP2) and connector
    cameras: Dimension = Field(2, description="images per sample")
    image_size: Dimension
    patch: Dimension
    position_grid: Dimension = Field(
        description="side of the table of patch positions; resized if an image has another number of patches"
    )
    vision_hidden: Dimension
    vision_layers: Layers
    vision_heads: Dimension
    vision_ffn: Dimension
    vision_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-6
    # language model (Qwen3)
    text_hidden: Dimension
    text_layers: Layers
    tuned_layers: Layers = Field(description="top language layers that are trained")
    text_heads: Dimension
    text_kv_heads: Dimension
    text_head_dim: Dimension
    text_ffn: Dimension
    rope_base: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e6
    text_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-6
    # action head (AlternateVLDiT)
    dit_layers: Layers
    dit_heads: Dimension
    dit_head_dim: Dimension
    dit_output: Dimension
    text_every: Dimension = Field(2, description="every how many cross-attending blocks see text, not images")
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    mlp_hidden: Dimension = Field(description="hidden width of the state encoder and the action decoder")
    embodiments: Dimension
    state_dim: Dimension
    action_dim: Dimension
    horizon: Dimension = Field(description="actions predicted at once")
    positions: Dimension = 1024
    table_std: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        0.02, description="initial std of embodiment tables"
    )
    # state augmentation, in training only
    state_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of samples whose state is replaced by a learned token; 0 has no such token"
    )
    state_noise: Weight = Field(0.0, description="std of Gaussian noise added to the encoded state")
    # flow matching
    time_alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.5
    time_scale: Annotated[float, Field(gt=0, lt=1)] = 0.999
    time_buckets: Dimension = 1000
    denoise_steps: Dimension = 4
    # optional heads; weight 0 leaves the head out
    state_loss: Weight = Field(0.0, description="weight of the world model's next-state loss")
    binned_loss: Weight = Field(0.0, description="weight of the discrete action head's cross entropy")
    extra_hidden: Dimension = Field(256, description="width of the optional heads")
    action_bins: Annotated[int, Field(ge=2, le=2**20, strict=True)] = 256

    @field_validator("image_token")
    @classmethod
    def _is_in_the_vocabulary(cls, token: int, info: ValidationInfo) -> int:
        if token >= info.data.get("vocab_size", token + 1):
            raise ValueError(f"image_token {token} is not below vocab_size {info.data['vocab_size']}")
        return token

    @field_validator("patch")
    @classmethod
    def _patches_pair_up(cls, patch: int, info: ValidationInfo) -> int:
        size = info.data.get("image_size", 2 * patch)
        if size % (2 * patch):
            raise ValueError(f"image_size {size} is not an even number of patches of {patch}")
        return patch

    @field_validator("vision_heads")
    @classmethod
    def _heads_divide_the_width(cls, heads: int, info: ValidationInfo) -> int:
        hidden = info.data.get("vision_hidden", heads)
        if hidden % heads:
            raise ValueError(f"vision_hidden {hidden} is not a multiple of {heads} heads")
        return heads

    @field_validator("tuned_layers")
    @classmethod
    def _leaves_frozen_layers(cls, tuned: int, info: ValidationInfo) -> int:
        layers = info.data.get("text_layers", tuned + 1)
        if tuned >= layers:
            raise ValueError(f"tuned_layers {tuned} must be below text_layers {layers}")
        return tuned

    @field_validator("text_kv_heads")
    @classmethod
    def _groups_are_whole(cls, kv_heads: int, info: ValidationInfo) -> int:
        heads = info.data.get("text_heads", kv_heads)
        if heads % kv_heads:
            raise ValueError(f"text_heads {heads} is not a multiple of {kv_heads} key-value heads")
        return kv_heads

    @field_validator("text_head_dim", "dit_head_dim")
    @classmethod
    def _width_is_even(cls, width: int) -> int:
        if width % 2:
            raise ValueError(f"a head needs an even width, not {width}")
        return width

    @field_validator("positions")
    @classmethod
    def _positions_cover_the_horizon(cls, positions: int, info: ValidationInfo) -> int:
        if positions < info.data.get("horizon", 0):
            raise ValueError(f"positions {positions} is below horizon {info.data['horizon']}")
        return positions

    @property
    def grid(self) -> int:
        """Patches along one side of an image."""
        return self.image_size // self.patch

    @property
    def tokens_per_image(self) -> int:
        """Tokens an image becomes: one for every 2 x 2 patches."""
        return (self.grid // 2) ** 2

    @property
    def image_tokens(self) -> int:
        """Image tokens of one sample, all cameras."""
        return self.cameras * self.tokens_per_image

    @property
    def dit_hidden(self) -> int:
        """Width of the action head."""
        return self.dit_heads * self.dit_head_dim


SIZES: dict[str, dict[str, int | float]] = {
    "tiny": {
        "vocab_size": 320,
        "image_token": 256,  # the first id behind the bytes
        "image_size": 32,
        "patch": 8,
        "position_grid": 4,
        "vision_hidden": 48,
        "vision_layers": 2,
        "vision_heads": 3,
        "vision_ffn": 96,
        "text_hidden": 64,
        "text_layers": 4,
        "tuned_layers": 2,
        "text_heads": 4,
        "text_kv_heads": 2,
        "text_head_dim": 16,
        "text_ffn": 128,
        "dit_layers": 8,
        "dit_heads": 4,
        "dit_head_dim": 16,
        "dit_output": 48,
        "mlp_hidden": 48,
        "embodiments": 4,
        "state_dim": 8,
        "action_dim": 8,
        "horizon": 8,
        "positions": 16,
        "table_std": 0.2,
        "extra_hidden": 32,
        "action_bins": 16,
    },
    "3b": {
        "vocab_size": 151_680,
        "image_token": 151_669,
        "image_size": 224,
        "patch": 14,
        "position_grid": 16,
        "vision_hidden": 1152,
        "vision_layers": 27,
        "vision_heads": 16,
        "vision_ffn": 4304,
        "text_hidden": 2048,
        "text_layers": 16,
        "tuned_layers": 4,
        "text_heads": 16,
        "text_kv_heads": 8,
        "text_head_dim": 128,
        "text_ffn": 6144,
        "dit_layers": 32,
        "dit_heads": 32,
        "dit_head_dim": 48,
        "dit_output": 1024,
        "mlp_hidden": 1024,
        "embodiments": 32,
        "state_dim": 128,
        "action_dim": 128,
        "horizon": 50,
    },
}
