"""A module's forward as a ``torch.fx`` graph, recorded from one run with real tensors.

Symbolic tracing (``torch.fx.symbolic_trace``) cannot follow sizes, factory functions, ``no_grad`` or keyword trees,
and drops contexts without a word. A graph is for fixed shapes anyway, so the forward simply runs: calls of leaf
modules and of torch functions become nodes, values are known by identity, sizes are numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils import _pytree as pytree

from lf_graph._errors import GraphCaptureError
from lf_graph._frames import call_users, locate
from lf_graph._launches import triton_launches

_NUMBERS = (int, float, bool, complex, str, type(None), type(Ellipsis))
_LITERALS = (*_NUMBERS, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Context:
    """Modes around an operation that a graph of operations does not show.

    Attributes:
        grad: whether gradients are recorded.
        autocast: (device type, enabled, dtype) of each device type.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> Context:
        """The modes that are on."""
        types = [t for t in ("cpu", "cuda") if torch.amp.is_autocast_available(t)]
        states = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types]
        return cls(torch.is_grad_enabled(), tuple(states))


@dataclass(frozen=True)
class Traced:
    """A recorded forward.

    Attributes:
        graph: placeholders for the tensors among the arguments; the output is a tuple of tensors.
        contexts: modes of each node, where they differ from those around the whole call.
        called: dotted names of the leaf modules that were called.
        parts: nodes that only take a tensor out of what the node before them returned.
        leaves: what the call returned, flattened: the position of a tensor in the graph's output, or a constant.
        structure: how to put ``leaves`` together again.
    """

    graph: torch.fx.Graph
    contexts: dict[torch.fx.Node, Context]
    called: frozenset[str]
    parts: frozenset[torch.fx.Node]
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec


