"""Robot samples of lf-format, as LoongDataLoader delivers them, to batches of ``gr00t_n16_vla``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lf_meta.errors import DataError
from lf_meta.models.gr00t_vla_config import VLAConfig

STATE_STATS, ACTION_STATS = "observation.state", "action"


class Samples(Protocol):
    """What is read of a ``lf_iouring.SampleBatch``: fields by name, text lengths and record ids of its rows."""

    @property
    def lengths(self) -> Tensor: ...

    @property
    def ids(self) -> Tensor: ...

    def __getitem__(self, name: str) -> Any: ...


class Scale(nn.Module):
    """Linear map of low..high to -1..1 per dimension; a dimension that never changes becomes 0."""

    def __init__(self, low: Sequence[float] | Tensor, high: Sequence[float] | Tensor) -> None:
        super().__init__()
        self.low: Tensor
        self.high: Tensor
        self.register_buffer("low", torch.as_tensor(low, dtype=torch.float32))
        self.register_buffer("high", torch.as_tensor(high, dtype=torch.float32))

    @classmethod
    def of_stats(cls, meta: Mapping[str, Any], name: str) -> Scale:
        """From the minimum and maximum that the data set states for a feature.

        Raises:
            DataError: it states none.
        """
        stats = meta.get("stats", {}).get(name, {})
        if "min" not in stats or "max" not in stats:
            raise DataError(
                f"meta/stats of the data set has no min and max of {name!r}; pass a Scale of your own"
            )
        return cls(stats["min"], stats["max"])

    def forward(self, values: Tensor) -> Tensor:
        """[..., n] in the data's unit to -1..1."""
        half, middle = (self.high - self.low) / 2, (self.high + self.low) / 2
        return torch.where(half > 0, (values - middle) / half.clamp(min=1e-30), 0.0)

    def inverse(self, values: Tensor) -> Tensor:
        """[..., n] in -1..1 to the data's unit."""
        return values * ((self.high - self.low) / 2) + (self.high + self.low) / 2


class RobotInputs(nn.Module):
    """Turns samples of ``lf_format.preprocess_robot`` (with a tokenizer) into batches of fixed shapes.

    A row's ids are the placeholders of all cameras, then the ids of its task, then padding. Numbers are scaled and
    padded with zeros to the model's dimensions. Works on the device of the samples, reads no value back, and so may
    be part of a captured graph.

    Samples loaded with ``deltas={"state": [0, 1, ..., K]}`` also give next_state: a state after the last action of an
    episode does not exist, and is masked.
    """

    def __init__(
        self,
        config: VLAConfig,
        meta: Mapping[str, Any],
        text_length: int,
        *,
        embodiment: int = 0,
        cameras: Sequence[str] | None = None,
        state_scale: Scale | None = None,
        action_scale: Scale | None = None,
    ) -> None:
        """Args:
            meta: ``Reader.meta`` or ``Dataset.meta``.
            text_length: width of the task's ids, at least the data set's largest bucket edge.
            embodiment: which of the model's embodiments this robot is.
            cameras: fields that are images, in the model's order; None: all that the data set has.
            state_scale, action_scale: None takes them from the data set's statistics.

        Raises:
            DataError: cameras or horizon do not fit the model, or scales are not known: statistics are of absolute
                actions, so relative ones need an ``action_scale``.
        """
        super().__init__()
        self.config, self.text_length, self.embodiment = config, text_length, embodiment
        self.cameras = tuple(cameras or meta["cameras"])
        if len(self.cameras) != config.cameras:
            raise DataError(
                f"the model takes {config.cameras} cameras, and these are {', '.join(self.cameras)}"
            )
        if meta["action_horizon"] != config.horizon:
            raise DataError(
                f"actions are {meta['action_horizon']} steps, and the model predicts {config.horizon}"
            )
        if action_scale is None and meta.get("relative_actions"):
            raise DataError(
                "the data set's statistics are of absolute actions; give relative ones an action_scale"
            )
        self.state_scale = state_scale or Scale.of_stats(meta, STATE_STATS)
        self.action_scale = action_scale or Scale.of_stats(meta, ACTION_STATS)
        for what, scale, room in (
            ("state", self.state_scale, config.state_dim),
            ("action", self.action_scale, config.action_dim),
        ):
            if len(scale.low) > room:
                raise DataError(f"{what} has {len(scale.low)} dimensions, and the model {room}")

    def forward(self, samples: Samples) -> dict[str, Tensor]:
        """A batch as ``lf_meta.models.gr00t_vla`` describes it.

        Raises:
            DataError: ids that are wider than ``text_length``.
        """
        is_real = samples.ids >= 0
        states = self.state_scale(samples["state"])
        states = _pad(states if states.dim() == 3 else states[:, None], self.config.state_dim)
        action, steps = self.action_scale(samples["action"]), samples["action_mask"] & is_real[:, None]
        known = torch.arange(self.config.action_dim, device=action.device) < action.shape[-1]
        mask = steps[..., None] & known
        batch = {
            "pixel_values": torch.stack([samples[camera] for camera in self.cameras], dim=1),
            "input_ids": self._ids(samples["tokens"]),
            "lengths": torch.where(is_real, samples.lengths + self.config.image_tokens, 0),
            "state": states[:, :1],
            "action": _pad(action, self.config.action_dim) * mask,
            "action_mask": mask,
            "embodiment_id": torch.full_like(samples.ids, self.embodiment),
        }
        return batch | self._next_states(states, steps, samples["state"].shape[-1])

    def _ids(self, tokens: Tensor) -> Tensor:
        rows, longest = tokens.shape
        if longest > self.text_length:
            raise DataError(f"ids of tasks are padded to {longest}, and text_length is {self.text_length}")
        images = tokens.new_full((rows, self.config.image_tokens), self.config.image_token, dtype=torch.int64)
        return torch.cat((images, _pad(tokens.long(), self.text_length)), dim=1)

    def _next_states(self, states: Tensor, steps: Tensor, dimensions: int) -> dict[str, Tensor]:
        later = states[:, 1:]
        if not later.shape[1]:
            return {}
        # the state after action k is the frame of action k + 1, which is real where that action is
        exists = _pad(steps[:, 1 : later.shape[1] + 1], later.shape[1])
        known = torch.arange(self.config.state_dim, device=states.device) < dimensions
        return {"next_state": later, "next_state_mask": exists[..., None] & known}


def _pad(values: Tensor, width: int) -> Tensor:
    return nn.functional.pad(values, (0, width - values.shape[-1]))
