"""GR00T N1.6's loss written down slowly: one row at a time, without padding, from tensors by their published names.

Shares no code with lf_meta: attention is a softmax over an explicit matrix, images are cut by loops, and each token
is put where it belongs. Float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
VIT = "backbone.model.vision_model.vision_model."
LLM = "backbone.model.language_model.model."
DIT = "action_head.model."


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def layer_norm(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def named_norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return layer_norm(x, eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def rms_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool = False) -> Tensor:
    """q [T, heads * d], k and v [S, kv_heads * d]; every group of heads / kv_heads heads shares one of k and v."""
    d = q.shape[1] // heads
    group = heads // (k.shape[1] // d)
    out = []
    for h in range(heads):
        mine, shared = slice(h * d, h * d + d), slice(h // group * d, h // group * d + d)
        scores = q[:, mine] @ k[:, shared].T / math.sqrt(d)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        out.append(scores.softmax(-1) @ v[:, shared])
    return torch.cat(out, dim=1)


def see(w: Weights, c: Any, image: Tensor) -> Tensor:
    """One uint8 image [size, size, 3] to tokens [n, text_hidden]."""
    pixels, p, g = (image.double() / 255 - 0.5) / 0.5, c.patch, c.grid
    patches = [pixels[i * p : i * p + p, j * p : j * p + p].reshape(-1) for i in range(g) for j in range(g)]
    x = linear(w, f"{VIT}embeddings.patch_embedding", torch.stack(patches))
    x = x + w[f"{VIT}embeddings.position_embedding.weight"]
    for i in range(c.vision_layers):
        at = f"{VIT}encoder.layers.{i}."
        h = named_norm(w, f"{at}layer_norm1", x, 1e-6)
        q, k, v = (linear(w, f"{at}self_attn.{n}_proj", h) for n in "qkv")
        x = x + linear(w, f"{at}self_attn.out_proj", attend(q, k, v, c.vision_heads))
        h = named_norm(w, f"{at}layer_norm2", x, 1e-6)
        x = x + linear(w, f"{at}mlp.fc2", gelu_tanh(linear(w, f"{at}mlp.fc1", h)))
    x = named_norm(w, f"{VIT}post_layernorm", x, 1e-6)
    plane = x.T.reshape(1, -1, g, g)
    squares = torch.nn.functional.pixel_unshuffle(plane, 2)[0].flatten(1).T
    h = linear(w, "backbone.model.mlp1.1", named_norm(w, "backbone.model.mlp1.0", squares, 1e-5))
    return linear(w, "backbone.model.mlp1.3", 0.5 * h * (1 + torch.erf(h / math.sqrt(2))))


def turn(x: Tensor, heads: int, base: float) -> Tensor:
    """Rotary positions 0, 1, ... on [T, heads * d], pairs (i, i + d / 2); angles are float32, as the model's are."""
    d = x.shape[1] // heads
    angle = torch.outer(torch.arange(len(x)).float(), base ** (-torch.arange(0, d, 2).float() / d))
    cos, sin = angle.cos().double(), angle.sin().double()
    parts = []
    for h in range(heads):
        a, b = x[:, h * d : h * d + d].chunk(2, dim=1)
        parts += [a * cos - b * sin, b * cos + a * sin]
    return torch.cat(parts, dim=1)


def read(w: Weights, c: Any, x: Tensor) -> Tensor:
    """Embedded tokens [T, hidden] through the language layers and the norm behind them."""

    def normed_heads(name: str, y: Tensor, heads: int) -> Tensor:
        return rms_norm(w, name, y.view(len(y), heads, -1)).flatten(1)

    for i in range(c.text_layers):
        at = f"{LLM}layers.{i}."
        h = rms_norm(w, f"{at}input_layernorm", x)
        q, k, v = (linear(w, f"{at}self_attn.{n}_proj", h) for n in "qkv")
        q = turn(normed_heads(f"{at}self_attn.q_norm", q, c.text_heads), c.text_heads, c.rope_base)
        k = turn(normed_heads(f"{at}self_attn.k_norm", k, c.text_kv_heads), c.text_kv_heads, c.rope_base)
        x = x + linear(w, f"{at}self_attn.o_proj", attend(q, k, v, c.text_heads, causal=True))
        h = rms_norm(w, f"{at}post_attention_layernorm", x)
        gated = silu(linear(w, f"{at}mlp.gate_proj", h)) * linear(w, f"{at}mlp.up_proj", h)
        x = x + linear(w, f"{at}mlp.down_proj", gated)
    return rms_norm(w, f"{LLM}norm", x)


