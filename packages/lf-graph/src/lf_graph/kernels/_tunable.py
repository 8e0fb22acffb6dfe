"""What a kernel tells the tuner: its configurations, and a problem to try them on.

Kernel files describe themselves as a ``Tunable`` and ask ``config_of`` before a launch; nothing else of the tuner
reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Key = tuple[int | str | bool, ...]
"""What a choice depends on: dtypes by name, head size, length bucket... never a tensor."""


@dataclass(frozen=True)
class Config:
    """One way to launch a kernel.

    Attributes:
        constants: ``constexpr`` arguments of the kernel by name, such as ``(("BLOCK_M", 64), ("BLOCK_N", 64))``.
        num_warps: warps of 32 threads in a program.
        num_stages: depth of the software pipeline of loads.
    """

    constants: tuple[tuple[str, int], ...]
    num_warps: int = 4
    num_stages: int = 3

    def __getitem__(self, name: str) -> int:
        """The constant of that name."""
        return dict(self.constants)[name]

    def keywords(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        return {**dict(self.constants), "num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Problem:
    """Random inputs of one key, and what a configuration must return on them.

    Attributes:
        run: launches the kernel with a configuration on the same inputs and returns fresh outputs, without waiting.
        reference: the same outputs, computed in float64 (or fp32 where float64 is not possible).
        tolerance: for each output, the largest allowed ``max|out - reference| / max|reference|``.
    """

    run: Callable[[Config], tuple[Tensor, ...]]
    reference: tuple[Tensor, ...]
    tolerance: tuple[float, ...]


@dataclass(frozen=True)
class Tunable:
    """A kernel (or kernels that share one configuration) that can be tuned.

    Attributes:
        name: of the table's rows, unique.
        kernels: the ``triton.jit`` functions, whose source is part of the cache key.
        default: the configuration of a key that was never tuned; correct on every card.
        candidates: the configurations worth trying for a key.
        problem: inputs and reference of a key on a device.
    """

    name: str
    kernels: tuple[Any, ...]
    default: Callable[[Key], Config]
    candidates: Callable[[Key], Sequence[Config]]
    problem: Callable[[Key, torch.device], Problem]


TUNABLES: dict[str, Tunable] = {}


def register(tunable: Tunable) -> Tunable:
    """Makes a tunable known to ``tune``; returns it.

    Raises:
        ValueError: the name is taken.
    """
    if tunable.name in TUNABLES:
        raise ValueError(f"two tunables are called {tunable.name}")
    TUNABLES[tunable.name] = tunable
    return tunable


def config_of(tunable: Tunable, key: Key) -> Config:
    """The configuration to launch with for a key: the tuned one of this card, or the default."""
    return tunable.default(key)
