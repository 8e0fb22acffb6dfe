"""The optimizer's part of a step, as device operations that a graph can hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lf_graph._adamw import FusedAdamW, Launch
from lf_graph._backend import Backend
from lf_graph._errors import AddressError, GraphCaptureError, GraphError
from lf_graph._flat import FlatParameters, OptimizerError, check_optimizer
from lf_graph._sandbox import aliases, restored
from lf_graph._step_hooks import without_hooks


class Update(Protocol):
    """What a training step needs from an optimizer.

    Attributes:
        names, parameters: in one order.
        optimizer: whose parameters and state are updated.
        norm: float32 [], global gradient norm of the last update before clipping (NaN when nothing needed it).
        skipped: int64 [], updates left out because the norm was not finite.
        kind: which implementation, and why.
    """

    optimizer: torch.optim.Optimizer
    names: Sequence[str]
    parameters: Sequence[Tensor]
    norm: Tensor
    skipped: Tensor
    kind: str

    def stand_ins(self) -> dict[Tensor, Tensor]:
        """What the captured forward reads in the place of each parameter."""
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

    def before_forward(self) -> None:
        """Follow changes that others made to the parameters. The device waits for this: it must be short."""
        ...

    def refresh(self) -> None:
        """Follow changes to the parameters that nothing tells of, before the next forward."""
        ...

    def before_replay(self) -> None:
        """Check that memory is where it was, and bring what the host knows (learning rates) to the device."""
        ...

    def close(self) -> None:
        """Leave the optimizer to others; parameters and state stay where they are."""
        ...


_VERSION = attrgetter("_version")


def _versions(parameters: Iterable[Tensor]) -> int:
    return sum(map(_VERSION, parameters))


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
        self.optimizer = optimizer
        self.parameters: Sequence[Tensor] = self.flat.parameters
        self.names: Sequence[str] = [s.name for s in self.flat.layout.slots]
        self.norm, self.skipped = self.fused.norm, self.fused.skipped
        shadows = {
            p: nn.Parameter(self.flat.shadow_of(p)) for p in self.parameters if self.flat.has_shadow(p)
        }
        self._stand_ins = aliases(self.parameters) | shadows
        self.kind = (
            f"flat AdamW ({self.fused.implementation}: {self.fused.reason}), {len(shadows)} bf16 shadows"
        )
        self._version = _versions(self.parameters)

    def stand_ins(self) -> dict[Tensor, Tensor]:
        """The bf16 shadow where there is one, else the same memory."""
        return self._stand_ins

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
        self.flat.verify_addresses()
        self.fused.refresh_hyper()

    def before_forward(self) -> None:
        """Refresh the shadows when somebody wrote to the masters (replays do not count as writes)."""
        version = _versions(self.parameters)
        if version != self._version:
            self.flat.refresh_shadow()
            self._version = version

    def refresh(self) -> None:
        """See :class:`Update`."""
        self._version = -1

    def close(self) -> None:
        """See :class:`Update`."""
        self.flat.close()


class _FirstValues(TorchDispatchMode):
    """Remembers what tensors held before the first operator that wrote to them.

    An optimizer makes its state in its first step and writes to it at once; what it started from (zeros, ones, a
    learning rate) can only be seen in between. Tensors that were zero take no memory here.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {t.data_ptr() for t in known}
        self._first = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            for leaf in tree_leaves((args, kwargs or {})):
                if (
                    isinstance(leaf, Tensor)
                    and leaf not in self._first
                    and leaf.data_ptr() not in self._known
                ):
                    self._first[leaf] = leaf.clone() if leaf.any() else None
        return func(*args, **(kwargs or {}))

    def rewind(self, tensor: Tensor) -> None:
        """Give a tensor the value it had before it was written to; one never written to keeps its own."""
        if tensor in self._first:
            value = self._first[tensor]
            tensor.zero_() if value is None else tensor.copy_(value)


def _constants(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that a graph holds as they were."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names", "lr", "initial_lr")}


