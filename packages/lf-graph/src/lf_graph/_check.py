"""``check``: run a function and say what a CUDA graph could not hold, or would freeze."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from lf_graph._attributes import attribute_writes, moved_parameters
from lf_graph._dry_run import DryRun, Run
from lf_graph._findings import Finding, Parameters, Report
from lf_graph._frames import definition
from lf_graph._names import Names, names_behind, objects_behind
from lf_graph._observe import HOST_RANDOM
from lf_graph._preserve import ModuleState, Preserved, preserved
from lf_graph._rules import Verdict
from lf_graph._stream import Difference, first_difference
from lf_graph._structure import (
    DATA_PARALLEL,
    frozen_arguments,
    named_inputs,
    structure,
    target_of,
    wrong_devices,
)


def check(
    fn: Callable[..., Any],
    *args: Any,
    backward: bool = True,
    again: Sequence[Any] | None = None,
    **kwargs: Any,
) -> Report:
    """Run ``fn(*args, **kwargs)`` and the backward of what it returns, and name what a graph could not hold.

    The function runs twice with the same arguments, once more if the second run differs from the first (caches made
    by a first call are no finding), and once with ``again``. Whatever differs between steady runs follows Python
    state, time or random numbers of the host, and would be frozen. Nothing stays changed: parameters, gradients,
    buffers, attributes of the modules, optimizers, inputs and random generators are put back bit for bit. Work on
    a CPU is judged as if it were for a device. Modules that communicate (FSDP, DTensor, pipelines, nested DDP) are
    named and not run.

    Args:
        fn: a module, a method, or a function that closes over modules.
        args: its arguments, with tensors of any shape and dtype.
        backward: differentiate the outputs; a function that runs its own backward is left to it.
        again: positional arguments of one more run, of the same shapes and with other values: what then differs is
            frozen by a graph although the data changes.
        kwargs: keyword arguments of every run.

    Returns:
        The report; ``report.ok`` says that a capture would succeed and a replay compute the same.

    Raises:
        Exception: what ``fn`` raises, unless a finding on one of the lines it passed through explains it.
    """
    found: list[Finding] = []
    if isinstance(fn, DistributedDataParallel):
        found.append(DATA_PARALLEL.at(type(fn).__name__, definition(fn.module)))
        fn = fn.module
    names, objects = names_behind(fn, args, kwargs), objects_behind(fn, args, kwargs)
    inputs = named_inputs(args, kwargs)
    structural = structure(names, objects)
    found += structural
    found += wrong_devices(_devices(names, inputs), _current_device())
    found += frozen_arguments(fn, inputs, None if again is None else named_inputs(again, {}))
    if any(f.kind == "wrapped" for f in structural):
        return Report(tuple(found), 0, False, Parameters())
    tensors = [t for t in tree_leaves((args, kwargs, again)) if isinstance(t, Tensor)]
    with preserved(names, tensors, objects) as state:
        dry = DryRun(fn, kwargs, names, state, target_of(names, tensors).type, backward)
        runs = _runs(dry, args, names, state)
        last, during = runs[-1]
        different = _differences(dry, [run for run, _ in runs], again)
        found += [*last.findings, *during, *different, *_unseen_draws(state, last)]
    return Report(_unique(found), len(last.steps), last.random, last.parameters)


def _runs(
    dry: DryRun, args: Sequence[Any], names: Names, state: Preserved
) -> list[tuple[Run, list[Finding]]]:
    """Run until two runs agree, three times at most; each run with what it did to the modules."""
    runs: list[tuple[Run, list[Finding]]] = []
    while len(runs) < 3:
        before = [ModuleState.of(m) for _, m in names.each_module()]
        memory = {id(p): p.detach() for _, p in names.parameters}
        run = dry.run(args)
        moved = moved_parameters(names, memory)
        runs.append((run, [*attribute_writes(names, before, run.written), *moved]))
        if run.stopped or _agree(runs):
            break
    return runs


def _agree(runs: Sequence[tuple[Run, list[Finding]]]) -> bool:
    """Whether the last run did as the one before, and left the modules as they were."""
    if len(runs) < 2:
        return False
    (a, _), (b, changed) = runs[-2:]
    return first_difference(a.steps, b.steps) is None and not changed


def _differences(dry: DryRun, runs: Sequence[Run], again: Sequence[Any] | None) -> list[Finding]:
    last = runs[-1]
    if last.stopped:
        return []
    found = []
    steady = first_difference(runs[-2].steps, last.steps)
    if steady:
        found.append(
            _changed(
                steady, "in another run with the same arguments: it follows Python state, time or chance"
            )
        )
    if again is not None and not steady:
        data = first_difference(last.steps, dry.run(again).steps)
        found += [_changed(data, "with the second arguments: it follows the data")] if data else []
    return found


_FIXES = {
    "value": "pass the number to the operator as a tensor on the device, changed in place before each replay",
    "shape": "pad to a fixed capacity (Buckets), so that every replay has the same shapes",
    "operator": "choose on the device with torch.where, or capture one graph for each branch",
    "end": "choose on the device with torch.where, or capture one graph for each branch",
}


def _changed(d: Difference, when: str) -> Finding:
    why = f"{d.what} {d.old} -> {d.new} {when}, and a graph keeps what it captured"
    return Verdict("changes_between_calls", why, _FIXES[d.what]).at(d.op, d.where, d.module)


def _unseen_draws(state: Preserved, run: Run) -> list[Finding]:
    """Draws of the host that were not seen one by one, because another profiler is running."""
    moved = state.random.python_moved() or state.random.numpy_moved()
    seen = any(f.kind == "host_random" for f in run.findings)
    return [HOST_RANDOM.at("random", "")] if moved and not seen else []


def _devices(names: Names, inputs: Mapping[str, Any]) -> dict[str, torch.device]:
    tensors = {**dict(names.parameters), **dict(names.each_buffer())}
    tensors.update({name: x for name, x in inputs.items() if isinstance(x, Tensor)})
    return {name: t.device for name, t in tensors.items()}


def _current_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _unique(found: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(dict.fromkeys(found))
