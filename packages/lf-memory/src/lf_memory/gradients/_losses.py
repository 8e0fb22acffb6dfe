"""What the caller's function is, what it returns, and which modules it trains."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ._errors import PlanError

COMPILED = ("_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl")  # what torch.compile leaves
Models = nn.Module | Sequence[nn.Module]


def losses_of(result: Any) -> list[torch.Tensor]:
    """The scalars of a result that require gradients; of an object with a `loss` (Hugging Face), that alone."""
    result = getattr(result, "loss", result)
    losses = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    scalars = [loss for loss in losses if loss.numel() == 1]
    if not scalars:
        what = f"only tensors of shape {[tuple(loss.shape) for loss in losses]}" if losses else "no tensor"
        raise PlanError(f"the function returns {what} that requires gradients: return the scalar loss")
    return scalars


def check_runs(fn: Callable[..., Any], models: Sequence[nn.Module]) -> None:
    """Refuse what cannot be recorded as it runs.

    Raises:
        PlanError: gradients are off, or something is compiled.
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise PlanError("gradients are switched off here: call this outside of no_grad and inference_mode")
    parts = [
        ("the function", fn),
        *((name, part) for model in models for name, part in model.named_modules()),
    ]
    for name, part in parts:
        if any(getattr(part, mark, None) is not None for mark in COMPILED):
            raise PlanError(
                f"{name or 'the model'} is compiled: what is recorded would be the eager code, and not the compiler's "
                "memory; plan what was compiled (._orig_mod of a module) for that"
            )


def models_of(fn: Callable[..., Any], model: Models | None) -> list[nn.Module]:
    """The modules whose parameters get gradients; `fn` itself if it is one and no other is named."""
    if model is None:
        model = fn if isinstance(fn, nn.Module) else ()
    models = [model] if isinstance(model, nn.Module) else list(model)
    for one in models:
        _refuse(one)
    return models


def named_parameters(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters, each once; with several modules, names begin with the number of the module."""
    for prefix, one in prefixed(models):
        yield from one.named_parameters(prefix=prefix)


def prefixed(models: Sequence[nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    """Modules with what distinguishes their names."""
    return [("", models[0])] if len(models) == 1 else [(str(at), one) for at, one in enumerate(models)]


def _refuse(model: nn.Module) -> None:
    for name, part in model.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise PlanError(
                f"{name or 'the model'} is DistributedDataParallel, whose reducer waits for real gradients: plan its "
                '.module, with mode "fused" for gradient_as_bucket_view=True, else with "all-alive"'
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "_local_tensor"):
            raise PlanError(f"{name} is a DTensor: plan the model before it is sharded")
