"""The AdamW update in plain torch operations: the reference, and what runs where there is no Triton.

One tensor after another, not ``torch._foreach_*``: every coefficient is a device value of its own tensor
(step counts may differ), and the multi-tensor kernels take such scalars from the host only.

On the CPU, gradients are read by address like the kernels do, through one custom operator that a recorder can
replay; so switching to another set of gradients between replays works there too. On CUDA torch cannot read an
address: the tensors in use at capture time are frozen into the graph, and switching afterwards is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from lf_graph._flat import FlatParameters, OptimizerError

# Columns of the coefficient table, one fp32 row per parameter; _adamw_triton.py reads the same order.
# decay = 1 - lr*wd (AdamW), l2 = wd (Adam), inverse = 1/sqrt(1 - beta2^t), step_size = lr/(1 - beta1^t)
COEFFICIENTS = ("decay", "l2", "rate1", "beta2", "rate2", "step_size", "inverse", "eps")


@torch.library.custom_op(
    "lf_graph::gradient_at",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor addresses, int index, int numel, bool half) -> Tensor",
)
def gradient_at(addresses: Tensor, index: int, numel: int, half: bool) -> Tensor:
    """fp32 copy [numel] of the bf16 (``half``) or fp32 values at the CPU address ``addresses[index]``."""
    if numel == 0:
        return torch.empty(0, dtype=torch.float32)
    raw = (ctypes.c_char * (numel * (2 if half else 4))).from_address(int(addresses[index]))
    return torch.frombuffer(raw, dtype=torch.bfloat16 if half else torch.float32).to(torch.float32, copy=True)


@gradient_at.register_fake
def _(addresses: Tensor, index: int, numel: int, half: bool) -> Tensor:
    return addresses.new_empty(numel, dtype=torch.float32)


def advance(p: Tensor, m: Tensor, v: Tensor, g: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One Adam or AdamW update of fp32 tensors: new (p, m, v) from gradient ``g`` and coefficients ``c`` [8].

    Source: Loshchilov and Hutter 2019 (decoupled decay), Kingma and Ba 2015 (bias correction); in the order
    of operations of ``torch.optim.AdamW``.
    """
    decay, l2, rate1, beta2, rate2, step_size, inverse, eps = c.unbind()
    g = g + l2 * p
    m = m.lerp(g, rate1)
    v = v * beta2 + rate2 * g * g
    return p * decay - step_size * (m / (v.sqrt() * inverse + eps)), m, v


class TorchKernels:
    """Norm and update over the slots of a flat layout."""

    name = "torch"

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._by_address = flat.master.device.type == "cpu"
        self._halves: tuple[bool, ...] = ()
        self._current: tuple[Tensor, ...] = ()
        self._captured: tuple[Tensor, ...] | None = None

    def prepare(self, dtypes: tuple[torch.dtype, ...]) -> None:
        """Fixes the dtype of every gradient."""
        self._halves = tuple(d == torch.bfloat16 for d in dtypes)

    def use(self, tensors: tuple[Tensor, ...]) -> None:
        """Takes another set of gradients; refused on CUDA once a graph holds the first."""
        if self._captured is not None and self._captured is not tensors:
            why = "a captured step of the torch implementation reads fixed gradients"
            raise OptimizerError(
                "gradients", why, "install triton, or capture one optimizer graph per gradient set"
            )
        self._current = tensors

    def _gradient(self, addresses: Tensor, index: int) -> Tensor:
        slot = self._flat.layout.slots[index]
        if self._by_address:
            read = torch.ops.lf_graph.gradient_at(addresses, index, slot.numel, self._halves[index])
            assert isinstance(read, Tensor)
            return read.view(slot.shape)
        if torch.cuda.is_current_stream_capturing():
            self._captured = self._current
        return self._current[index].float().view(slot.shape)

    def square_sum(self, addresses: Tensor, scale: Tensor) -> Tensor:
        """Sum of squares of all gradients times ``scale``, fp32 []."""
        gradients = (self._gradient(addresses, i) for i in range(len(self._flat.parameters)))
        return torch.stack([(g * scale).square().sum() for g in gradients]).sum()

    def update(self, addresses: Tensor, coefficients: Tensor, multiplier: Tensor, finite: Tensor) -> None:
        """Advances every parameter by its gradient times ``multiplier``; changes no bit where ``finite`` is
        0."""
        for i in range(len(self._flat.parameters)):
            self._advance(i, self._gradient(addresses, i), coefficients, multiplier, finite)

    def update_some(
        self, gradients: Mapping[int, Tensor], addresses: Tensor, coefficients: Tensor, multiplier: Tensor,
        finite: Tensor,
    ) -> None:  # fmt: skip
        """Advances the parameters of ``gradients``, which are read as they are."""
        for i, gradient in gradients.items():
            shape = self._flat.layout.slots[i].shape
            self._advance(i, gradient.float().view(shape), coefficients, multiplier, finite)

    def _advance(
        self, index: int, gradient: Tensor, coefficients: Tensor, multiplier: Tensor, finite: Tensor
    ) -> None:
        flat, slot = self._flat, self._flat.layout.slots[index]
        old = [slot.view(b) for b in (flat.master, flat.exp_avg, flat.exp_avg_sq)]
        new = advance(old[0], old[1], old[2], gradient * multiplier, coefficients[index])
        for target, value in zip(old, new, strict=True):
            target.copy_(torch.where(finite > 0, value, target))
        if slot.shadow_offset >= 0:
            slot.shadow_view(flat.shadow).copy_(old[0])
