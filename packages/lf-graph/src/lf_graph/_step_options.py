"""What a ``TrainStep`` can be asked for, checked where it is asked; of batches, the first."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lf_graph._compile import CompileMode
from lf_graph._errors import GraphError
from lf_graph._static import require_constants, tensors_of

Release = Literal["exact", "fused"]
ANOTHER_SIGNATURE = (
    "drop or pad what differs (lf_graph.Buckets pads lengths), or allow one more graph with max_graphs=2"
)


def require_optimizer(optimizer: Any) -> None:
    """Refuse what cannot make a step by itself.

    Raises:
        GraphError: naming its type.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GraphError(f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise GraphError("LBFGS calls the loss again and reads it back in every step: use torch.optim.AdamW")


def require_options(
    *,
    accumulate: Any,
    max_graphs: Any,
    clip: Any,
    autocast: Any,
    compile: Any,
    recompute: Any,
    loss: Any,
    gate: Any,
    max_bytes: Any,
) -> None:
    """Refuse options that a step cannot have.

    Raises:
        GraphError: naming the option, what was given and what it takes.
    """
    for name, value in (("accumulate", accumulate), ("max_graphs", max_graphs)):
        if not isinstance(value, int) or value < 1:
            raise GraphError(f"{name}={value!r}: give a whole number, at least 1")
    if not isinstance(clip, (int, float)) or not math.isfinite(clip) or clip < 0:
        raise GraphError(f"clip={clip!r}: give the largest gradient norm, or 0 for no clipping")
    if loss is not None and not callable(loss):
        raise GraphError(f"loss={loss!r}: give a function that is called with the batch and returns the loss")
    if gate is not None and not isinstance(gate, bool):
        raise GraphError(f"gate={gate!r}: it is True, False, or None for on where possible")
    if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes < 0):
        raise GraphError(f"max_bytes={max_bytes!r}: give a whole number of bytes, or None for no budget")
    if compile not in get_args(CompileMode):
        raise GraphError(f"compile={compile!r}: it is one of {', '.join(map(repr, get_args(CompileMode)))}")
    _require_recompute(recompute, compile)
    if autocast is torch.float16:
        raise GraphError(
            "autocast=torch.float16 needs a gradient scaler, which reads its verdict back at every step: use "
            "torch.bfloat16"
        )
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise GraphError(f"autocast={autocast!r}: give a dtype such as torch.bfloat16, or None")


def _require_recompute(recompute: Any, compile: CompileMode) -> None:
    is_number = isinstance(recompute, (int, float)) and not isinstance(recompute, bool)
    if recompute not in ("default", "cheap") and not (is_number and 0 < recompute <= 1):
        raise GraphError(
            f"recompute={recompute!r}: it is 'default', 'cheap', or the share of memory that torch's partitioner may "
            "keep, above 0 and at most 1"
        )
    if recompute != "default" and compile == "off":
        raise GraphError(
            f"recompute={recompute!r} is how compiled code is cut: give compile='model' or 'blocks' with it, or "
            "checkpoint in the model"
        )


def require_release(
    release: Any, *, accumulate: int, clip: float, gate: bool | None, fused: bool | None, ranks: bool
) -> None:
    """Refuse what cannot be updated while its gradients are not all there.

    Raises:
        GraphError: naming the option in the way, and what can be done in its place.
    """
    if release not in get_args(Release):
        raise GraphError(f"release={release!r}: it is one of {', '.join(map(repr, get_args(Release)))}")
    if release == "exact":
        return
    obstacles = {
        f"clip={clip}": (bool(clip), "clips by the norm of all gradients"),
        "gate=True": (gate is True, "asks all gradients whether they are finite"),
        f"accumulate={accumulate}": (accumulate > 1, "sums gradients over micro-batches"),
        "reduce": (ranks, "sums gradients over ranks"),
        "fused=False": (
            fused is False,
            "leaves the update to the optimizer, which takes all gradients at once",
        ),
    }
    for option, (stands, why) in obstacles.items():
        if stands:
            raise GraphError(
                f"{option} {why}, and release='fused' frees each before the next is there: use release='exact'"
            )


def require_batch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors of a first batch, at least one.

    Raises:
        GraphError: there is none, one of them wants a gradient, or an argument hides values.
    """
    require_constants(args, kwargs)
    tensors = tensors_of(args, kwargs)
    if not tensors:
        raise GraphError("a batch needs at least one tensor")
    if any(t.requires_grad for t in tensors):
        raise GraphError(f"{name}: gradients of a batch do not leave the step; pass detach()ed tensors")
    return tensors
