"""The training steps that bench_gradients.py compares; each row is one way to write the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from gradient_models import recompute
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lf_memory import TorchRegistrar, VariablePool
from lf_memory.gradients import offload, release

CLIP = 0.1
MICRO = 4
Step = Callable[[list[Tensor]], object]
Loss = Callable[[Tensor], Tensor]
Make = Callable[[Iterable[Tensor]], Optimizer]
Block = Callable[[], AbstractContextManager[Any]]


class Run:
    """A model and how it is trained.

    Args:
        model: returns the loss of a batch.
        options: of AdamW.
        autocast: dtype for the forward, or None.
        pool_bytes: of the pool for activations.
    """

    def __init__(
        self, model: nn.Module, options: dict[str, Any], autocast: torch.dtype | None, pool_bytes: int
    ) -> None:
        self.model = model
        self._options = {"lr": 1e-4, **options}
        self._autocast = autocast
        self._pool_bytes = pool_bytes
        self.handle: Any = None

    def optimizer(self, params: Iterable[Tensor]) -> Optimizer:
        """AdamW as every row uses it."""
        return AdamW(params, **self._options)

    def loss(self, ids: Tensor) -> Tensor:
        """Forward of one batch."""
        if self._autocast is None:
            out: Tensor = self.model(ids)
            return out
        with torch.autocast(ids.device.type, self._autocast):
            found: Tensor = self.model(ids)
        return found

    def pool(self) -> VariablePool:
        """For activations, page-locked where there is a device."""
        pin = TorchRegistrar() if next(self.model.parameters()).is_cuda else None
        first = None if pin else 0  # pages of the host alone come as they are needed
        return VariablePool(self._pool_bytes, pin=pin, shared=False, initial_bytes=first)


def ordinary(run: Run, *, clip: float | None = None, block: Block = contextlib.nullcontext) -> Step:
    """zero_grad, forward, backward, clip, step."""
    optimizer = run.optimizer(run.model.parameters())

    def step(micro: list[Tensor]) -> None:
        optimizer.zero_grad()
        for ids in micro:
            with block():
                loss = run.loss(ids) / len(micro)
            loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), clip)
        optimizer.step()

    return step


def tutorial(run: Run) -> Step:
    """PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward pass"."""
    optimizers = {p: run.optimizer([p]) for p in run.model.parameters()}

    def hook(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in run.model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return lambda micro: run.loss(micro[0]).backward()


def released(run: Run, mode: str, *, block: Block = contextlib.nullcontext, **options: Any) -> Step:
    """The loop with `release`."""
    run.handle = release(run.model, run.optimizer(run.model.parameters()), mode, **options)

    def step(micro: list[Tensor]) -> None:
        for ids in micro:
            with block():
                loss = run.loss(ids) / len(micro)
            loss.backward()
        run.handle.step()

    return step


def two_pass(run: Run) -> Step:
    """The loop with `release` in mode two_pass."""
    run.handle = release(run.model, run.optimizer(run.model.parameters()), "two_pass", clip=CLIP)
    return lambda micro: run.handle.step(lambda: run.loss(micro[0]).backward())


def checkpointed(run: Run) -> Step:
    """Each block is computed again in backward."""
    recompute(run.model)
    return ordinary(run)


def saved_on_cpu(run: Run) -> Step:
    """torch's own offload: every saved tensor, in pinned memory that is allocated anew."""
    pin = next(run.model.parameters()).is_cuda
    return ordinary(run, block=lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin))


def offloaded(run: Run, mode: str = "") -> Step:
    """`offload`, with the ordinary loop or a mode of release."""
    pool = run.pool()
    min_bytes = 1 << 20 if pool.pinned else 64 << 10  # the host's model is small

    def block() -> AbstractContextManager[Any]:
        return offload(pool, keep=run.model, min_bytes=min_bytes)

    return released(run, mode, block=block) if mode else ordinary(run, block=block)


# group -> (micro-batches a step, rows: name -> how to make the step); the first row is the ordinary loop
GROUPS: dict[str, tuple[int, dict[str, Callable[[Run], Step]]]] = {
    "no clipping": (1, {
        "ordinary loop": ordinary,
        "tutorial: an optimizer a parameter": tutorial,
        "release fused": lambda run: released(run, "fused"),
        "release exact": lambda run: released(run, "exact"),
        "release exact, keep bfloat16 (rounds)": lambda run: released(run, "exact", keep=torch.bfloat16),
    }),
    "clipped to norm 0.1": (1, {
        "ordinary loop": lambda run: ordinary(run, clip=CLIP),
        "release local_clip (other mathematics)": lambda run: released(run, "local_clip", clip=CLIP),
        "release exact": lambda run: released(run, "exact", clip=CLIP),
        "release two_pass": two_pass,
    }),
    "4 micro-batches": (MICRO, {
        "ordinary loop": ordinary,
        "release fused, buffer": lambda run: released(run, "fused", accumulation=MICRO, accumulate="buffer"),
        "release fused, state (other mathematics)": lambda run: released(
            run, "fused", accumulation=MICRO, accumulate="state"
        ),
        "release exact": lambda run: released(run, "exact", accumulation=MICRO),
    }),
    "activations": (1, {
        "ordinary loop": ordinary,
        "torch save_on_cpu": saved_on_cpu,
        "torch checkpoint of each block": checkpointed,
        "offload": offloaded,
        "offload, release fused": lambda run: offloaded(run, "fused"),
    }),
}  # fmt: skip
