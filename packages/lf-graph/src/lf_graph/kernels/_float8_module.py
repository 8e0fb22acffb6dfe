"""The linear layer on 8-bit products as a module, and the swap of a model's layers for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from lf_graph.kernels._checks import require_module
from lf_graph.kernels._float8 import MULTIPLE, Scaling, float8_linear


class Float8Linear(nn.Linear):
    """``nn.Linear`` by :func:`float8_linear`: same parameters, same names, same checkpoints.

    Attributes:
        scaling: "tensor" or "row".
    """

    scaling: Scaling = "tensor"

    @classmethod
    def of(cls, linear: nn.Linear, scaling: Scaling = "tensor") -> Self:
        """The layer with the parameters of ``linear``, which it shares.

        Raises:
            OperandError: it is no linear layer.
            ValueError: its sizes are no multiples of 16.
        """
        require_module("Float8Linear", "linear", linear, nn.Linear)
        if not fits(linear):
            raise ValueError(
                f"Float8Linear: {linear.in_features} x {linear.out_features}: 8-bit products want multiples of "
                f"{MULTIPLE}"
            )
        with torch.device("meta"):
            made = cls(linear.in_features, linear.out_features, linear.bias is not None)
        made.weight, made.bias, made.scaling = linear.weight, linear.bias, scaling
        made.train(linear.training)
        return made

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to bfloat16 [..., out_features]."""
        out: torch.Tensor = float8_linear(input, self.weight, self.bias, scaling=self.scaling)
        return out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scaling={self.scaling}"


def fits(linear: nn.Linear) -> bool:
    """Whether its sizes are multiples of 16."""
    return not (linear.in_features % MULTIPLE or linear.out_features % MULTIPLE)


def to_float8(
    model: nn.Module, choose: Callable[[str, nn.Linear], bool] | None = None, *, scaling: Scaling = "tensor"
) -> tuple[str, ...]:
    """Swap linear layers of a model for 8-bit ones that share their parameters; optimizers may exist already.

    Leave out what is sensitive or small: the output head, routers, and layers below about 1024 x 1024, whose rounding
    costs more than the product saves.

    Args:
        model: changed in place.
        choose: takes the name and the layer; default all. Only plain ``nn.Linear`` layers (no subclasses) whose sizes
            are multiples of 16 are asked about. A layer used at two places is swapped at both, if its first name is
            chosen.
        scaling: see :func:`float8_linear`.

    Returns:
        Names of the swapped layers.

    Raises:
        OperandError: the model is no module.
        ValueError: the model itself is such a layer (use ``Float8Linear.of``), a chosen layer has hooks, which the swap
            would lose, or an unknown scaling. Nothing is swapped then.
    """
    require_module("to_float8", "model", model)
    if scaling not in ("tensor", "row"):
        raise ValueError(f"to_float8: scaling={scaling!r}: tensor or row")
    if type(model) is nn.Linear:
        raise ValueError("to_float8: the model is one linear layer; use Float8Linear.of(model)")
    chosen = _chosen(model, choose)
    made: dict[nn.Module, nn.Module] = {linear: Float8Linear.of(linear, scaling) for linear in chosen}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and child in made:
                setattr(module, name, made[child])
    return tuple(chosen.values())


def _chosen(model: nn.Module, choose: Callable[[str, nn.Linear], bool] | None) -> dict[nn.Linear, str]:
    """Layers to swap and their first names."""
    found: dict[nn.Linear, str] = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or not fits(module) or not (choose is None or choose(name, module)):
            continue
        if any(getattr(module, hooks) for hooks in _HOOKS):
            raise ValueError(
                f"to_float8: {name} has hooks, which a swap would lose; swap first, or leave it out"
            )
        found[module] = name
    return found


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
