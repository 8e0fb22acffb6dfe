"""Leave no trace: run a function for its recording only, and put back whatever it changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lf_graph._backend import Backend


@contextmanager
def restored(backend: Backend, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Bring ``tensors`` and the default generator back to their state at entry, also after an error."""
    kept = [(t, t.detach().clone()) for t in tensors]
    position = backend.rng_position()
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        backend.set_rng_position(position)


def buffers_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The buffers of modules, each once."""
    found = {id(b): b for m in modules for b in m.buffers()}
    return list(found.values())


def aliases(parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """For each parameter that is trained, another Parameter on the same memory.

    What a capture differentiates has to be new: the AccumulateGrad node of a parameter remembers the stream of the
    first forward for as long as somebody holds that forward's loss, and then the capture fails (pytorch#180090).
    """
    return {p: nn.Parameter(p.detach()) for p in parameters if p.requires_grad}


@contextmanager
def swapped(modules: Iterable[nn.Module], replacement: dict[Tensor, Tensor]) -> Iterator[None]:
    """Let modules see other tensors in the place of some of their parameters, inside the ``with`` block."""
    if not replacement:
        yield
        return
    by_id = {id(old): new for old, new in replacement.items()}
    undo: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for module in {id(m): m for root in modules for m in root.modules()}.values():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in by_id:
                undo.append((module._parameters, name, parameter))
    try:
        for registry, name, parameter in undo:
            registry[name] = by_id[id(parameter)]  # type: ignore[assignment]
        yield
    finally:
        for registry, name, parameter in undo:
            registry[name] = parameter
