"""Which implementation of an operator runs: Triton on a GPU, the plain twin elsewhere, or what the caller says."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from typing import Literal

import torch

from lf_graph._errors import GraphError

Implementation = Literal["auto", "triton", "plain"]

_CHOICES: Counter[tuple[str, str, str]] = Counter()


class KernelUnavailableError(GraphError):
    """The Triton implementation of an operator was asked for and cannot run here; the message says why."""


# Constants, not cached functions: torch.compile traces through a cache and warns its user of it.
_INSTALLED = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "off")


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors (``TRITON_INTERPRET=1`` before import)."""
    return _INTERPRETED


def _obstacle(device: torch.device) -> str | None:
    """Why Triton cannot run on this device; None if it can."""
    if not _INSTALLED:
        return "triton is not installed: pip install lf-graph[triton]"
    if device.type == "cpu" and not interpreted():
        return "its tensors are on the CPU, where Triton runs only with TRITON_INTERPRET=1"
    if device.type not in ("cpu", "cuda"):
        return f"Triton on {device.type} is not supported"
    return None


def use_triton(operator: str, implementation: Implementation, device: torch.device) -> bool:
    """Whether ``operator`` runs as Triton kernels on ``device``; automatic choices are counted in ``choices``.

    Raises:
        KernelUnavailableError: ``implementation="triton"`` cannot run here.
        ValueError: an unknown implementation.
    """
    if implementation == "plain":
        return False
    if implementation not in ("auto", "triton"):
        raise ValueError(f"{operator}: implementation={implementation!r}: one of auto, triton, plain")
    obstacle = _obstacle(device)
    if implementation == "triton":
        if obstacle:
            raise KernelUnavailableError(f"{operator}: implementation='triton': {obstacle}")
        return True
    count(operator, "plain" if obstacle else "triton", obstacle or "")
    return obstacle is None


def count(operator: str, implementation: str, reason: str) -> None:
    """Remembers an automatic choice."""
    if not torch.compiler.is_compiling():
        _CHOICES[operator, implementation, reason] += 1


def choices() -> dict[str, dict[str, int]]:
    """Automatic choices so far: operator to {implementation (reason): calls}."""
    table: dict[str, dict[str, int]] = {}
    for (operator, chosen, reason), calls in _CHOICES.items():
        label = f"{chosen} ({reason})" if reason else chosen
        table.setdefault(operator, {})[label] = calls
    return table
