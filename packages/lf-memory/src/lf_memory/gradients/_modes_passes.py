"""What a forward changes besides gradients, kept so that it can run again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Snapshot:
    """Generator states (host, then by device) and copies of buffers."""

    host: Tensor
    devices: dict[torch.device, Tensor]
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]]


class Passes:
    """Saves and restores default generators and a model's buffers; running statistics are to move once a step.

    Args:
        model: its buffers are copied at each `save`.
        devices: those whose generators are saved besides the host's.
    """

    def __init__(self, model: nn.Module, devices: Iterable[torch.device]) -> None:
        self._model = model
        self._devices = sorted({d for d in devices if d.type not in ("cpu", "meta")}, key=str)

    def save(self) -> Snapshot:
        """The state now."""
        with torch.no_grad():
            buffers = [
                (module, name, buffer, buffer.clone())
                for module in self._model.modules()
                for name, buffer in module.named_buffers(recurse=False)
            ]
        devices = {d: _device_module(d).get_rng_state(d) for d in self._devices}
        return Snapshot(torch.get_rng_state(), devices, buffers)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to `snapshot`."""
        torch.set_rng_state(snapshot.host)
        for device, state in snapshot.devices.items():
            _device_module(device).set_rng_state(state, device)
        with torch.no_grad():
            for module, name, buffer, value in snapshot.buffers:
                setattr(module, name, buffer)  # a forward may assign another tensor
                buffer.copy_(value)


def _device_module(device: torch.device) -> Any:
    return torch.get_device_module(device)
