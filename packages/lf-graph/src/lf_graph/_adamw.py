"""AdamW over flat buffers as device operations only, so that a graph can hold it.

Learning rates and the other hyper-parameters are device values refreshed before each replay; norm, clipping,
the non-finite gate, step counts and bias corrections never come to the host. Two implementations do the heavy
part: Triton kernels, which read bf16 gradients and write the bf16 shadow in the same pass (28 bytes a
parameter), and plain torch, the reference.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lf_graph._adamw_torch import COEFFICIENTS, TorchKernels
from lf_graph._errors import GraphCaptureError
from lf_graph._flat import REFUSED, FlatParameters, OptimizerError

_GRADIENT_DTYPES = (torch.bfloat16, torch.float32)
_VECTOR = 16  # bytes in the widest load of a GPU thread
_HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled")


@dataclass(frozen=True)
class Launch:
    """How the Triton kernels are laid over the device: numbers to tune, which change at most the norm's rounding.

    Attributes:
        block: elements a program handles at once, a power of two.
        warps: warps of 32 threads in a program.
        programs: programs in the grid, which stride over the chunks. 0 takes 8 per multiprocessor for the update (as
            many as fit) and one per chunk for the norm. Fewer leave room for GEMMs that run beside the optimizer.
        chunk: elements in one row of the chunk table, a multiple of 128; the norm is summed per chunk.
        vector: neighbouring elements of one thread: 4 keeps all of an element in one thread (bf16 moves by 8
            bytes), 8 moves bf16 by 16 bytes and pays with exchanges through shared memory.

    Raises:
        ValueError: sizes that do not go together.
    """

    block: int = 1024
    warps: int = 4
    programs: int = 0
    chunk: int = 32768
    vector: int = 4

    def __post_init__(self) -> None:
        """Refuses sizes that leave no full block (only those are read 16 bytes at a time) or no program."""
        if self.block < 1 or self.block & (self.block - 1) or self.chunk % self.block or self.chunk < 128:
            raise ValueError(
                f"{self}: block must be a power of two, chunk a multiple of block and at least 128"
            )
        if self.vector not in (4, 8) or self.warps not in (1, 2, 4, 8, 16, 32) or self.programs < 0:
            raise ValueError(f"{self}: vector is 4 or 8, warps 1, 2, 4, 8, 16 or 32, programs 0 or more")


@dataclass(frozen=True, eq=False)
class GradientTable:
    """One set of gradients by address.

    Attributes:
        addresses: int64 [parameters] on the device, in flat order.
        tensors: the gradients, kept alive as long as the table is.
        owner: the optimizer whose parameters they belong to.
    """

    addresses: Tensor
    tensors: tuple[Tensor, ...] = field(repr=False)
    owner: FusedAdamW = field(repr=False)


class Kernels(Protocol):
    """The heavy part of a step. ``addresses`` is int64 [parameters]; scalars are fp32 [] on the device."""

    name: str

    def prepare(self, dtypes: tuple[torch.dtype, ...]) -> None:
        """Compile and load everything for gradients of these dtypes, so that a capture never does."""
        ...

    def use(self, tensors: tuple[Tensor, ...]) -> None:
        """Another set of gradients will be read."""
        ...

    def square_sum(self, addresses: Tensor, scale: Tensor) -> Tensor:
        """Sum of squares of all gradients times ``scale``."""
        ...

    def update(self, addresses: Tensor, coefficients: Tensor, multiplier: Tensor, finite: Tensor) -> None:
        """Advance master, moments and shadow; nothing where ``finite`` is 0."""
        ...

    def update_some(
        self, gradients: Mapping[int, Tensor], addresses: Tensor, coefficients: Tensor, multiplier: Tensor,
        finite: Tensor,
    ) -> None:  # fmt: skip
        """The same for some parameters, by index; ``addresses`` hold where their gradients lie by the time it runs."""
        ...


def _triton_reason(device: torch.device) -> str:
    """Why Triton cannot run here, or "" when it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install lf-graph[triton])"
    if device.type == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return "" if interpreted else "Triton needs a GPU, parameters are on the CPU"
    if device.type != "cuda":
        return f"the kernels are tested on CUDA only, not on {device.type}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "bf16 in Triton needs compute capability 8.0"
    return ""


