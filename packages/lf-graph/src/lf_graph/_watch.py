"""Watch one run: every operator, every call of torch's interface, every call that waits."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lf_graph._findings import Finding
from lf_graph._frames import is_torchs, locate
from lf_graph._launches import triton_launches
from lf_graph._names import Names
from lf_graph._observe import host_calls
from lf_graph._preserve import Preserved
from lf_graph._recorder import as_if_capturing
from lf_graph._rules import Verdict, classify, classify_call
from lf_graph._schema import op_name, writes
from lf_graph._stream import Step, step

DEVICE_WAIT = Verdict(
    "synchronize",
    "the operator waits for the device (torch.cuda.set_sync_debug_mode), which a capture forbids",
    "use a variant that leaves its result on the device, or run this part outside of the graph",
)


class Watch:
    """What one run did.

    Attributes:
        steps: its operators.
        findings: what it did that a graph cannot, each place once.
        written: where an attribute of a module was assigned, by (id(module), name); "" by torch itself.
        ran_backward: whether the function itself ran a backward.
    """

    def __init__(self, names: Names, state: Preserved, target: str) -> None:
        self.steps: list[Step] = []
        self.findings: list[Finding] = []
        self.written: dict[tuple[int, str], str] = {}
        self.ran_backward = False
        self._names, self._state, self._target = names, state, target
        self._forward: dict[int, tuple[str, str]] = {}
        self._call, self._judged = "", False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See everything that this thread, and the backward it starts, does in the block."""
        with ExitStack() as stack:
            stack.enter_context(_sync_warnings(self) if self._target == "cuda" else ExitStack())
            stack.enter_context(as_if_capturing())
            stack.enter_context(triton_launches(self._launched))
            stack.enter_context(_Operators(self))
            stack.enter_context(_Calls(self))
            stack.enter_context(host_calls(self))
            yield

    def add(self, finding: Finding) -> None:
        """Keep a finding unless another one of its place says it already; drop those that it says better."""
        if not any(_covers(f, finding) for f in self.findings):
            self.findings = [f for f in self.findings if not _covers(finding, f)] + [finding]

    # Sink of host_calls

    def call(self, op: str, verdict: Verdict, frame: FrameType) -> None:
        where, module = locate(self._names.modules, frame)
        if where:  # else it is this package that calls
            self.add(verdict.at(op, where, module))

    def tensor_call(self, name: str, tensor: Tensor, frame: FrameType) -> None:
        verdict = classify_call(name, (tensor,), None, self._target)
        if verdict:
            self.call(f"Tensor.{name}", verdict, frame)

    def write(self, module: nn.Module, name: str, frame: FrameType) -> None:
        by_torch = frame.f_back is not None and is_torchs(frame.f_back.f_code.co_filename)
        where = "" if by_torch else locate(self._names.modules, frame)[0]
        self.written[id(module), name] = where

    def drew(self, generator: random.Random) -> None:
        self._state.about_to_draw(generator)

    # operators and calls

    def operator(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Judge and note an operator before it runs."""
        for t in writes(func, tuple(args), kwargs):
            self._state.about_to_write(t)
        where, module = self._place()
        op = op_name(func)
        self.steps.append(step(op, args, kwargs, where, module))
        verdict = None if self._judged else classify(func, args, kwargs, self._call, self._target)
        if verdict:
            self.add(verdict.at(op, where, module))

    @contextmanager
    def calling(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[None]:
        """Remember which function of torch is running; operators of a call that is judged itself are not."""
        on_cpu_only = name == "one_hot" and self._target == "cpu" and _classes(args, kwargs) >= 0
        self._call, self._judged = name, on_cpu_only  # the range check of one_hot reads, but on the CPU alone
        try:
            self.judge_call(name, args, None)
            yield
        finally:
            self._call, self._judged = "", False

    def judge_call(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Judge a call of torch's interface, before it and once more by its result."""
        verdict = classify_call(name, args, result, self._target)
        if verdict:
            self._judged = True
            where, module = locate(self._names.modules)
            self.add(verdict.at(_python_name(name), where, module))

    def waited(self) -> None:
        """A synchronizing operation was reported by CUDA's debug mode."""
        where, module = self._place()
        self.add(DEVICE_WAIT.at(self.steps[-1].op if self.steps else "cuda", where, module))

    def _launched(self, kernel: str, tensors: Sequence[Tensor]) -> None:
        for t in tensors:
            self._state.about_to_write(t)
        where, module = self._place()
        self.steps.append(step(f"triton.{kernel}", tensors, {}, where, module))

    def _place(self) -> tuple[str, str]:
        """The user's line; inside a backward node that is not the user's, the line of its forward."""
        place = locate(self._names.modules)
        node: Any = torch._C._current_autograd_node()  # None outside of a backward
        if node is None:
            # a node takes its number just before its operator is dispatched
            number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            self._forward.setdefault(number - 1, place)
            return place
        self.ran_backward = True
        forward = self._forward.get(node._sequence_nr(), ("", ""))
        return place[0] or forward[0], place[1] or forward[1]


_ONE_A_LINE = ("rng_state", "host_read")
_WAITS = (
    "synchronize",
    "host_read",
    "data_dependent_shape",
    "host_to_device",
    "device_to_host",
    "cpu_tensor",
)


def _covers(a: Finding, b: Finding) -> bool:
    """Whether ``a`` makes ``b`` superfluous: the same again, or the cause of a wait that CUDA reported."""
    if (a.where, a.module) != (b.where, b.module):
        return False
    if b.why == DEVICE_WAIT.why:
        return a.kind in _WAITS and a.severity == "error"
    return a.kind == b.kind and (a.op == b.op or a.kind in _ONE_A_LINE)


def _python_name(name: str) -> str:
    return f"torch.{name}" if name in ("tensor", "as_tensor", "asarray") else f"Tensor.{name}"


def _classes(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    return int(kwargs.get("num_classes", args[1] if len(args) > 1 else -1))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Below autograd and autocast: what runs on the device."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._watch.operator(func, args, kwargs)
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Above autograd: which function of torch the user called."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with self._watch.calling(name, args, kwargs):
            result = func(*args, **kwargs)
        self._watch.judge_call(name, args, result)
        return result


@contextmanager
def _sync_warnings(watch: Watch) -> Iterator[None]:
    """Turn the warnings of CUDA's synchronization debug mode into findings."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        warnings.filterwarnings("always", message="called a synchronizing")
        show = warnings.showwarning

        def showwarning(message: Any, *args: Any, **kwargs: Any) -> None:
            if "called a synchronizing" in str(message):
                watch.waited()
            else:
                show(message, *args, **kwargs)

        warnings.showwarning = showwarning
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
