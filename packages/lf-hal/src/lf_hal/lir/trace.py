"""From a torch module to a graph, by way of ``torch.export``'s IR before any decomposition.

That IR still has linear, attention, the norms and convolutions whole, which later passes and kernels want. Torch is
imported only when a function here is called.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from lf_hal.hardware import KEY, hardware_of
from lf_hal.lir import _lower_math, _lower_nn, _lower_rnn, _lower_shape  # noqa: F401  (they register their rules)
from lf_hal.lir._alias import Aliases, writes
from lf_hal.lir._lower import RULES, Builder, Call, RefusedError, dtype_of
from lf_hal.lir.errors import (
    DynamicShapeError,
    ExportFailedError,
    LirError,
    TrainingModeError,
    Unsupported,
    UnsupportedOperatorsError,
)
from lf_hal.lir.graph import FLOATS, Graph, TensorType, Value
from lf_hal.lir.patterns import recognise
from lf_hal.lir.rewrite import remove_dead
from lf_hal.lir.verify import NAME, verify

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

__all__ = ["trace", "trace_program", "weights_of"]

LARGEST_CONSTANT = 1 << 16  # elements of a tensor that the code itself makes; larger ones should be buffers
IGNORED = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten._assert_async.msg")


def trace(module: torch.nn.Module, example_inputs: Sequence[Any], name: str | None = None) -> Graph:
    """The graph of ``module`` for inputs of these shapes and types.

    Args:
        module: in eval mode. ``@hardware`` marks on it, on parts of it and on functions are kept per op.
        example_inputs: the arguments of ``forward``: tensors, or tuples, lists and dicts of them.
        name: of the graph; that of the module's class if None.

    Returns:
        A verified graph. Weights have the names of the state dict; tied ones the first of their names.

    Raises:
        TrainingModeError: a part of the module is in training mode.
        ExportFailedError: torch could not export it.
        DynamicShapeError: a shape follows data.
        UnsupportedOperatorsError: operators without a form in LIR, all of them at once.
    """
    import torch

    for path, part in module.named_modules():
        if part.training:
            raise TrainingModeError(path)
    try:
        with torch.no_grad(), torch.fx.traceback.preserve_node_meta(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, tuple(example_inputs), strict=False)
    except LirError:
        raise
    except Exception as e:
        raise ExportFailedError(
            f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e) else ''}"
        ) from e
    return trace_program(program, name or type(module).__name__, module)


def trace_program(
    program: ExportedProgram, name: str = "program", module: torch.nn.Module | None = None
) -> Graph:
    """As :func:`trace`, for what ``torch.export.export`` or ``torch.export.load`` gave.

    Args:
        module: what was exported, for its ``@hardware`` marks and tied weights; a saved program has neither.
    """
    _refuse_dynamic(program)
    graph = _Tracer(program, module).graph(name)
    verify(graph)
    return graph


def weights_of(source: torch.nn.Module | ExportedProgram, graph: Graph) -> dict[str, NDArray[Any]]:
    """Arrays of the graph's weights, contiguous, from the module or program it was traced from.

    bfloat16 comes as its bits, uint16.
    """
    import torch

    found: Mapping[str, torch.Tensor]
    if isinstance(source, torch.nn.Module):
        found = {
            **dict(source.named_parameters(remove_duplicate=False)),
            **dict(source.named_buffers(remove_duplicate=False)),
        }
    else:
        found = {**source.state_dict, **source.constants}
    return {v.name: array_of(found[v.name]) for v in graph.weights}


def array_of(t: torch.Tensor) -> NDArray[Any]:
    import torch

    t = t.detach().cpu().contiguous()
    return (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).numpy()


def _refuse_dynamic(program: ExportedProgram) -> None:
    for node in program.graph.nodes:
        for t in _tensors(node.meta.get("val")):
            if not all(isinstance(n, int) for n in t.shape):
                raise DynamicShapeError(node.name, f"[{', '.join(map(str, t.shape))}]")


def _tensors(val: Any) -> list[Any]:
    if isinstance(val, (list, tuple)):
        return [t for part in val for t in _tensors(part)]
    return [val] if hasattr(val, "shape") else []


class _Tracer:
    def __init__(self, program: ExportedProgram, module: torch.nn.Module | None) -> None:
        self._program, self._module = program, module
        self._nodes = list(program.graph.nodes)
        self._env: dict[Any, Any] = {}
        self._unsupported: list[Unsupported] = []
        self._aliases = Aliases(self._nodes)
        self._inputs: list[Value] = []
        self._weights: dict[str, Value] = {}
        self._first_name = _first_names(module) if module is not None else {}
        stored = {spec.target for spec in program.graph_signature.input_specs if spec.target is not None}
        self._builder = Builder({self._first_name.get(name, name) for name in stored})

    def graph(self, name: str) -> Graph:
        for node, spec in zip(self._nodes, self._program.graph_signature.input_specs, strict=False):
            self._attempt(node, lambda n=node, s=spec: self._placeholder(n, s))
        for node in self._nodes[len(self._program.graph_signature.input_specs) :]:
            if node.op == "call_function":
                self._attempt(node, lambda n=node: self._call(n))
            elif node.op == "get_attr":
                self._attempt(node, lambda n=node: self._get_attr(n))
        outputs = self._outputs()
        if self._unsupported:
            raise UnsupportedOperatorsError(self._unsupported)
        graph = Graph(
            name,
            tuple(self._inputs),
            tuple(self._weights.values()),
            tuple(self._builder.constants),
            tuple(self._builder.ops),
            outputs,
        )
        return remove_dead(recognise(remove_dead(graph)))

    # inputs, weights, outputs

    def _placeholder(self, node: Any, spec: Any) -> Any:
        kind, target = spec.kind.name, spec.target
        if kind == "USER_INPUT":
            if not hasattr(node.meta.get("val"), "shape"):
                return getattr(spec.arg, "value", None)  # a Python number or None, which the export has fixed
            self._inputs.append(Value(self._builder.name(node.name), _type_of(node)))
            return self._inputs[-1]
        if kind == "CONSTANT_TENSOR" and target not in self._first_name:
            return self._constant(self._program.constants[target])
        if kind not in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
            raise RefusedError(f"an input of kind {kind}")
        name = self._first_name.get(target, target)
        if not NAME.fullmatch(name):
            raise RefusedError(f"weight name {name!r}: use letters, digits, _ . and -")
        if name not in self._weights:
            self._weights[name] = Value(name, _type_of(node))
        return self._weights[name]

    def _constant(self, tensor: Any) -> Value:
        if tensor.numel() > LARGEST_CONSTANT:
            raise RefusedError(
                f"a tensor of {tensor.numel()} elements made by the code; register it as a buffer"
            )
        dtype = dtype_of(tensor.dtype)
        flat = tensor.detach().cpu().reshape(-1)
        data = (flat.float() if dtype in FLOATS else flat).tolist()
        return self._builder.constant(dtype, tuple(tensor.shape), tuple(data))

    def _get_attr(self, node: Any) -> Value:
        found: Any = self._program.graph_module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        if not hasattr(found, "numel"):
            raise RefusedError("a graph within the graph")
        return self._constant(found)

    def _outputs(self) -> tuple[str, ...]:
        outputs = []
        node = self._nodes[-1]
        for spec, arg in zip(self._program.graph_signature.output_specs, node.args[0], strict=True):
            if spec.kind.name != "USER_OUTPUT":
                reason = f"the module changes {spec.target}; a graph is a function of its inputs"
                self._refuse(spec.kind.name, arg, reason)
            elif isinstance(self._env.get(arg), Value):
                outputs.append(self._env[arg].name)
            elif not hasattr(arg, "op") or arg in self._env:
                self._refuse("output", None, f"output {arg!r} is no tensor")
        return tuple(outputs)

    # operators

    def _attempt(self, node: Any, make: Any) -> None:
        """Put what ``make`` gives for ``node``, or note why not; what needs it later is passed over."""
        if any(n not in self._env for n in node.all_input_nodes):
            return
        try:
            self._env[node] = make()
        except RefusedError as e:
            self._refuse(str(node.target), node, str(e))

    def _refuse(self, operator: str, node: Any, reason: str) -> None:
        module = [entry[0] for entry in getattr(node, "meta", {}).get("nn_module_stack", {}).values()]
        self._unsupported.append(Unsupported(operator, module[-1] if module else "", _source(node), reason))

    def _call(self, node: Any) -> Any:
        target = str(node.target)
        if target in IGNORED:
            return None
        if getattr(node.target, "__name__", "") == "getitem":
            return self._env[node.args[0]][node.args[1]]
        if target not in RULES and not _tensors(node.meta.get("val")) and not node.target._schema.is_mutable:
            return node.meta.get("val")  # an element type or a number, which the export has fixed
        if target not in RULES:
            raise RefusedError("no such operator in LIR")
        renamed = self._aliases.renamed_by(node) if writes(node) else []
        call = Call(self._builder, node.name, self._affinity(node), self._arguments(node), node.meta["val"])
        result = RULES[target](call)
        self._check(node, result)
        for same in renamed:
            self._env[same] = result
        return result

    def _check(self, node: Any, result: Any) -> None:
        """Torch has said the type of every result, which holds the rules to it."""
        for value, t in zip(
            result if isinstance(result, list) else [result], _tensors(node.meta["val"]), strict=True
        ):
            expected = TensorType(dtype_of(t.dtype), tuple(t.shape))
            if value.type != expected:
                raise RefusedError(f"traced to {value.type}, where torch has {expected}; please report this")

    def _arguments(self, node: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i, argument in enumerate(node.target._schema.arguments):
            if i < len(node.args):
                given = node.args[i]
            else:
                given = node.kwargs.get(argument.name, argument.default_value)
            found[argument.name] = self._resolved(given)
        return found

    def _resolved(self, given: Any) -> Any:
        if isinstance(given, (list, tuple)):
            return [self._resolved(g) for g in given]
        return self._env[given] if hasattr(given, "all_input_nodes") else given

    def _affinity(self, node: Any) -> str | None:
        by_function = (node.meta.get("custom") or {}).get(KEY)
        if by_function is not None or self._module is None:
            return by_function
        for path, *_ in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
            found = hardware_of(_part(self._module, path))
            if found is not None:
                return found
        return None


def _part(module: torch.nn.Module, path: str) -> object:
    """The submodule at a path of torch's stack, which ends in ``@n`` for a second call of it."""
    try:
        return module.get_submodule(path.partition("@")[0])
    except AttributeError:
        return None


def _type_of(node: Any) -> TensorType:
    val = node.meta["val"]
    return TensorType(dtype_of(val.dtype), tuple(val.shape))


def _source(node: Any) -> str:
    """Innermost file, line and code of a node that is not torch's own."""
    lines = (getattr(node, "meta", {}).get("stack_trace") or "").strip().splitlines()
    frames = [
        (line.strip(), lines[i + 1].strip() if i + 1 < len(lines) else "")
        for i, line in enumerate(lines)
        if line.strip().startswith("File ")
    ]
    own = [f for f in frames if "/torch/nn/" not in f[0]] or frames
    return f"{own[-1][0]}: {own[-1][1]}" if own else ""


def _first_names(module: torch.nn.Module) -> dict[str, str]:
    """The name under which each parameter and buffer is known, for each of its names."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for name, tensor in (pair for kind in named for pair in kind):
        names[name] = first.setdefault(id(tensor), name)
    return names
