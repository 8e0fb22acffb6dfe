"""One run of a function, forward and backward, under watch."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lf_graph._findings import Finding, Parameters
from lf_graph._frames import call_users
from lf_graph._names import Names
from lf_graph._preserve import Preserved, RandomState
from lf_graph._rules import Verdict
from lf_graph._stream import Step
from lf_graph._watch import Watch


@dataclass(frozen=True)
class Run:
    """What one run did.

    Attributes:
        steps: its operators.
        findings: what a graph could not hold.
        written: where attributes of modules were assigned, by (id(module), name).
        parameters: which parameters got a gradient.
        random: whether a generator of torch was used.
        stopped: whether the run ended at a finding.
    """

    steps: tuple[Step, ...]
    findings: tuple[Finding, ...]
    written: Mapping[tuple[int, str], str]
    parameters: Parameters
    random: bool
    stopped: bool


@dataclass(frozen=True)
class DryRun:
    """A function to be run several times from the same state of torch's generators."""

    fn: Callable[..., Any]
    kwargs: Mapping[str, Any]
    names: Names
    state: Preserved
    target: str
    backward: bool

    def run(self, args: Sequence[Any]) -> Run:
        """Run forward and backward once.

        Raises:
            Exception: what the function raises, unless it passed through a line that has a finding.
        """
        self.state.random.restore_torch()
        watch = Watch(self.names, self.state, self.target)
        before = RandomState.take()
        grads = {id(p): _gradient(p) for _, p in self.names.parameters}
        got: set[int] = set()
        stopped = False
        try:
            got = self._run(watch, args)
        except Exception as error:
            watch.add(_explained(error, watch.findings))
            stopped = True
        if watch.ran_backward and not got:
            got = {id(p) for _, p in self.names.parameters if _has_new_gradient(p, *grads[id(p)])}
        random = before.torch_moved() or any(f.kind == "generator" for f in watch.findings)
        used = self._parameters(got) if self.backward or watch.ran_backward else Parameters()
        return Run(tuple(watch.steps), tuple(watch.findings), watch.written, used, random, stopped)

    def _run(self, watch: Watch, args: Sequence[Any]) -> set[int]:
        """Forward and backward; ids of the tensors that got a gradient."""
        with watch.watching():
            result = call_users(self.fn, *args, **self.kwargs)
        outputs = [t for t in _tensors(result) if t.requires_grad]
        inputs = [t for t in _tensors((args, self.kwargs)) if t.requires_grad and t.is_leaf]
        targets = list({id(t): t for t in (*self._trainable(), *inputs)}.values())
        if not (self.backward and outputs and targets) or watch.ran_backward:
            return set()
        ones = [torch.ones_like(t) for t in outputs]
        with watch.watching():
            # not backward(): nothing is accumulated, and hooks of parameters stay silent
            grads = call_users(torch.autograd.grad, outputs, targets, ones, allow_unused=True)
        return {id(t) for t, g in zip(targets, grads, strict=True) if g is not None}

    def _trainable(self) -> Iterator[Tensor]:
        return (p for _, p in self.names.parameters if p.requires_grad)

    def _parameters(self, got: set[int]) -> Parameters:
        trainable = [(name, id(p) in got) for name, p in self.names.parameters if p.requires_grad]
        return Parameters(
            tuple(name for name, has in trainable if has), tuple(name for name, has in trainable if not has)
        )


def _gradient(p: Tensor) -> tuple[Tensor | None, int]:
    """The gradient and its version; held, so that no later tensor can be taken for it."""
    return p.grad, p.grad._version if p.grad is not None else 0


def _has_new_gradient(p: Tensor, grad: Tensor | None, version: int) -> bool:
    return p.grad is not None and (p.grad is not grad or p.grad._version != version)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Tensors in a result, also in mappings and dataclasses that pytree does not know."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(list(leaf.values()))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])


def _explained(error: Exception, findings: Sequence[Finding]) -> Finding:
    """The finding that the run ended; the error itself where no finding lies on its way.

    A reentrant checkpoint fails in the backward, which does not pass through its line.
    """
    passed = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    named = {f.where: f for f in findings if f.where}
    cause = next((named[line] for line in reversed(passed) if line in named), None)
    cause = cause or next((f for f in findings if f.kind == "reentrant"), None)
    if cause is None:
        raise error
    why = f"{cause.op} raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    fix = "mend that line and check again: what comes after it was not seen"
    return Verdict("stopped", why, fix, "warning").at(cause.op, cause.where, cause.module)
