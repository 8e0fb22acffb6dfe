"""Small buckets through memory that all GPUs of a host see: each reads every rank's part and sums it, in one kernel.

By torch's symmetric memory (``torch.distributed._symmetric_memory``, alpha), which is looked for before it is used. It
may set up NVLink multicast, which is not wanted on hosts that others share, so it is used only with multicast off.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lf_comm._channel import Channel
from lf_comm._paths import dense
from lf_comm.rows import LayoutError

MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_ALIGN = 16  # bytes that a thread of the kernel loads at once
_SUMMED = (torch.float32, torch.bfloat16)


class OneShotReducer:
    """Averages buckets of float32 and bfloat16 by one kernel where all ranks can, else by the backend's all-reduce.

    problem: why not, the same on all ranks; None where it is used.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, *, symmetric: Any = None) -> None:
        """symmetric: what has `empty(count, dtype, device)`, `rendezvous(tensor, group)` and `reduce(tensor, group)`;
        None: torch's symmetric memory. All ranks of `group` make one.
        """
        self._channel, self._group = Channel(group), group
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        own = _own_problem(device) if symmetric is None else None
        self.problem = _agreed_problem(own, group, self._channel.size)
        self._symmetric = symmetric if symmetric is not None or self.problem else TorchSymmetric()
        self._rooms: dict[torch.dtype, Tensor] = {}

    @property
    def name(self) -> str:
        """For reports."""
        return "oneshot" if self.problem is None else f"dense (oneshot: {self.problem})"

    def work(self, bucket: Any) -> Callable[[], Tensor]:
        """What averages a bucket when it is called."""
        return lambda: self._average(bucket.buffer())

    def _average(self, buffer: Tensor) -> Tensor:
        if buffer.layout is not torch.strided:
            raise LayoutError(f"{buffer.layout} in a bucket; the way 'rows' sums sparse gradients")
        if self._channel.size == 1 or not buffer.numel():
            return buffer
        if self.problem is not None or buffer.dtype not in _SUMMED:
            dense(buffer, None, self._channel, self._channel.size)
            return buffer
        room = self._room(buffer)
        room[: buffer.numel()].copy_(buffer).div_(self._channel.size)
        room[buffer.numel() :].zero_()
        return buffer.copy_(self._symmetric.reduce(room, self._group)[: buffer.numel()])

    def _room(self, buffer: Tensor) -> Tensor:
        """Symmetric memory for this bucket, a whole number of loads; grown on all ranks at once, as buckets agree."""
        step = _ALIGN // buffer.element_size()
        count = -(-buffer.numel() // step) * step
        held = self._rooms.get(buffer.dtype)
        if held is None or held.numel() < count:
            held = self._rooms[buffer.dtype] = self._symmetric.empty(count, buffer.dtype, buffer.device)
            self._symmetric.rendezvous(held, self._group)
        return held[:count]


class TorchSymmetric:
    """torch's symmetric memory. Never run by its authors on more than the checks before it: no two GPUs were there."""

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that other ranks can be shown."""
        from torch.distributed import _symmetric_memory

        return _symmetric_memory.empty(count, dtype=dtype, device=device)

    def rendezvous(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Show it to the group; all ranks."""
        from torch.distributed import _symmetric_memory

        _symmetric_memory.rendezvous(tensor, group)

    def reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The sum of all ranks' tensors, a new one."""
        result: Tensor = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", group.group_name)
        return result


def _own_problem(device: torch.device) -> str | None:
    """Why this rank cannot."""
    if device.type != "cuda":
        return f"parameters are on {device.type}"
    if os.environ.get(MULTICAST_OFF) != "1":
        return f"multicast may be on; set {MULTICAST_OFF}=1 before torch is imported"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce"):
        return "this torch has no symmetric memory"
    others = [at for at in range(torch.cuda.device_count()) if at != device.index]
    if not all(torch.cuda.can_device_access_peer(device, at) for at in others):
        return "a GPU of the host cannot read another"
    return None


def _agreed_problem(own: str | None, group: dist.ProcessGroup, size: int) -> str | None:
    """The first rank's that has one, or that ranks are on different hosts; asked of all before any memory is shared."""
    if size == 1:
        return own
    told: list[Any] = [None] * size
    dist.all_gather_object(told, (own, socket.gethostname()), group=group)
    if found := next((problem for problem, _ in told if problem is not None), None):
        return str(found)
    return "ranks are on different hosts" if len({host for _, host in told}) > 1 else None
