"""What `torch.npu` or `torch.mlu` offers, under the names that torch_npu and torch_mlu share with torch.cuda."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ._log import ContractError
from ._streams import stream_types

if TYPE_CHECKING:
    from . import Simulated

NAMES = {"npu": "Ascend910B3", "mlu": "MLU290"}


def fill(module: Any, of: Simulated) -> None:
    """Put the functions and classes of a device module into it."""
    stream, event, context = stream_types(of.streams)
    module.Stream, module.Event, module.StreamContext, module.stream = stream, event, context, context
    module.current_stream = lambda device=None: stream(number=of.streams.current())
    module.default_stream = lambda device=None: stream(number=0)
    module.set_stream = lambda chosen: of.streams.set_current(chosen.stream_id)
    module.synchronize = lambda device=None: of.streams.wait_for_all()
    _devices(module, of)
    _memory(module, of)
    _generators(module, of)


def _devices(module: Any, of: Simulated) -> None:
    class Device:
        """A context, as torch.cuda.device."""

        def __init__(self, index: Any) -> None:
            _index(of, index)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    module.device = Device
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda index: _index(of, index) and None
    module.get_device_name = lambda index=None: NAMES[of.name]
    module.get_device_capability = lambda index=None: (0, 0)
    module.is_bf16_supported = lambda: True
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]


def _index(of: Simulated, asked: Any) -> int:
    found = torch.device(of.name, asked) if isinstance(asked, int) else torch.device(asked)
    if found.type != of.name or found.index not in (None, 0):
        raise ContractError(f"no device {asked}: there is {of.name}:0")
    return 0


def _memory(module: Any, of: Simulated) -> None:
    memory = of.memory

    def reset(device: object = None) -> None:
        memory.peak = memory.alive

    module.memory_allocated = lambda device=None: memory.alive
    module.memory_reserved = lambda device=None: memory.alive
    module.max_memory_allocated = lambda device=None: memory.peak
    module.max_memory_reserved = lambda device=None: memory.peak
    module.reset_peak_memory_stats = reset
    module.mem_get_info = lambda device=None: (memory.total - memory.alive, memory.total)
    module.empty_cache = lambda: of.log.add("op", "empty_cache")


def _generators(module: Any, of: Simulated) -> None:
    generator = of.operators.generator

    def manual_seed(seed: int) -> None:
        generator.manual_seed(seed)

    module.manual_seed = module.manual_seed_all = manual_seed
    module.initial_seed = generator.initial_seed
    module.get_rng_state = lambda device=0: generator.get_state()
    module.set_rng_state = lambda state, device=0: generator.set_state(state) and None
    module.get_rng_state_all = lambda: [generator.get_state()]
    module.set_rng_state_all = lambda states: generator.set_state(states[0]) and None