def table(w: Weights, name: str, x: Tensor, who: int) -> Tensor:
    return x @ w[f"{name}.W"][who] + w[f"{name}.b"][who]


def waves(time: int, count: int, last: int) -> tuple[Tensor, Tensor]:
    """sin and cos of time at ``count`` frequencies 10000 ** (-i / last)."""
    angle = time * torch.exp(-math.log(10_000) * torch.arange(count).float() / last)
    return angle.sin().double(), angle.cos().double()


def denoise(w: Weights, c: Any, x: Tensor, bucket: int, text: Tensor, image: Tensor) -> Tensor:
    sin, cos = waves(bucket, 128, 127)
    embedder = f"{DIT}timestep_encoder.timestep_embedder."
    time = linear(w, f"{embedder}linear_2", silu(linear(w, f"{embedder}linear_1", torch.cat((cos, sin)))))
    for i in range(c.dit_layers):
        at = f"{DIT}transformer_blocks.{i}."
        scale, shift = linear(w, f"{at}norm1.linear", silu(time)).chunk(2)
        h = layer_norm(x, 1e-5) * (1 + scale) + shift
        seen = h if i % 2 else text if i % 4 == 0 else image
        q, k, v = (linear(w, f"{at}attn1.to_{n}", y) for n, y in (("q", h), ("k", seen), ("v", seen)))
        x = x + linear(w, f"{at}attn1.to_out.0", attend(q, k, v, c.dit_heads))
        inner = gelu_tanh(linear(w, f"{at}ff.net.0.proj", layer_norm(x, 1e-5)))
        x = x + linear(w, f"{at}ff.net.2", inner)
    shift, scale = linear(w, f"{DIT}proj_out_1", silu(time)).chunk(2)
    return linear(w, f"{DIT}proj_out_2", layer_norm(x, 1e-6) * (1 + scale) + shift)


def context_of(w: Weights, c: Any, row: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(context [T, hidden], bool [T] of the image tokens) of one row, only its real tokens."""
    ids = row["input_ids"][: int(row["lengths"])]
    tokens = iter(torch.cat([see(w, c, image) for image in row["pixel_values"]]))
    x = torch.stack([next(tokens) if i == c.image_token else w[f"{LLM}embed_tokens.weight"][i] for i in ids])
    return named_norm(w, "action_head.vlln", read(w, c, x), 1e-5), ids == c.image_token


def row_loss(
    w: Weights, c: Any, row: Mapping[str, Tensor], noise: Tensor, time: Tensor
) -> tuple[Tensor, int]:
    """Summed squared error of the velocity over the real entries of one row, and their number."""
    context, is_image = context_of(w, c, row)
    who, action, t = int(row["embodiment_id"]), row["action"].double(), float(time)
    bucket = int(time * c.time_buckets)
    state = table(w, "action_head.state_encoder.layer1", row["state"].double(), who).clamp(min=0)
    state = table(w, "action_head.state_encoder.layer2", state, who)
    x = table(w, "action_head.action_encoder.W1", (1 - t) * noise.double() + t * action, who)
    half = x.shape[1] // 2
    both = torch.cat((x, torch.cat(waves(bucket, half, half)).expand_as(x)), dim=1)
    x = silu(table(w, "action_head.action_encoder.W2", both, who))
    x = table(w, "action_head.action_encoder.W3", x, who)
    x = torch.cat((state, x + w["action_head.position_embedding.weight"][: len(x)]))
    x = denoise(w, c, x, bucket, context[~is_image], context[is_image])[1:]
    x = table(w, "action_head.action_decoder.layer1", x, who).clamp(min=0)
    velocity = table(w, "action_head.action_decoder.layer2", x, who)
    error = (velocity - (action - noise.double())) ** 2
    return error[row["action_mask"]].sum(), int(row["action_mask"].sum())
