"""Key names of the published GR00T N1.6 weights, and which parameter of ``gr00t_n16_vla`` each of them fills.

Where the names and the wiring behind them come from (public sources, read 2026-11-30):

    backbone.model.vision_model.vision_model.*   Isaac-GR00T modules/nvidia/Eagle-Block2A-2B-v2/modeling_siglip2.py
    backbone.model.mlp1.*                        the same folder's modeling_eagle3_vl.py
    backbone.model.language_model.model.*        transformers models/qwen3 (Qwen3ForCausalLM inside Eagle3-VL)
    action_head.model.*                          Isaac-GR00T model/modules/dit.py, and diffusers' Attention,
                                                 FeedForward and TimestepEmbedding for the leaves
    action_head.{state,action}_encoder.*, action_head.action_decoder.*
                                                 Isaac-GR00T model/modules/embodiment_conditioned_mlp.py
    action_head.{vlln,position_embedding}.*, action_head.mask_token
                                                 Isaac-GR00T model/gr00t_n1d6/gr00t_n1d6.py

Number of keys (1106) and millions of parameters per group equal a public key dump of nvidia/GR00T-N1.6-3B; a public
converter of those weights asserts that patch_embedding.weight is [1152, 588], a linear layer. Checked once, on
2026-11-30: with these names transformer, state encoder and action encoder load strictly into the copies that the
lerobot 0.4.4 wheel carries (GR00T N1.5: no masks), and give the same float64 outputs (differences 0, 2e-16, 1e-15).
Tests hold the language layers, the vision tower and the blocks to transformers and diffusers. Not verifiable, as the
weights themselves were out of reach: that a whole forward pass with them gives NVIDIA's outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lf_meta.models.gr00t_vla import GR00TVLA
from lf_meta.models.gr00t_vla_config import VLAConfig
from lf_meta.models.gr00t_vla_head import EmbodimentLinear

VISION = "backbone.model.vision_model.vision_model."
LANGUAGE = "backbone.model.language_model."
MASK_TOKEN = "action_head.mask_token"  # only in checkpoints that were trained with state dropout
OPTIONAL = (
    "world_model.",
    "binned_actions.",
    MASK_TOKEN,
)  # the first two are ours alone, named alike in and out


def _module_names(c: VLAConfig) -> dict[str, tuple[str, ...]]:
    """Our module -> the published modules whose weights it holds, one above the other."""
    names: dict[str, tuple[str, ...]] = {
        "vision.patches": (f"{VISION}embeddings.patch_embedding",),
        "vision.position": (f"{VISION}embeddings.position_embedding",),
        "vision.norm": (f"{VISION}post_layernorm",),
        "connector.norm": ("backbone.model.mlp1.0",),
        "connector.up": ("backbone.model.mlp1.1",),
        "connector.down": ("backbone.model.mlp1.3",),
        "language.embed": (f"{LANGUAGE}model.embed_tokens",),
        "language.norm": (f"{LANGUAGE}model.norm",),
        "context_norm": ("action_head.vlln",),
        "position": ("action_head.position_embedding",),
        "action_encoder.embed": ("action_head.action_encoder.W1",),
        "action_encoder.mix": ("action_head.action_encoder.W2",),
        "action_encoder.out": ("action_head.action_encoder.W3",),
        "dit.time.up": ("action_head.model.timestep_encoder.timestep_embedder.linear_1",),
        "dit.time.out": ("action_head.model.timestep_encoder.timestep_embedder.linear_2",),
        "dit.modulation": ("action_head.model.proj_out_1",),
        "dit.out": ("action_head.model.proj_out_2",),
    }
    for coder in ("state_encoder", "action_decoder"):
        names |= {f"{coder}.{layer}": (f"action_head.{coder}.{layer}",) for layer in ("layer1", "layer2")}
    for i in range(c.vision_layers):
        names |= _placed(f"vision.blocks.{i}.", f"{VISION}encoder.layers.{i}.", _VISION_BLOCK)
    frozen = c.text_layers - c.tuned_layers
    for i in range(c.text_layers):
        ours = f"language.frozen.{i}." if i < frozen else f"language.tuned.{i - frozen}."
        names |= _placed(ours, f"{LANGUAGE}model.layers.{i}.", _TEXT_BLOCK)
    for i in range(c.dit_layers):
        block = _DIT_BLOCK | (_SELF_ATTENTION if i % 2 else _CROSS_ATTENTION)
        names |= _placed(f"dit.blocks.{i}.", f"action_head.model.transformer_blocks.{i}.", block)
    return names


_VISION_BLOCK = {
    "attention_norm": ("layer_norm1",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.out_proj",),
    "ffn_norm": ("layer_norm2",),
    "up": ("mlp.fc1",),
    "down": ("mlp.fc2",),
}
_TEXT_BLOCK = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "out": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_DIT_BLOCK = {
    "modulation": ("norm1.linear",),
    "attention.out": ("attn1.to_out.0",),
    "up": ("ff.net.0.proj",),
    "down": ("ff.net.2",),
}
_SELF_ATTENTION = {"attention.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v")}
_CROSS_ATTENTION = {"attention.query": ("attn1.to_q",), "attention.key_value": ("attn1.to_k", "attn1.to_v")}


def _placed(ours: str, published: str, names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {ours + name: tuple(published + n for n in theirs) for name, theirs in names.items()}


def published_names(model: GR00TVLA) -> dict[str, tuple[str, ...]]:
    """Our parameter -> the published keys that, one above the other, are it. The model may be on the meta device."""
    modules = _module_names(model.config)
    names: dict[str, tuple[str, ...]] = {}
    for parameter, _ in model.named_parameters():
        if parameter == "mask_token":
            names[parameter] = (MASK_TOKEN,)
            continue
        if parameter.startswith(OPTIONAL):
            names[parameter] = (parameter,)
            continue
        module, _, leaf = parameter.rpartition(".")
        if isinstance(model.get_submodule(module), EmbodimentLinear):
            leaf = {"weight": "W", "bias": "b"}[leaf]
        names[parameter] = tuple(f"{theirs}.{leaf}" for theirs in modules[module])
    return names


def unused_shapes(c: VLAConfig) -> dict[str, tuple[int, ...]]:
    """Published tensors that no forward pass uses, and their shapes."""
    d, head = c.vision_hidden, f"{VISION}head."
    return {
        f"{LANGUAGE}lm_head.weight": (c.vocab_size, c.text_hidden),
        f"{head}probe": (1, 1, d),
        f"{head}attention.in_proj_weight": (3 * d, d),
        f"{head}attention.in_proj_bias": (3 * d,),
        f"{head}attention.out_proj.weight": (d, d),
        f"{head}attention.out_proj.bias": (d,),
        f"{head}layernorm.weight": (d,),
        f"{head}layernorm.bias": (d,),
        f"{head}mlp.fc1.weight": (c.vision_ffn, d),
        f"{head}mlp.fc1.bias": (c.vision_ffn,),
        f"{head}mlp.fc2.weight": (d, c.vision_ffn),
        f"{head}mlp.fc2.bias": (d,),
    }


@dataclass(frozen=True)
class Slot:
    """Rows ``start`` to ``start + shape[0]`` of our ``parameter``, which one published key fills."""

    parameter: str
    start: int
    shape: tuple[int, ...]

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The view of the parameter that the key fills."""
        return parameters[self.parameter].detach()[self.start : self.start + self.shape[0]]


def slots(model: GR00TVLA) -> dict[str, Slot]:
    """Published key -> where it goes, for every parameter of the model."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found: dict[str, Slot] = {}
    for parameter, keys in published_names(model).items():
        start = 0
        for key, rows in zip(keys, _rows_of_parts(model.config, parameter, keys, shapes), strict=True):
            found[key] = Slot(parameter, start, (rows, *shapes[parameter][1:]))
            start += rows
    return found


def _rows_of_parts(
    c: VLAConfig, parameter: str, keys: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    if (
        parameter.startswith("language.") and ".qkv." in parameter
    ):  # grouped queries: q is larger than k and v
        return c.text_heads * c.text_head_dim, *[c.text_kv_heads * c.text_head_dim] * 2
    return (shapes[parameter][0] // len(keys),) * len(keys)
