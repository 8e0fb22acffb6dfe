"""The optimizer's part of a step, as device operations that a graph can hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lf_graph._adamw import FusedAdamW, Launch
from lf_graph._backend import Backend
from lf_graph._errors import GraphError
from lf_graph._flat import FlatParameters, OptimizerError, check_optimizer
from lf_graph._sandbox import restored


class Update(Protocol):
    """What a training step needs from an optimizer.

    Attributes:
        names, parameters: in one order.
        norm: float32 [], global gradient norm of the last update before clipping (NaN when nothing needed it).
        skipped: int64 [], updates left out because the norm was not finite.
        kind: which implementation, and why.
    """

    names: Sequence[str]
    parameters: Sequence[Tensor]
    norm: Tensor
    skipped: Tensor
    kind: str

    def shadows(self) -> dict[Tensor, Tensor]:
        """Parameters and the bf16 tensors the forward reads instead."""
        ...

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Where gradients will lie."""
        ...

    def rehearse(self, backend: Backend, scale: Tensor) -> None:
        """Run everything once without effect, so that nothing lazy is left for the capture."""
        ...

    def step(self, scale: Tensor) -> None:
        """One update of gradients times ``scale`` ([] on the device); only device operations."""
        ...

    def before_replay(self) -> None:
        """Bring what the host knows (learning rates) to the device."""
        ...

    def before_forward(self) -> None:
        """Check that memory is where it was; follow changes that others made to the parameters."""
        ...


def _versions(parameters: Iterable[Tensor]) -> int:
    return sum(p._version for p in parameters)


class FlatUpdate:
    """Adam and AdamW on flat fp32 masters, with bf16 shadows for the parameters named."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shadowed: Iterable[Tensor],
        names: dict[int, str],
        clip: float,
        gate: bool,
        launch: Launch | None,
    ) -> None:
        known = [(names[id(p)], p) for g in optimizer.param_groups for p in g["params"] if id(p) in names]
        self.flat = FlatParameters(optimizer, shadowed, names=known)
        self.fused = FusedAdamW(self.flat, clip=clip, gate=gate, launch=launch)
        self.parameters: Sequence[Tensor] = self.flat.parameters
        self.names: Sequence[str] = [s.name for s in self.flat.layout.slots]
        self.norm, self.skipped = self.fused.norm, self.fused.skipped
        shadows = [p for p in self.parameters if self.flat.has_shadow(p)]
        self._shadows: dict[Tensor, Tensor] = {p: nn.Parameter(self.flat.shadow_of(p)) for p in shadows}
        self.kind = (
            f"flat AdamW ({self.fused.implementation}: {self.fused.reason}), {len(shadows)} bf16 shadows"
        )
        self._version = _versions(self.parameters)

    def shadows(self) -> dict[Tensor, Tensor]:
        """See :class:`Update`."""
        return self._shadows

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """See :class:`Update`."""
        self.fused.set_gradients(gradients)

    def rehearse(self, backend: Backend, scale: Tensor) -> None:
        """A step whose gate is shut: a scale of NaN makes the norm NaN."""
        if not self.fused.gate:
            with restored(backend, self._state()):
                self.fused.step(scale)
            return
        with restored(backend, [self.skipped, self.norm]):
            self.fused.step(torch.full_like(scale, float("nan")))

    def _state(self) -> list[Tensor]:
        flat = self.flat
        return [flat.master, flat.exp_avg, flat.exp_avg_sq, flat.shadow, flat.steps, self.norm, self.skipped]

    def step(self, scale: Tensor) -> None:
        """See :class:`Update`."""
        self.fused.step(scale)

    def before_replay(self) -> None:
        """See :class:`Update`."""
        self.fused.refresh_hyper()

    def before_forward(self) -> None:
        """Refresh the shadows when somebody wrote to the masters (replays do not count as writes)."""
        self.flat.verify_addresses()
        version = _versions(self.parameters)
        if version != self._version:
            self.flat.refresh_shadow()
            self._version = version


class StockUpdate:
    """Any torch optimizer whose step is made of device operations (``capturable=True``, or SGD)."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: dict[int, str], clip: float, gate: bool | None
    ) -> None:
        if gate:
            raise GraphError(
                f"gate=True needs torch.optim.AdamW or Adam: {type(optimizer).__name__} cannot leave a step out "
                "without a read-back; use gate=None, and check the reported norm"
            )
        found = {id(p): p for g in optimizer.param_groups for p in g["params"] if p.requires_grad}
        self.optimizer, self.clip = optimizer, clip
        self.parameters: Sequence[Tensor] = list(found.values())
        self.names: Sequence[str] = [names.get(i, f"parameter {n}") for n, i in enumerate(found)]
        device = self.parameters[0].device
        self.norm = torch.full((), float("nan"), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.kind = f"{type(optimizer).__name__} as it is, no shadows, no gate"
        self._learning_rates = self._device_rates(device)
        self._addresses = [p.data_ptr() for p in self.parameters]

    def _device_rates(self, device: torch.device) -> list[Tensor]:
        """Learning rates as device tensors that groups hold during the capture: a number would be frozen."""
        return [torch.tensor(float(g["lr"]), device=device) for g in self.optimizer.param_groups]

    def shadows(self) -> dict[Tensor, Tensor]:
        """None: the optimizer writes its parameters only."""
        return {}

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Attach them as ``.grad``."""
        for name, parameter, grad in zip(self.names, self.parameters, gradients, strict=True):
            if grad is None:
                raise OptimizerError(name, "it has no gradient", "freeze it, or use it in the loss")
            parameter.grad = grad

    def rehearse(self, backend: Backend, scale: Tensor) -> None:
        """A real step, undone; it makes the optimizer's state."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        made = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        with restored(backend, [*self.parameters, *grads, *made, self.norm]):
            self.step(scale)
        fresh = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        with torch.no_grad():
            for tensor in fresh:
                if not any(tensor is t for t in made):
                    tensor.zero_()  # what a step makes starts at zero in every torch optimizer

    def step(self, scale: Tensor) -> None:
        """Scale, clip and update."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_mul_(grads, scale)
        norm = torch.nn.utils.get_total_norm(grads)
        self.norm.copy_(norm)
        if self.clip:
            torch._foreach_mul_(grads, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        rates = [g["lr"] for g in self.optimizer.param_groups]
        try:
            for group, rate in zip(self.optimizer.param_groups, self._learning_rates, strict=True):
                group["lr"] = rate
            self.optimizer.step()
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def before_replay(self) -> None:
        """Write learning rates; other hyper-parameters are frozen at their first values."""
        for group, rate in zip(self.optimizer.param_groups, self._learning_rates, strict=True):
            rate.fill_(group["lr"]) if not isinstance(group["lr"], Tensor) else rate.copy_(group["lr"])

    def before_forward(self) -> None:
        """Parameters must be where they were."""
        for name, parameter, address in zip(self.names, self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise OptimizerError(name, "its data was replaced", "change it in place, with copy_()")


def make_update(
    optimizer: torch.optim.Optimizer,
    shadowed: Iterable[Tensor],
    names: dict[int, str],
    *,
    clip: float,
    gate: bool | None,
    fused: bool | None,
    launch: Launch | None = None,
) -> Any:
    """The flat AdamW where it fits, else the optimizer as it is; ``fused`` True or False insists."""
    if fused is not False:
        try:
            check_optimizer(optimizer)
        except OptimizerError:
            if fused:
                raise
        else:
            return FlatUpdate(optimizer, shadowed, names, clip, gate is not False, launch)
    return StockUpdate(optimizer, names, clip, gate)
