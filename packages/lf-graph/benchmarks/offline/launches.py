"""The kernels that a call would launch on an H200, without a GPU: Triton binds and specialises, and then nothing runs.

Operators run on CPU tensors that hold nothing; a stand-in driver tells Triton of the card, and Triton's own hook before
a compilation takes down what it was about to compile (``specialization_data``, what ``JITFunction.preload`` takes).
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from lf_graph import _adamw
from lf_graph.kernels import _choice, _tunable
from lf_graph.kernels._tunable import TUNABLES, Config, Key

SHARED_BYTES = (
    227 * 1024
)  # that a program may have on sm_90 (CUDA C++ Programming Guide, compute capabilities)
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_block_optin=SHARED_BYTES,
)
TARGET = GPUTarget("cuda", 90, 32)
Chosen = tuple[str, Key]
"""Name of a tunable, and the key it was asked for."""


@dataclass(frozen=True)
class Launch:
    """A kernel and the arguments that decide how it is compiled.

    Attributes:
        module, kernel: where the ``triton.jit`` function is.
        data: Triton's JSON of signature, constants, alignment and options.
    """

    module: str
    kernel: str
    data: str

    def function(self) -> Any:
        """The ``triton.jit`` function."""
        return getattr(importlib.import_module(self.module), self.kernel)

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return int(json.loads(self.data)["options"]["num_warps"])


class _Configs(dict[Chosen, Config]):
    """Stands in for what was resolved before: forced configurations, else defaults; notes what was asked for."""

    def __init__(self, forced: Mapping[Chosen, Config]) -> None:
        self.forced, self.asked = forced, {}

    def get(self, chosen: Chosen, default: Config | None = None) -> Config:  # type: ignore[override]
        config = self.forced.get(chosen) or TUNABLES[chosen[0]].default(chosen[1])
        self.asked[chosen] = config
        return config


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Triton and torch believe in an H200; kernels cannot be launched."""
    driver = SimpleNamespace(
        get_current_target=lambda: TARGET, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    patches = (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=H200),
        mock.patch.object(_choice, "_INTERPRETED", True),  # lets CPU tensors through
        mock.patch.object(_adamw, "_triton_reason", return_value=""),
    )
    try:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield
    finally:
        triton.runtime.driver.set_active(before)


def recorded(
    call: Callable[[], Any], forced: Mapping[Chosen, Config] | None = None
) -> tuple[list[Launch], dict[Chosen, Config]]:
    """What ``call`` would launch, each kernel and specialisation once, and the configurations it asked for.

    Args:
        call: runs operators on CPU tensors with ``implementation="triton"``; their values are never computed.
        forced: configurations to use instead of the defaults.
    """
    found: dict[Launch, None] = {}

    def note(**hooked: Any) -> bool:
        fn = hooked["fn"]
        found[Launch(fn.module, fn.name.rpartition(".")[2], hooked["compile"]["specialization_data"])] = None
        return True  # handled: nothing is compiled or launched

    configs = _Configs(forced or {})
    with (
        stand_in(),
        mock.patch.object(_tunable, "CHOSEN", configs),
        mock.patch.object(triton.knobs.runtime, "jit_cache_hook", note),
    ):
        call()
    return list(found), configs.asked
