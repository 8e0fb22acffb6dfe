"""Which card and software a measurement belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


@dataclass(frozen=True)
class Card:
    """Measurements of another card, driver or Triton are not taken over.

    Attributes:
        name: as the driver calls it, such as ``NVIDIA H200``; ``cpu`` for Triton's interpreter.
        driver: version of its driver, "" where there is none.
        triton: version of Triton, "" without it.
    """

    name: str
    driver: str
    triton: str

    @property
    def file_name(self) -> str:
        """Of its table."""
        parts = [self.name, self.driver, f"triton {self.triton}"]
        return "-".join(slug(p) for p in parts if p) + ".json"


def slug(text: str) -> str:
    """A part of a file name: ``NVIDIA H200`` gives ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9.]+", "_", text.lower()).strip("_.") or "unknown"


def card_of(device: torch.device) -> Card:
    """The card behind a device."""
    if device.type != "cuda":
        return Card(device.type, "", _triton())
    return Card(torch.cuda.get_device_name(device), _driver(), _triton())


def current_device() -> torch.device:
    """The current CUDA device, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _driver() -> str:
    """The kernel module's version; where that cannot be read, the CUDA version that torch was built for."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return f"cuda {torch.version.cuda}"
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", first)
    return found.group() if found else slug(first)