def _choose(flat: FlatParameters, implementation: str, launch: Launch) -> tuple[Kernels, str]:
    device = flat.master.device
    obstacle = _triton_reason(device)
    if implementation == "auto":
        # The interpreter is a test tool: it has to be asked for.
        use_triton = not obstacle and device.type != "cpu"
        reason = obstacle or ("Triton runs here" if use_triton else "parameters are on the CPU")
    elif implementation in ("triton", "torch"):
        use_triton, reason = implementation == "triton", "asked for"
    else:
        raise ValueError(f"implementation {implementation!r}: use 'auto', 'triton' or 'torch'")
    if not use_triton:
        return TorchKernels(flat), reason
    if obstacle:
        raise OptimizerError("implementation='triton'", obstacle, "use implementation='auto' or 'torch'")
    from lf_graph._adamw_triton import TritonKernels

    return TritonKernels(flat, launch), reason


class _HyperTable:
    """lr, betas, eps and weight decay of each group as float64 on the device, written only when they change.

    A changed number travels as a kernel argument (``fill_``), never through a host buffer that a later step
    could overwrite before the copy ran.
    """

    def __init__(self, flat: FlatParameters) -> None:
        groups = flat.optimizer.param_groups
        self._optimizer, device = flat.optimizer, flat.master.device
        self._table = torch.zeros(len(groups), len(_HYPER), dtype=torch.float64, device=device)
        self._cells = [list(row.unbind()) for row in self._table.unbind()]
        self._last = [[math.nan] * len(_HYPER) for _ in groups]
        self._group = torch.tensor([s.group for s in flat.layout.slots], device=device)

    def refresh(self) -> None:
        groups = self._optimizer.param_groups
        if len(groups) != len(self._cells):
            fix = "build FlatParameters after add_param_group"
            raise OptimizerError("param_groups", "a group was added later", fix)
        for cells, last, group in zip(self._cells, self._last, groups, strict=True):
            if set_now := [option for option in REFUSED if group.get(option)]:
                why = "it was switched on after the update was built, which does not have it"
                raise OptimizerError(set_now[0], why, f"leave {set_now[0]}=False")
            decoupled = float(_decoupled(self._optimizer, group))
            values = group["lr"], *group["betas"], group["eps"], group["weight_decay"], decoupled
            for k, value in enumerate(values):
                last[k] = self._write(cells[k], value, last[k])

    def _write(self, cell: Tensor, value: float | Tensor, last: float) -> float:
        if isinstance(value, Tensor) and value.device == cell.device:
            cell.copy_(value.detach().reshape(()))  # its value is known on the device only: copy every time
            return math.nan
        number = float(value)
        if number != last:
            cell.fill_(number)
        return number

    def coefficients(self, steps: Tensor) -> Tensor:
        """fp32 [parameters, 8] in the order of COEFFICIENTS, computed in float64 from steps [parameters]."""
        lr, beta1, beta2, eps, decay, decoupled = self._table.index_select(0, self._group).unbind(1)
        t = steps.double()
        columns = {
            "decay": 1 - lr * decay * decoupled,
            "l2": decay * (1 - decoupled),
            "rate1": 1 - beta1,
            "beta2": beta2,
            "rate2": 1 - beta2,
            "step_size": lr / (1 - beta1**t),
            "inverse": (1 - beta2**t).rsqrt(),
            "eps": eps,
        }
        return torch.stack([columns[name] for name in COEFFICIENTS], dim=1).float()


def _decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def _difference(shape: tuple[int, ...], device: torch.device, g: Tensor | None) -> tuple[str, str] | None:
    """(why, fix) when ``g`` cannot be the gradient of this parameter, else None."""
    if g is None:
        return "it has no gradient", "freeze it with requires_grad_(False) or use it in the loss"
    if g.dtype not in _GRADIENT_DTYPES or g.layout is not torch.strided:
        return f"its gradient is {g.dtype}, {g.layout}", "use dense bf16 or fp32 gradients"
    if tuple(g.shape) != shape or g.device != device:
        why = f"its gradient is {list(g.shape)} on {g.device}, it is {list(shape)} on {device}"
        return why, "pass one per parameter in the order of FlatParameters.parameters"
    if not g.is_contiguous() or g.data_ptr() % _VECTOR:
        return "its gradient is not contiguous and 16-byte aligned", "keep gradients in tensors of their own"
    return None


