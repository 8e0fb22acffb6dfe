"""What a kernel tells the tuner: its configurations, and a problem to try them on.

Kernel files describe themselves as a ``Tunable`` (or a ``Choice`` between implementations) and ask ``config_of`` (or
``alternative_of``) before a launch; nothing else of the tuner reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lf_graph.kernels._choice import KernelUnavailableError

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

    def __str__(self) -> str:
        """Such as ``BLOCK_M=64 BLOCK_N=64 warps=4 stages=3``."""
        constants = " ".join(f"{name}={value}" for name, value in self.constants)
        return f"{constants} warps={self.num_warps} stages={self.num_stages}".strip()

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
        version: part of the cache key beside the source; change it when a launcher reads a configuration differently.
    """

    name: str
    kernels: tuple[Any, ...]
    default: Callable[[Key], Config]
    candidates: Callable[[Key], Sequence[Config]]
    problem: Callable[[Key, torch.device], Problem]
    version: str = ""


TUNABLES: dict[str, Tunable] = {}
CHOSEN: dict[tuple[str, Key], Config] = {}
"""What ``config_of`` returned before; ``lf_graph.tune`` empties it when a table changes."""


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
    """The configuration to launch with for a key: the tuned one of this card, the shipped one, or the default.

    "This card" is the device that is current at the first call.

    Raises:
        NotTunedError: tuning at first use is on, and this is the first use, inside a capture.
    """
    config = CHOSEN.get((tunable.name, key))
    if config is None:
        from lf_graph.tune._resolve import resolve  # the tuner is read at the first launch only

        config = resolve(tunable, key)
    return config


@dataclass(frozen=True)
class Choice:
    """An operator with several implementations, of which the fastest that is right and repeatable is taken.

    Attributes:
        name: of the table's rows, unique among tunables.
        alternatives: names of the implementations; the first is taken where nothing was measured.
        problem: for a key and device: what each alternative that exists there does, the reference, the tolerances.
    """

    name: str
    alternatives: tuple[str, ...]
    problem: Callable[
        [Key, torch.device],
        tuple[Mapping[str, Callable[[], tuple[Tensor, ...]]], tuple[Tensor, ...], tuple[float, ...]],
    ]

    def tunable(self) -> Tunable:
        """The same as a tunable whose one constant is the number of an alternative."""
        every = tuple(Config((("alternative", i),)) for i in range(len(self.alternatives)))
        return Tunable(
            self.name, (), lambda key: every[0], lambda key: every, self._problem, ",".join(self.alternatives)
        )

    def _problem(self, key: Key, device: torch.device) -> Problem:
        calls, reference, tolerance = self.problem(key, device)

        def run(config: Config) -> tuple[Tensor, ...]:
            name = self.alternatives[config["alternative"]]
            if name not in calls:
                raise KernelUnavailableError(f"{name} does not exist here")
            return calls[name]()

        return Problem(run, reference, tolerance)


_CHOICES: dict[str, Tunable] = {}


def register_choice(choice: Choice) -> Choice:
    """Makes a choice known to ``tune``; returns it.

    Raises:
        ValueError: the name is taken.
    """
    _CHOICES[choice.name] = register(choice.tunable())
    return choice


def alternative_of(choice: Choice, key: Key) -> str:
    """The name of the implementation to use for a key; the first where nothing was measured on this card."""
    return choice.alternatives[config_of(_CHOICES[choice.name], key)["alternative"]]
