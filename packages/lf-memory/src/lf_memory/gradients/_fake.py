"""Run a function on fake stand-ins of a model's parameters: no memory, no arithmetic, the model untouched."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from ._errors import PlanError
from ._losses import prefixed

T = TypeVar("T")


class _Holder(nn.Module):
    """Modules and what is done with them, so that `functional_call` swaps tensors for as long as that takes."""

    def __init__(self, models: Sequence[nn.Module], work: Callable[[], object]) -> None:
        super().__init__()
        for at, model in enumerate(models):
            self.add_module(str(at), model)
        self._work = work

    def forward(self) -> object:
        return self._work()


class FakeWorld:
    """A FakeTensorMode with stand-ins for the parameters and buffers of some modules.

    Args:
        models: on any device, "meta" and fake tensors included.
        args: what the function will get; their fake mode is used if they have one.
        device: what meta tensors stand for. Fake tensors keep the device of what they stand for, because operators
            choose their kernels, and so their memory, by it.
    """

    def __init__(self, models: Sequence[nn.Module], args: Any, device: torch.device | str | None) -> None:
        self._models = models
        self._device = None if device is None else torch.device(device)
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        self.mode = _mode_of([*tensors, *tree_leaves(args)]) or FakeTensorMode(allow_non_fake_inputs=True)
        self.args = tree_map(lambda leaf: self._fake(leaf) if isinstance(leaf, torch.Tensor) else leaf, args)
        stand_ins: dict[int, torch.Tensor] = {}
        self._swaps: dict[str, torch.Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        for at, (prefix, model) in enumerate(prefixed(models)):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                fake = stand_ins.setdefault(id(tensor), self._fake(tensor))
                self._swaps[f"{at}.{name}"] = fake
                if isinstance(fake, nn.Parameter):
                    self.parameters.setdefault(f"{prefix}.{name}" if prefix else name, fake)

    def run(self, work: Callable[[], T]) -> T:
        """Do something while the stand-ins are in the modules' places."""
        found: list[T] = []
        holder = _Holder(self._models, lambda: found.append(work()))
        with self.mode:
            functional_call(holder, self._swaps, (), tie_weights=True)
        return found[0]

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        detached = tensor.detach()  # outside of the mode, which may refuse real tensors
        with self.mode, torch.no_grad():
            fake = self._stand_in(detached)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor)
        if fake.device.type != "meta":
            return fake
        if self._device is None:
            raise PlanError("a tensor is on the meta device: say with device= which one it stands for")
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=self._device)


def _mode_of(leaves: Sequence[object]) -> FakeTensorMode | None:
    modes = {id(leaf.fake_mode): leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)}
    if len(modes) > 1:
        raise PlanError("the tensors belong to different FakeTensorModes: make model and arguments under one")
    return next(iter(modes.values()), None)