def trace(
    root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_leaf: Callable[[str], bool]
) -> Traced:
    """Run ``root(*args, **kwargs)`` once and record it.

    Args:
        root: the module.
        args, kwargs: its arguments; tensors become placeholders, everything else is a constant.
        is_leaf: whether the submodule of a dotted name is one node; others are followed inside.

    Raises:
        GraphCaptureError: something that cannot be a node, with its line and the way out.
    """
    recorder = _Recorder(root, is_leaf)
    for i, tensor in enumerate(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
        recorder.name(tensor, recorder.graph.placeholder(f"in{i}"))
    with recorder.recording():
        result = call_users(root, *args, **kwargs)
    leaves, structure = pytree.tree_flatten(result)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    recorder.graph.output(tuple(recorder.argument(t) for t in tensors))
    positions = iter(range(len(tensors)))
    marked = tuple(Position(next(positions)) if isinstance(x, Tensor) else x for x in leaves)
    recorder.graph.lint()
    return Traced(
        recorder.graph,
        recorder.contexts,
        frozenset(recorder.called),
        frozenset(recorder.parts),
        marked,
        structure,
    )


@dataclass(frozen=True)
class Position:
    """Where a tensor stands in the outputs."""

    index: int


class _Recorder:
    """Builds the graph while the forward runs."""

    def __init__(self, root: nn.Module, is_leaf: Callable[[str], bool]) -> None:
        self.graph = torch.fx.Graph()
        self.contexts: dict[torch.fx.Node, Context] = {}
        self.called: set[str] = set()
        self.parts: set[torch.fx.Node] = set()
        self._is_leaf = is_leaf
        self._outside = Context.now()
        self._modules = {id(m): name for name, m in root.named_modules()}
        self._root = root
        self._depth = 0
        self._nodes: dict[int, torch.fx.Node] = {}
        self._held: list[Any] = []  # an id names a tensor as long as it lives
        self._attributes = dict(_tensors_of(root))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls of modules and of torch functions in the block."""
        call = nn.Module.__call__
        recorder = self

        def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return recorder._call_module(call, module, args, kwargs)

        nn.Module.__call__ = observed  # type: ignore[method-assign]
        try:
            with self._no_functions(), triton_launches(self._launched), _Functions(self):
                yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    @contextmanager
    def _no_functions(self) -> Iterator[None]:
        """Refuse functions with a backward of their own: what is recorded inside of them has another."""
        kept = torch.autograd.Function.__dict__["apply"]
        recorder = self

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            if not recorder._depth:
                raise recorder._error(
                    f"{cls.__name__}.apply",
                    "an autograd.Function, which activation checkpointing uses too, is called outside of a submodule",
                )
            return kept.__get__(None, cls)(*args, **kwargs)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.autograd.Function.apply = kept  # type: ignore[method-assign]

    def _call_module(
        self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = self._modules.get(id(module))
        if self._depth or module is self._root or (name is not None and not self._is_leaf(name)):
            return call(module, *args, **kwargs)
        if name is None:
            raise self._error(type(module).__name__, "the module is no submodule of the one that is traced")
        with self._inside():
            result = call(module, *args, **kwargs)
        self.called.add(name)
        self._node("call_module", name, args, kwargs, result)
        return result

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch, and record it if it gives or changes a tensor."""
        if self._depth:
            return func(*args, **kwargs)
        with self._inside():
            result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        gives = any(isinstance(x, Tensor) for x in pytree.tree_leaves(result))
        if name == "__get__":
            if gives:
                self._node("call_function", getattr, (args[0], func.__self__.__name__), {}, result)
        elif name in ("__getitem__", "__setitem__"):
            target = operator.getitem if name == "__getitem__" else operator.setitem
            self._node("call_function", target, args, {}, result)
        elif name == "__set__":
            raise self._error(f"Tensor.{func.__self__.__name__}", "an attribute of a tensor is assigned")
        elif not (gives or (name.endswith("_") and not name.endswith("__"))):
            pass  # a size, a flag: a constant of the graph
        elif is_tensor_method_or_property(func):
            self._node("call_method", name, args, kwargs, result)
        else:
            self._node("call_function", func, args, kwargs, result)
        return result

    def name(self, tensor: Tensor, node: torch.fx.Node) -> None:
        """Know a tensor as the result of a node."""
        self._nodes[id(tensor)] = node
        self._held.append(tensor)

    def argument(self, value: Any) -> Any:
        """A value as the argument of a node.

        Raises:
            GraphCaptureError: a tensor of unknown origin, or an object that is no constant.
        """
        if isinstance(value, Tensor):
            return self._nodes.get(id(value)) or self._attribute(value)
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if isinstance(value, torch.Size):
            return tuple(value)
        if type(value) in (tuple, list):
            return type(value)(self.argument(v) for v in value)
        if type(value) is dict:
            return {k: self.argument(v) for k, v in value.items()}
        if isinstance(value, _LITERALS):
            return value
        raise self._error(
            type(value).__name__, f"an argument of type {type(value).__name__} cannot be kept in a graph"
        )

    def _attribute(self, tensor: Tensor) -> torch.fx.Node:
        name = self._attributes.get(id(tensor))
        if name is None:
            why = "a tensor comes from somewhere that records nothing (a global, a list, another library)"
            raise self._error("tensor", why)
        node = self.graph.get_attr(name)
        self.name(tensor, node)
        return node

    def _node(self, kind: str, target: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        found = [self.argument(a) for a in args], {k: self.argument(v) for k, v in kwargs.items()}
        node = self.graph.create_node(kind, target, tuple(found[0]), found[1])
        self._mark(node)
        self._results(node, result)

    def _results(self, node: torch.fx.Node, result: Any) -> None:
        """Know each tensor of a result, by nodes that take it out."""
        if isinstance(result, Tensor):
            self.name(result, node)
        elif isinstance(result, Mapping):
            self._parts(node, operator.getitem, list(result.items()))
        elif isinstance(result, (tuple, list)):
            self._parts(node, operator.getitem, list(enumerate(result)))
        elif hasattr(result, "__dataclass_fields__"):
            self._parts(node, getattr, [(f, getattr(result, f)) for f in result.__dataclass_fields__])

    def _parts(self, node: torch.fx.Node, take: Callable[..., Any], parts: Sequence[tuple[Any, Any]]) -> None:
        for key, value in parts:
            if any(isinstance(x, Tensor) for x in pytree.tree_leaves(value)):
                part = self.graph.call_function(take, (node, key))
                self.parts.add(part)
                self._mark(part)
                self._results(part, value)

    def _mark(self, node: torch.fx.Node) -> None:
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            why = "hooks for saved tensors are on (activation checkpointing or offloading), which parts would not have"
            raise self._error("saved_tensors_hooks", why)
        context = Context.now()
        if context != self._outside:
            self.contexts[node] = context

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _launched(self, kernel: str, tensors: Sequence[Tensor]) -> None:
        if not self._depth:
            raise self._error(
                f"triton.{kernel}", "a kernel is launched outside of a submodule, which records nothing"
            )

    def _error(self, op: str, why: str) -> GraphCaptureError:
        fix = "put these lines into a submodule of their own, which is taken as a whole, or build the Chain by hand"
        return GraphCaptureError(op, locate({})[0], why, fix)


def _tensors_of(root: nn.Module) -> Iterator[tuple[int, str]]:
    """Dotted name of every tensor that a module holds, by id; for a tied one its first name."""
    seen: set[int] = set()
    for prefix, module in root.named_modules():
        for held in (module._parameters, module._buffers, module.__dict__):
            for name, tensor in held.items():
                if isinstance(tensor, Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield id(tensor), f"{prefix}.{name}".lstrip(".")


class _Functions(TorchFunctionMode):
    """Hands every call of a torch function to the recorder."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._recorder.function(func, args, kwargs or {})
