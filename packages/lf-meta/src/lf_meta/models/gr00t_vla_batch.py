"""Batches of ``gr00t_n16_vla`` on the host side: checked ones, and random ones for benchmarks and captures."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lf_meta.errors import DataError
from lf_meta.models.gr00t_vla_config import VLAConfig

Shape = tuple[int, ...]


def expected_shapes(config: VLAConfig, rows: int, tokens: int) -> dict[str, Shape]:
    """Shapes of every required key for ``rows`` rows of ``tokens`` ids (pixel_values as stored frames)."""
    c = config
    return {
        "pixel_values": (rows, c.cameras, c.image_size, c.image_size, 3),
        "input_ids": (rows, tokens),
        "lengths": (rows,),
        "state": (rows, 1, c.state_dim),
        "action": (rows, c.horizon, c.action_dim),
        "action_mask": (rows, c.horizon, c.action_dim),
        "embodiment_id": (rows,),
    }


def random_batch(
    config: VLAConfig,
    rows: int,
    text_tokens: int,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    real_state: int | None = None,
    real_action: int | None = None,
) -> dict[str, Tensor]:
    """A valid batch of noise: every row has its images first, then 1..text_tokens ids, then padding.

    Args:
        text_tokens: ids behind the image placeholders; input_ids is [rows, image_tokens + text_tokens].
        real_state, real_action: how many dimensions are not padding (None: all).
    """
    c, g = config, torch.Generator().manual_seed(seed)
    shapes = expected_shapes(c, rows, c.image_tokens + text_tokens)
    ids = torch.randint(0, c.vocab_size - 1, shapes["input_ids"], generator=g)
    ids += ids >= c.image_token  # any id but the placeholder
    ids[:, : c.image_tokens] = c.image_token
    state, action = (torch.randn(shapes[k], generator=g) for k in ("state", "action"))
    mask = torch.zeros(shapes["action_mask"], dtype=torch.bool)
    mask[..., :real_action] = True
    if real_state is not None:
        state[..., real_state:] = 0
    batch = {
        "pixel_values": torch.randint(0, 256, shapes["pixel_values"], generator=g, dtype=torch.uint8),
        "input_ids": ids,
        "lengths": c.image_tokens + torch.randint(1, text_tokens + 1, (rows,), generator=g),
        "state": state,
        "action": action.clamp(-1, 1) * mask,
        "action_mask": mask,
        "embodiment_id": torch.randint(0, c.embodiments, (rows,), generator=g),
    }
    return {key: value.to(device) for key, value in batch.items()}


def check_batch(config: VLAConfig, batch: Mapping[str, Tensor]) -> None:
    """Check everything that ``forward`` takes for granted. Reads values, so it waits for a device.

    Raises:
        DataError: naming every key that is missing, or has a wrong shape, dtype or value.
    """
    missing = sorted(expected_shapes(config, 1, 1).keys() - batch.keys())
    if missing:
        raise DataError(f"the batch lacks {', '.join(missing)}")
    strange = {k: type(v).__name__ for k, v in batch.items() if not isinstance(v, Tensor)}
    if needed := sorted(expected_shapes(config, 1, 1).keys() & strange.keys()):
        raise DataError(f"the batch holds no tensor in {', '.join(f'{k} ({strange[k]})' for k in needed)}")
    problems = _shape_problems(config, batch) or _value_problems(config, batch)
    if problems:
        raise DataError("the batch is not one of gr00t_n16_vla: " + "; ".join(problems))


def _shape_problems(c: VLAConfig, batch: Mapping[str, Tensor]) -> list[str]:
    ids = batch["input_ids"]
    if ids.dim() != 2 or not ids.numel():
        return [f"input_ids is {list(ids.shape)}, not [rows, tokens] with at least one of each"]
    wanted = expected_shapes(c, len(ids), ids.shape[-1])
    if batch["pixel_values"].is_floating_point():
        wanted["pixel_values"] = (len(ids), c.cameras, 3, c.image_size, c.image_size)
    kinds = {"input_ids": torch.int64, "lengths": torch.int64, "embodiment_id": torch.int64}
    kinds |= {"action_mask": torch.bool}
    found = []
    for key, shape in wanted.items():
        tensor = batch[key]
        if tuple(tensor.shape) != shape:
            found.append(f"{key} is {list(tensor.shape)}, not {list(shape)}")
        if tensor.dtype != kinds.get(key, tensor.dtype):
            found.append(f"{key} is {tensor.dtype}, not {kinds[key]}")
    found += [
        f"{k} is {batch[k].dtype}, not floating point"
        for k in ("state", "action")
        if not batch[k].is_floating_point()
    ]
    pixels = batch["pixel_values"]
    if pixels.dtype != torch.uint8 and not pixels.is_floating_point():
        found.append(
            f"pixel_values is {pixels.dtype}: stored frames are torch.uint8, normalised ones floating point"
        )
    if c.state_loss:
        found += _next_state_problems(c, batch)
    return found


def _next_state_problems(c: VLAConfig, batch: Mapping[str, Tensor]) -> list[str]:
    state, mask = batch.get("next_state"), batch.get("next_state_mask")
    if state is None or mask is None:
        return ["state_loss needs next_state and next_state_mask"]
    fits = state.dim() == 3 and len(state) == len(batch["state"]) and state.shape[2] == c.state_dim
    if not fits or not 1 <= state.shape[1] <= c.horizon or mask.shape != state.shape:
        return [
            f"next_state {list(state.shape)} or its mask {list(mask.shape)} does not fit horizon and state_dim"
        ]
    return []


def _value_problems(c: VLAConfig, batch: Mapping[str, Tensor]) -> list[str]:
    ids, lengths, who = batch["input_ids"], batch["lengths"], batch["embodiment_id"]
    real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    images = ((ids == c.image_token) & real).sum(1)
    checks = {
        f"ids outside 0..{c.vocab_size - 1}": (ids < 0) | (ids >= c.vocab_size),
        f"lengths outside 0..{ids.shape[1]}": (lengths < 0) | (lengths > ids.shape[1]),
        f"embodiments outside 0..{c.embodiments - 1}": (who < 0) | (who >= c.embodiments),
        f"rows without exactly {c.image_tokens} image placeholders": (images != c.image_tokens)
        & (lengths > 0),
        "values of pixels, state or action that are not finite": torch.stack(
            [(~torch.isfinite(batch[k])).sum() for k in ("pixel_values", "state", "action")]
        ).sum(),
    }
    return [f"{int(bad.sum())} {what}" for what, bad in checks.items() if bad.any()]
