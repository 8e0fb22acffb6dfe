"""The process group: who am I, where do I compute, and what do all ranks agree on.

Works without any group when the process was not started by torchrun.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lf_meta.config import DeviceSection, DistSection
from lf_meta.errors import ConfigError, MetaError
from lf_meta.signals import StopSignal

T = TypeVar("T")


def choose_device(section: DeviceSection, local_rank: int) -> torch.device:
    """The device of this rank; an explicit accelerator that is missing is an error, never a fallback."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = found.type if found is not None else "cpu"
    if section.type not in ("auto", "cpu", kind):
        others = "none" if found is None else f"{kind} instead"
        raise ConfigError(
            "device.type", f"{section.type} was asked for and torch sees {others}; use device.type={kind}"
        )
    if section.type == "cpu" or found is None:
        return torch.device("cpu")
    return torch.device(kind, local_rank)


def choose_precision(section: DeviceSection, device: torch.device) -> str:
    """``bf16`` or ``fp32``; automatic bf16 only where the accelerator supports it."""
    module: Any = torch.get_device_module(device)
    supported = device.type != "cpu" and bool(getattr(module, "is_bf16_supported", lambda: False)())
    if section.precision == "auto":
        return "bf16" if supported else "fp32"
    if section.precision == "bf16" and device.type != "cpu" and not supported:
        raise ConfigError("device.precision", f"{module.get_device_name(device)} has no bf16; use fp32")
    return section.precision


def choose_backend(section: DistSection, device: torch.device, size: int) -> str:
    """The process group's backend for `size` ranks on this kind of device, one that moves its tensors.

    Raises:
        ConfigError: torch has none, or the one asked for is not here or moves tensors of other devices.
    """
    kind = device.type
    known: str | None = {"cuda": "nccl", "cpu": "gloo", **dist.Backend.default_device_backend_map}.get(kind)
    backend = known if section.backend == "auto" else section.backend
    if size == 1 and backend is None:
        return "gloo"  # no group will be made
    if backend is None or not (backend in ("gloo", "nccl") or dist.is_backend_available(backend)):
        named = f"no backend for {kind} tensors" if backend is None else f"no {backend}"
        raise ConfigError(
            "dist.backend", f"torch has {named}; install the vendor's torch extension, or train on one rank"
        )
    moved = dist.Backend.backend_capability.get(backend, [kind])
    if kind not in moved and (size > 1 or backend == "nccl"):
        only, where = " and ".join(moved), "the cpu" if kind == "cpu" else kind
        remedy = f"use {known}" if known else "train on one rank"
        raise ConfigError(
            "dist.backend", f"{backend} moves {only} tensors only and this run is on {where}; {remedy}"
        )
    return backend


@dataclass
class World:
    """This process among its peers; a context manager that owns the process group.

    Attributes:
        rank, size, local_rank: as torchrun numbers them; 0, 1, 0 without torchrun.
        device: where this rank computes.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    timeout: timedelta = timedelta(seconds=1800)
    backend: str = "gloo"
    _cpu_group: dist.ProcessGroup | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls, device: DeviceSection, section: DistSection) -> World:
        """Read torchrun's variables; nothing is opened before the context is entered."""
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        where = choose_device(device, local_rank)
        size = int(os.environ.get("WORLD_SIZE", 1))
        return cls(
            where,
            int(os.environ.get("RANK", 0)),
            size,
            local_rank,
            timedelta(seconds=section.timeout),
            choose_backend(section, where, size),
        )

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes."""
        return self.rank == 0

    def __enter__(self) -> World:
        if self.device.type != "cpu":
            module: Any = torch.get_device_module(self.device)
            module.set_device(self.device)
        if self.size > 1:
            dist.init_process_group(self.backend, timeout=self.timeout)
            # flags and barriers go over the host, so that they never wait for the device
            self._cpu_group = dist.new_group(backend="gloo", timeout=self.timeout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        # after an error a peer may be gone: destroying the group could wait for it
        if self.size > 1 and kind is None:
            dist.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model under DistributedDataParallel when there are peers."""
        if self.size == 1:
            return model
        ids = [self.device.index] if self.device.type != "cpu" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a device tensor over ranks in place; a no-op alone."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait on the host for every rank."""
        if self._cpu_group is not None:
            dist.barrier(group=self._cpu_group)

    def broadcast_object(self, value: object) -> object:
        """Rank 0's picklable ``value`` on every rank (start-up only; trusted peers of one job)."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._cpu_group)
        return box[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """Do something on rank 0 only and give every rank its result, or raise its MetaError everywhere."""
        outcome: object = (None, None)
        if self.is_main:
            try:
                outcome = (work(), None)
            except MetaError as e:
                outcome = (None, e)
        value, error = cast("tuple[T, MetaError | None]", self.broadcast_object(outcome))
        if error is not None:
            raise error
        return value

    def no_sync(self, model: nn.Module, skip: bool) -> AbstractContextManager[None]:
        """Leave out the gradient all-reduce of a micro-batch that is not the step's last."""
        if skip and isinstance(model, nn.parallel.DistributedDataParallel):
            return model.no_sync()
        return nullcontext()


class StopConsensus:
    """All ranks stop at the same step when any of them received a signal.

    ``poll`` is called by every rank at the same points. The exchange is started at one point and read at the
    next, so nobody waits for it, and it runs between host buffers: a step stays free of device waits.
    """

    def __init__(self, world: World, signal: StopSignal) -> None:
        self._world, self._signal = world, signal
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._view = self._flag.numpy()
        self._pending: dist.Work | None = None

    def poll(self) -> int:
        """The agreed signal number, or 0."""
        if self._world.size == 1:
            return self._signal.signum
        agreed = self._finish()
        if not agreed:
            self._view[0] = self._signal.signum
            self._pending = dist.all_reduce(
                self._flag, dist.ReduceOp.MAX, group=self._world._cpu_group, async_op=True
            )
        return agreed

    def _finish(self) -> int:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return int(self._view[0])

    def close(self) -> None:
        """Take in an exchange that is still under way, so that the group can be destroyed."""
        self._finish()