class FusedAdamW:
    """Adam or AdamW steps on flat buffers, as device operations that a graph can hold.

    Use: ``set_gradients`` once (or once per gradient set), then per step ``refresh_hyper()`` on the host and
    ``step()``, eagerly or as part of a graph. The update equals ``torch.optim.AdamW`` within 1e-6 relative;
    ``decoupled_weight_decay`` is what the optimizer says (AdamW yes, Adam no).

    Args:
        flat: the flat buffers; hyper-parameters are those of ``flat.optimizer.param_groups``.
        clip: largest global gradient norm, as in ``clip_grad_norm_``; 0 does not clip.
        gate: leave everything unchanged when the norm is not finite, and count it in ``skipped``.
        implementation: "auto" (Triton where it runs, else torch), "triton" or "torch".
        launch: sizes of the Triton kernels.

    Attributes:
        implementation, reason: which one was chosen and why.
        norm: fp32 [], global norm of the scaled gradients before clipping; NaN while neither clip nor gate
        needs it.
        skipped: int64 [], steps that the gate left out.
    """

    def __init__(
        self,
        flat: FlatParameters,
        *,
        clip: float = 0.0,
        gate: bool = True,
        implementation: str = "auto",
        launch: Launch | None = None,
    ) -> None:
        if not (clip >= 0.0 and math.isfinite(clip)):
            raise ValueError(f"clip {clip}: use a finite norm, or 0 for no clipping")
        self.flat, self.clip, self.gate = flat, clip, gate
        device = flat.master.device
        self._kernels, self.reason = _choose(flat, implementation, launch or Launch())
        self.implementation = self._kernels.name
        self._hyper = _HyperTable(flat)
        n = len(flat.parameters)
        self._addresses = torch.zeros(n, dtype=torch.int64, device=device)
        self._coefficients = torch.zeros(n, len(COEFFICIENTS), dtype=torch.float32, device=device)
        self._scale = torch.ones((), dtype=torch.float32, device=device)
        self._multiplier = torch.ones((), dtype=torch.float32, device=device)
        self._finite = torch.ones((), dtype=torch.float32, device=device)
        self.norm = torch.full((), math.nan, dtype=torch.float32, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._dtypes: tuple[torch.dtype, ...] = ()
        self._table: GradientTable | None = None
        self.refresh_hyper()

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> GradientTable:
        """Makes the address table of one gradient per parameter, in flat order, and uses it.

        Gradients are bf16 or fp32, dense, contiguous, 16-byte aligned, of the parameter's shape. The first
        call fixes which dtype each parameter has and compiles the kernels; later sets must have the same.
        Waits for the device (a copy from the host), so not for use under capture.

        Raises:
            OptimizerError: names the parameter without gradient or with one that cannot be read.
        """
        tensors = self._checked(gradients)
        self.prepare([g.dtype for g in tensors])
        addresses = torch.tensor([g.data_ptr() for g in tensors], device=self._addresses.device)
        table = GradientTable(addresses, tensors, self)
        self.use(table)
        return table

    def _checked(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        slots, device = self.flat.layout.slots, self.flat.master.device
        if len(gradients) != len(slots):
            why = f"{len(gradients)} for {len(slots)} parameters"
            raise OptimizerError("gradients", why, "pass one per parameter of FlatParameters.parameters")
        checked = []
        for slot, g in zip(slots, gradients, strict=True):
            if (wrong := _difference(slot.shape, device, g)) is not None:
                raise OptimizerError(slot.name, *wrong)
            assert g is not None
            checked.append(g.detach())
        return tuple(checked)

    def use(self, table: GradientTable) -> None:
        """Lets later steps read this set of gradients: a copy on the device, on the current stream, no wait."""
        if table.owner is not self:
            raise OptimizerError(
                "table", "it is of another optimizer", "use a table made by this set_gradients"
            )
        self._kernels.use(table.tensors)
        self._addresses.copy_(table.addresses, non_blocking=True)
        self._table = table

    def refresh_hyper(self) -> None:
        """Writes lr, betas, eps and weight decay that changed since the last call to the device; before each
        replay.

        On the stream of the replay, outside of capture. Numbers cost one small kernel each and only when they
        changed; tensors on the device are copied there every time.
        """
        if self._addresses.is_cuda and torch.cuda.is_current_stream_capturing():
            why, fix = "today's learning rate would be frozen into the graph", "call it before replay"
            raise GraphCaptureError("FusedAdamW.refresh_hyper", "", why, fix)
        self._hyper.refresh()

    @torch.no_grad()
    def step(self, scale: Tensor | None = None) -> None:
        """One update; only device operations at fixed addresses.

        Args:
            scale: multiplies all gradients, such as 1/token count: one element on the device. None is 1.
        """
        if self._table is None:
            raise OptimizerError("gradients", "none were given", "call set_gradients before step")
        self._rescale(scale)
        self._measure()
        self._count()
        self._kernels.update(self._addresses, self._coefficients, self._multiplier, self._finite)

    def prepare(self, dtypes: Sequence[torch.dtype]) -> None:
        """Says what gradients will come, in flat order, and compiles the kernels; not under capture.

        Once: graphs hold the addresses of what is made here, so saying the same again changes nothing.

        Raises:
            OptimizerError: naming a parameter whose gradient was announced in another dtype.
        """
        if not self._dtypes:
            self._kernels.prepare(tuple(dtypes))
            self._dtypes = tuple(dtypes)
        for slot, old, new in zip(self.flat.layout.slots, self._dtypes, dtypes, strict=True):
            if old != new:
                why = f"its gradient was {old} and is {new}"
                raise OptimizerError(slot.name, why, "keep one dtype per parameter")

    @torch.no_grad()
    def begin(self, scale: Tensor | None = None) -> None:
        """The part of a step that needs no gradient; ``step_some`` of every parameter follows. As :meth:`step`.

        Neither clips nor asks whether gradients are finite, which only all of them together could tell.
        """
        self._rescale(scale)
        self._multiplier.copy_(self._scale)
        self._count()

    @torch.no_grad()
    def step_some(self, gradients: Mapping[int, Tensor], addresses: Tensor) -> None:
        """Updates some parameters of the step that :meth:`begin` began, each once.

        Args:
            gradients: by the parameter's place in flat order; of the dtypes that ``prepare`` was told.
            addresses: int64 [parameters] on the device; where the gradients lie, by the time the device runs this.

        Raises:
            OptimizerError: naming a parameter whose gradient cannot be read.
        """
        for i, gradient in gradients.items():
            slot = self.flat.layout.slots[i]
            wrong = _difference(slot.shape, self.flat.master.device, gradient)
            if wrong is None and gradient.dtype != self._dtypes[i]:
                wrong = f"its gradient was {self._dtypes[i]} and is {gradient.dtype}", "keep one dtype"
            if wrong is not None:
                raise OptimizerError(slot.name, *wrong)
        self._kernels.update_some(gradients, addresses, self._coefficients, self._multiplier, self._finite)

    def _rescale(self, scale: Tensor | None) -> None:
        if scale is None:
            self._scale.fill_(1.0)
        else:
            self._scale.copy_(scale.detach().reshape(()))

    def _count(self) -> None:
        self.flat.steps.add_(self._finite)
        self._coefficients.copy_(self._hyper.coefficients(self.flat.steps))

    def _measure(self) -> None:
        """Norm, gate and the factor that scaling and clipping put on every gradient."""
        self._multiplier.copy_(self._scale)
        if not (self.clip or self.gate):
            return
        self.norm.copy_(self._kernels.square_sum(self._addresses, self._scale).sqrt())
        if self.clip:
            # 1e-6 and the order of operations as in torch.nn.utils.clip_grad_norm_
            self._multiplier.mul_((self.clip / (self.norm + 1e-6)).clamp(max=1.0))
        if self.gate:
            finite = self.norm.isfinite()
            self._finite.copy_(finite)
            self.skipped.add_(finite.logical_not())
