"""What torch.compile sees of operators made of kernels: traced here as for a GPU, in a process without one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import compiling
import torch
from torch import Tensor


def calls_of(names: list[str], dynamic: bool, table: str = "traced") -> dict[str, list[list[str]]]:
    """Calls of the forward and of the backward graph of operators of a module's ``operators()``."""
    found: dict[str, list[list[str]]] = compiling.call("traced", "_calls_of", names, dynamic, table)
    return found


def _calls_of(names: list[str], dynamic: bool, table: str) -> dict[str, list[list[str]]]:
    pretend_a_gpu()
    known = importlib.import_module(table).operators()
    return {name: trace(*known[name], dynamic) for name in names}


def operators() -> dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]]:
    """Each with the shapes of its inputs."""
    from lf_graph import kernels as k

    cos = torch.ones(8, 16)
    row, stream, sample = (64,), (2, 3, 64), (2, 64)
    return {
        "rms_norm": (k.rms_norm, [stream, row]),
        "layer_norm": (k.layer_norm, [stream, row, row]),
        "add_rms_norm": (k.add_rms_norm, [stream, stream, row]),
        "add_layer_norm": (k.add_layer_norm, [stream, stream, row, row]),
        "layer_norm_modulate": (k.layer_norm_modulate, [stream, sample, sample]),
        "add_layer_norm_modulate": (k.add_layer_norm_modulate, [stream, stream, sample, sample]),
        "gated_residual": (k.gated_residual, [stream, stream, sample]),
        "qk_norm_rope": (
            lambda q, v, a, b: k.qk_norm_rope(q, v, a, b, cos, cos),
            [(2, 3, 4, 48), (2, 3, 2, 48), (48,), (48,)],
        ),
        "rope": (lambda q, v: k.rope(q, v, cos, cos), [(2, 3, 4, 48), (2, 3, 2, 48)]),
    }


def pretend_a_gpu() -> None:
    """Lets kernels be chosen for CPU tensors and analysed for sm_90; nothing is ever launched."""
    import triton
    from triton.backends.compiler import GPUTarget

    from lf_graph.kernels import _choice

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

    triton.runtime.driver.set_active(Driver())
    _choice._obstacle = lambda device: None


def trace(fn: Callable[..., Any], shapes: list[tuple[int, ...]], dynamic: bool) -> list[list[str]]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(
            [
                getattr(n.target, "__name__", str(n.target))
                for n in graph.graph.nodes
                if n.op == "call_function"
            ]
        )
        (output,) = (n for n in graph.graph.nodes if n.op == "output")
        values = [None if n is None else n.meta["val"] for n in output.args[0]]
        return make_boxed_func(lambda *_: [_zeros(v) for v in values])

    inputs = [torch.ones(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    outputs = torch.compile(fn, fullgraph=True, dynamic=dynamic, backend=backend)(*inputs)
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(o.float().sum() for o in several).backward()
    return graphs


def _zeros(value: Any) -> Any:
    """A stand-in for what the graph would have computed."""
    if not isinstance(value, Tensor):
        return None if value is None else _known(value)
    return torch.zeros([_known(n) for n in value.shape], dtype=value.dtype)


def _known(n: int | torch.SymInt) -> int:
    return n if isinstance(n, int) else int(n.node.hint)
