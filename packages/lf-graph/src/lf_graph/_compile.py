"""torch.compile inside our graphs: repeated blocks, or the whole function, compiled while we capture.

Compilation is regional by default: the children of a model's ModuleLists are compiled one by one, and equal blocks
share the code. The graphs hold the compiled kernels; the model itself is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from lf_graph._errors import GraphError

CompileMode = Literal["off", "blocks", "model"]
# one entry per block instance and per mode (with or without gradients); torch's default of 8 is for user code
_RECOMPILE_LIMIT = 256


def blocks_of(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """The repeated parts of models: children of the outermost ModuleLists, in order, each once."""
    found: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                found.setdefault(id(child), child)
            else:
                visit(child)

    for root in roots:
        visit(root)
    return list(found.values())


def require_no_own_graphs(modules: Iterable[nn.Module]) -> None:
    """Refuse models that were compiled with CUDA graphs of Inductor's own.

    Raises:
        GraphError: naming the module and the way out.
    """
    for root in modules:
        for name, module in root.named_modules():
            if _captures_by_itself(module):
                raise GraphError(
                    f"{name or type(module).__name__} is compiled with CUDA graphs of its own "
                    "(mode='reduce-overhead' or 'max-autotune'), which cannot run inside another graph: compile "
                    "it with mode='default' or 'max-autotune-no-cudagraphs', or leave compiling to "
                    "TrainStep(compile='blocks')"
                )


def _captures_by_itself(module: nn.Module) -> bool:
    config: dict[str, Any] | None = None
    if (context := getattr(module, "dynamo_ctx", None)) is not None:  # torch.compile(module)
        config = getattr(context, "compiler_config", None)
    elif (call := getattr(module, "_compiled_call_impl", None)) is not None:  # module.compile()
        config = call.get_compiler_config() if hasattr(call, "get_compiler_config") else None
    return bool(config and config.get("triton.cudagraphs"))


@contextmanager
def compiled(units: Sequence[nn.Module], options: dict[str, Any] | None = None) -> Iterator[list[Any]]:
    """Let ``units`` run compiled inside the ``with`` block; yields what must live as long as the graphs do."""
    import torch._dynamo

    kept: list[Any] = []
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT))
        for unit in units:
            fast = compile_function(unit.forward, options)
            kept.append(fast)
            stack.enter_context(_replaced_forward(unit, fast))
        yield kept


def compile_function(fn: Callable[..., Any], options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """``fn`` compiled for fixed shapes, without graphs of Inductor's own."""
    wanted = {"triton.cudagraphs": False, **(options or {})}
    return torch.compile(fn, dynamic=False, options=wanted)


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own
