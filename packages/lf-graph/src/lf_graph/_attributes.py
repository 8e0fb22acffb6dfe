"""Python state of modules that a forward changes, and a replay would not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lf_graph._findings import Finding
from lf_graph._frames import definition
from lf_graph._names import Names
from lf_graph._preserve import ModuleState, moved, same_items
from lf_graph._rules import Verdict

REPLACED_BUFFER = Verdict(
    "buffer_replaced",
    "the buffer became another tensor: a replay writes to the one that existed at the capture, again and again",
    "write in place: self.buffer.copy_(new), self.buffer.add_(1)",
)
REPLACED_PARAMETER = Verdict(
    "parameter_replaced",
    "the parameter became another tensor or got other memory: a replay reads the old address",
    "write in place under torch.no_grad(): self.weight.copy_(new)",
)
TENSOR_ATTRIBUTE = Verdict(
    "attribute_write",
    "the tensor lies in the graph's memory: the next replay overwrites it, and without one it never changes",
    "return it from forward, or copy it into a buffer: self.buffer.copy_(value)",
    "warning",
)
_PRIMITIVE = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)


def _python_state(name: str, old: str, new: str) -> Verdict:
    return Verdict(
        "attribute_write",
        f"self.{name} changes in forward ({old} -> {new}), and a replay runs no Python",
        f"keep it in a buffer that is changed in place (self.{name}.add_(1)), or change it outside of the graph",
    )


def attribute_writes(
    names: Names, before: list[ModuleState], written: Mapping[tuple[int, str], str]
) -> list[Finding]:
    """Findings on what became of each module since ``before``.

    Args:
        names: names of the modules.
        before: a state of each module.
        written: ``file:line`` of assignments by (id(module), attribute), "" for those torch made itself; where
            one is missing, the line of the forward is told.
    """
    found = []
    for state in before:
        module = state.module
        for name, verdict in _changes(state):
            where = written.get((id(module), name))
            if where == "":  # torch's own: spectral_norm sets the weight it has computed
                continue
            where = where or definition(module)
            found.append(verdict.at(f"{type(module).__name__}.{name}", where, names.modules[id(module)]))
    return found


def _changes(state: ModuleState) -> Iterator[tuple[str, Verdict]]:
    now, module = state.module.__dict__, state.module
    yield from _replaced(state.containers["_buffers"], module._buffers, REPLACED_BUFFER)
    yield from _replaced(state.containers["_parameters"], module._parameters, REPLACED_PARAMETER)
    for name in dict.fromkeys([*state.attributes, *now]):
        if name in ("_buffers", "_parameters"):
            continue
        old, new = state.attributes.get(name), now.get(name)
        if name in state.containers and old is new:
            if not same_items(state.containers[name], new):
                yield name, _python_state(name, _text(state.containers[name]), _text(new))
        elif not _same_value(old, new):
            tensor = isinstance(new, Tensor)
            yield name, TENSOR_ATTRIBUTE if tensor else _python_state(name, _text(old), _text(new))


def _replaced(
    old: Mapping[str, Tensor | None], new: Mapping[str, Tensor | None], verdict: Verdict
) -> Iterator[tuple[str, Verdict]]:
    yield from ((name, verdict) for name in dict.fromkeys([*old, *new]) if old.get(name) is not new.get(name))


def moved_parameters(names: Names, before: Mapping[int, Tensor]) -> list[Finding]:
    """Findings on parameters whose memory is another than in ``before``, a detached tensor by ``id(parameter)``."""
    owners: dict[str, nn.Module] = {names.modules[id(m)]: m for _, m in names.each_module()}
    found = []
    for name, p in names.parameters:
        if id(p) in before and moved(p, before[id(p)]):
            owner = name.rpartition(".")[0]
            where = definition(owners[owner]) if owner in owners else ""
            found.append(REPLACED_PARAMETER.at(name, where, owner))
    return found


def _same_value(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new) or isinstance(old, Tensor):
        return False
    plain = all(isinstance(x, _PRIMITIVE) for side in (old, new) for x in tree_leaves(side))
    return plain and (old == new or (old != old and new != new))


def _text(value: Any) -> str:
    text = f"{len(value)} entries" if isinstance(value, (dict, list, set)) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