class StockUpdate:
    """Any torch optimizer whose step is made of device operations (``capturable=True``, or SGD).

    Learning rates are device tensors during the capture and follow the schedule. SGD takes one as a tensor only in
    its fused form, which is used whatever the group says.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: dict[int, str], clip: float, gate: bool | None
    ) -> None:
        if gate:
            raise GraphError(
                f"gate=True needs torch.optim.AdamW or Adam: {type(optimizer).__name__} cannot leave a step out "
                "without a read-back; use gate=None, and check the reported norm"
            )
        found = {id(p): p for g in optimizer.param_groups for p in g["params"] if p.requires_grad}
        if not found:
            raise OptimizerError(
                "optimizer", "it has no trainable parameter", "give it parameters that require grad"
            )
        self.optimizer, self.clip = optimizer, clip
        self._is_sgd = isinstance(optimizer, torch.optim.SGD)
        if self._is_sgd and any(g["dampening"] and g["momentum"] for g in optimizer.param_groups):
            raise OptimizerError(
                "dampening", "torch's SGD leaves it out of the first step", "use dampening=0"
            )
        self.parameters: Sequence[Tensor] = list(found.values())
        on_cuda = self.parameters[0].device.type == "cuda"
        if on_cuda and any(not g.get("capturable", True) for g in optimizer.param_groups):
            kind = type(optimizer).__name__
            raise OptimizerError(kind, "it counts its steps on the host", "build it with capturable=True")
        self.names: Sequence[str] = [names.get(i, f"parameter {n}") for n, i in enumerate(found)]
        device = self.parameters[0].device
        self.norm = torch.full((), float("nan"), dtype=torch.float32, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.kind = f"{type(optimizer).__name__} as it is, no shadows, no gate"
        self._rates = [
            torch.tensor(float(g["lr"]), dtype=torch.float32, device=device) for g in optimizer.param_groups
        ]
        self._frozen = [_constants(g) for g in optimizer.param_groups]
        self._addresses = [p.data_ptr() for p in self.parameters]
        self._stand_ins = aliases(self.parameters)
        self._gradients: list[Tensor] = []
        self._held: list[dict[str, Any]] = []  # optimizer state at the addresses of the capture, by parameter
        self._hook = optimizer.register_load_state_dict_post_hook(lambda _: self._adopt_state())

    def stand_ins(self) -> dict[Tensor, Tensor]:
        """The same memory."""
        return self._stand_ins

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """They stand in for ``.grad`` during a step only: what users do with ``.grad`` is theirs."""
        for name, grad in zip(self.names, gradients, strict=True):
            if grad is None:
                raise OptimizerError(name, "it has no gradient", "freeze it, or use it in the loss")
        self._gradients = [g for g in gradients if g is not None]

    def rehearse(self, backend: Backend, scale: Tensor) -> None:
        """A real step, undone; it makes the optimizer's state, which then holds what it started from."""
        made = self._state_tensors()
        kept = [*self.parameters, *self._gradients, *made, self.norm]
        first = _FirstValues([*kept, *self._rates, scale])
        with restored(backend, kept), first:
            self.step(scale)
        known = {id(t) for t in made}
        with torch.no_grad():
            for tensor in self._state_tensors():
                if id(tensor) not in known:
                    # SGD's momentum starts as the first gradient, which is what zero leads to
                    tensor.zero_() if self._is_sgd else first.rewind(tensor)
        self._held = [dict(self.optimizer.state[p]) for p in self.parameters]

    @torch.no_grad()
    def _adopt_state(self) -> None:
        """Loaded state goes to where the graph reads it."""
        for name, parameter, held in zip(self.names, self.parameters, self._held, strict=bool(self._held)):
            loaded = self.optimizer.state[parameter]
            for key, tensor in held.items():
                if not isinstance(tensor, Tensor):
                    continue
                if not isinstance(loaded.get(key), Tensor):
                    why = f"the loaded state has none for {name}"
                    raise OptimizerError(key, why, "load it before the first batch, or make a new TrainStep")
                loaded[key] = tensor.copy_(loaded[key])

    def _state_tensors(self) -> list[Tensor]:
        entries = [(k, v) for s in self.optimizer.state.values() for k, v in s.items()]
        for key, value in entries:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                name = type(self.optimizer).__name__
                raise OptimizerError(
                    name, f"it counts {key} on the host, where a graph cannot", "use torch.optim.AdamW"
                )
        return [v for _, v in entries if isinstance(v, Tensor)]

    def step(self, scale: Tensor) -> None:
        """Scale, clip and update."""
        grads = self._gradients
        with torch.no_grad():
            torch._foreach_mul_(grads, scale)
            norm = torch.nn.utils.get_total_norm(grads)
            self.norm.copy_(norm)
            if self.clip:
                torch._foreach_mul_(grads, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        with self._in_place_of_users(), self._named_refusals(), without_hooks(self.optimizer):
            self.optimizer.step()

    @contextmanager
    def _named_refusals(self) -> Iterator[None]:
        """The line of the user's that leads into an optimizer says little: name the optimizer."""
        try:
            yield
        except GraphCaptureError as e:
            why = f"{type(self.optimizer).__name__}.step() does that, and {e.why}"
            fix = (
                "use torch.optim.AdamW or Adam without amsgrad and maximize, SGD, or on a GPU capturable=True"
            )
            raise GraphCaptureError(e.op, e.where, why, fix) from e

    @contextmanager
    def _in_place_of_users(self) -> Iterator[None]:
        """Our gradients and device learning rates, where the optimizer looks for them."""
        groups, fused = self.optimizer.param_groups, {"fused": True, "foreach": False} if self._is_sgd else {}
        kept = [{k: g[k] for k in ("lr", *fused)} for g in groups]
        grads = [p.grad for p in self.parameters]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group.update(lr=rate, **fused)
            for parameter, grad in zip(self.parameters, self._gradients, strict=True):
                parameter.grad = grad
            yield
        finally:
            for group, values in zip(groups, kept, strict=True):
                group.update(values)
            for parameter, own in zip(self.parameters, grads, strict=True):
                parameter.grad = own

    def before_replay(self) -> None:
        """Write learning rates; a change of anything else is refused, because the graph cannot follow it.

        Raises:
            AddressError: naming the parameter whose data or state was replaced.
            OptimizerError: naming the hyper-parameter.
        """
        self._require_memory()
        if len(self.optimizer.param_groups) != len(self._frozen):
            raise OptimizerError("param_groups", "a group was added later", "make a new TrainStep after that")
        for group, rate, frozen in zip(self.optimizer.param_groups, self._rates, self._frozen, strict=True):
            for key, value in frozen.items():
                if group.get(key) != value:
                    why = f"it was {value} at the capture and is {group.get(key)}"
                    raise OptimizerError(
                        key, why, "only lr may change with this optimizer; make a new TrainStep"
                    )
            rate.copy_(group["lr"]) if isinstance(group["lr"], Tensor) else rate.fill_(group["lr"])

    def refresh(self) -> None:
        """The forward reads the parameters themselves."""

    def before_forward(self) -> None:
        """Nothing to follow: there are no shadows."""

    def _require_memory(self) -> None:
        for name, parameter, address in zip(self.names, self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise AddressError(f"the data of {name} was replaced; change it in place, with copy_()")
        for name, parameter, held in zip(self.names, self.parameters, self._held, strict=bool(self._held)):
            if any(self.optimizer.state[parameter].get(k) is not v for k, v in held.items()):
                raise AddressError(
                    f"the optimizer's state of {name} was replaced; use optimizer.load_state_dict"
                )

    def close(self) -> None:
        """Take our hook off the optimizer."""
        self._hook.remove()


def make_update(
    optimizer: torch.optim.Optimizer,
    shadowed: Iterable[Tensor],
    names: dict[int, str],
    *,
    clip: float,
    gate: bool | None,
    fused: bool | None,
    launch: Launch | None = None,
) -> Update:
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
