"""torch.compile inside our graphs: repeated blocks, or the whole function, compiled while we capture.

Compilation is regional by default: the children of a model's ModuleLists are compiled one by one, and equal blocks
share the code. The graphs hold the compiled kernels; the model itself is left as it was.

A compiled block gives its output the strides that eager PyTorch would, and those follow its input's. So a transposed
input, such as the patches of a convolution, makes every block of the stack read and write transposed, and copy before
each matrix product. Blocks are given standard strides instead: one copy at the first, none at the others.

What a compiled forward keeps for its backward is decided where both are cut apart, by torch's partitioner.
``recompute`` says how it decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lf_graph._errors import GraphError

CompileMode = Literal["off", "blocks", "model"]
Recompute = Literal["default", "cheap"] | float
# Two of torch's rules for time against memory are lifted: that what a product of the backward reads is kept, and that
# what is read again far behind is. The rule against long chains stays: without it, every sum of a residual stream is
# made from the first one, and all of them are there when the backward begins.
_CHEAP = {"ban_recompute_materialized_backward": False, "ban_recompute_used_far_apart": False}
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


def partitioner_settings(recompute: Recompute) -> dict[str, Any]:
    """What ``recompute`` sets in ``torch._functorch.config`` while a graph is cut into forward and backward."""
    if recompute == "default":
        return {}
    return dict(_CHEAP) if recompute == "cheap" else {"activation_memory_budget": float(recompute)}


@contextmanager
def compiled(
    units: Sequence[nn.Module], options: dict[str, Any] | None = None, recompute: Recompute = "default"
) -> Iterator[list[Any]]:
    """Let ``units`` run compiled inside the ``with`` block; yields what must live as long as the graphs do."""
    import torch._dynamo

    kept: list[Any] = []
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT))
        for unit in units:
            fast = compile_function(unit.forward, options, recompute)
            kept.append(fast)
            stack.enter_context(replaced_forward(unit, with_standard_strides(fast)))
        yield kept


def compile_function(
    fn: Callable[..., Any], options: dict[str, Any] | None = None, recompute: Recompute = "default"
) -> Callable[..., Any]:
    """``fn`` compiled for fixed shapes, without graphs of Inductor's own."""
    wanted = {"triton.cudagraphs": False, **(options or {})}
    if recompute == "default":
        return torch.compile(fn, dynamic=False, options=wanted)
    return torch.compile(fn, dynamic=False, backend=InductorWith(wanted, partitioner_settings(recompute)))


@dataclass(frozen=True)
class InductorWith:
    """Inductor under settings of the partitioner, which are no options of its own.

    Equal ones share their code, as Dynamo asks whether backends are equal; others never get it.
    """

    options: dict[str, Any]
    settings: dict[str, Any]

    def __hash__(self) -> int:
        """Of the names alone: values of options need not be hashable."""
        return hash((*sorted(self.options), *sorted(self.settings)))

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile one graph of Dynamo's."""
        import torch._functorch.config
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(self.settings):
            return compile_fx(graph, inputs, config_patches=self.options)


def with_standard_strides(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, which is given contiguous copies in the place of transposed tensors; what it writes to them is kept."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        passed = [x.contiguous() if _is_transposed(x) else x for x in given]
        result = fn(*passed[: len(args)], **dict(zip(kwargs, passed[len(args) :], strict=True)))
        for original, copy in zip(given, passed, strict=True):
            if copy is not original and copy._version:
                original.copy_(copy)
        return result

    return call


def _is_transposed(x: Any) -> bool:
    """Whether a tensor is dense in another order of dimensions than the standard one or channels_last."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_contiguous():
        return False
    if torch.is_inference_mode_enabled():  # where no version tells whether a copy was written to
        return False
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return False
    if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return False
    order = sorted(range(x.dim()), key=lambda i: (x.stride(i), x.size(i)), reverse=True)
    return x.permute(order).is_contiguous()


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module run ``forward`` inside the ``with`` block."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own
