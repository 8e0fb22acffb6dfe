"""verify: one real step beside the plan."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ._errors import PlanError
from ._hooks import following
from ._losses import Models, check_runs, losses_of, models_of
from ._measure import Measured, measure
from ._plan import MIB, Plan
from ._real import RealWorld, clear
from ._walk import walk

MEASURES = ("gradient_peak_bytes", "backward_peak_bytes", "saved_bytes", "forward_peak_bytes")


@dataclass(frozen=True)
class Verification:
    """A plan and what one step took.

    Attributes:
        plan: what was predicted.
        measured: what was allocated.
        same_graph: the step had the autograd graph of the plan. If not, shapes or policy are others, or the function
            treats fake tensors in its own way: then plan with tensors="real".
    """

    plan: Plan
    measured: Measured
    same_graph: bool

    def ratio(self, measure: str = "gradient_peak_bytes") -> float:
        """Measured by predicted bytes; 1.0 if the plan is exact."""
        predicted, measured = getattr(self.plan, measure), getattr(self.measured, measure)
        return measured / predicted if predicted else float(measured == 0) or float("inf")

    def within(self, tolerance: float = 0.02) -> bool:
        """Whether both peaks of the backward pass are as predicted, within this share."""
        known = ["gradient_peak_bytes"] + ["backward_peak_bytes"] * (self.plan.method != "graph walk")
        return all(abs(self.ratio(name) - 1) <= tolerance for name in known)

    def __str__(self) -> str:
        lines = [f"{'MiB':22s}{'predicted':>12s}{'measured':>12s}{'ratio':>9s}"]
        for name in MEASURES:
            predicted, measured = getattr(self.plan, name), getattr(self.measured, name)
            label = name.removesuffix("_bytes").replace("_", " ")
            lines.append(f"{label:22s}{predicted / MIB:12.2f}{measured / MIB:12.2f}{self.ratio(name):9.4f}")
        if not self.same_graph:
            lines.append(
                'the step had another graph than the plan: other inputs, or a plan for tensors="real" is needed'
            )
        lines.append(f"workspaces and caches, apart: {self.measured.workspace_bytes / MIB:.2f} MiB")
        return "\n".join(lines)


def verify(plan: Plan, fn: Callable[..., Any], *args: Any, model: Models | None = None) -> Verification:
    """Run one real step as the plan's policy says, and measure what it allocates.

    Forward and backward pass run once (on CUDA twice, the first time unmeasured); nothing is stepped. Gradients,
    buffers and random state are afterwards what they were before.

    Args:
        plan: of `predict` with the same function, arguments and model.
        fn, args, model: as for `predict`, but real.

    Returns:
        Predicted and measured bytes. On CPU those of torch's profiler, on CUDA those asked of the caching allocator.

    Raises:
        PlanError: the plan is of another model, or something would act on the gradients.
    """
    models = models_of(fn, model)
    check_runs(fn, models)
    world = RealWorld(models, args)
    names = {id(parameter): name for name, parameter in world.parameters.items()}
    completed: set[str] = set()
    graphs: list[str] = []

    def forward() -> list[torch.Tensor]:
        losses = losses_of(fn(*args))
        graphs.append(walk(losses, names).fingerprint())
        return losses

    def backward(losses: list[torch.Tensor]) -> None:
        with following(world.parameters, plan.policy, lambda name, _: completed.add(name)):
            torch.autograd.backward(losses)
        clear(world.parameters.values())

    measured = world.run(lambda: measure(forward, backward, torch.device(plan.device)))
    _refuse_strange(plan, completed)
    return Verification(plan, measured, graphs[-1] == plan.graph)


def _refuse_strange(plan: Plan, completed: set[str]) -> None:
    planned = {one.name for one in plan.placements}
    if planned != completed:
        raise PlanError(
            f"the plan is of another model: gradients of {sorted(planned ^ completed)[:3]} are in one of them only"
        )
