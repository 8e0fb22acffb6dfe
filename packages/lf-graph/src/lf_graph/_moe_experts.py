"""SwiGLU experts on rows sorted by expert, and the choice of the grouped product they run on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf_graph._errors import GraphError
from lf_graph._moe_route import Routing
from lf_graph.kernels._inputs import triton_computes
from lf_graph.kernels.grouped_experts import grouped_experts
from lf_graph.kernels.grouped_gemm import grouped_gemm
from lf_graph.kernels.swiglu import swiglu_plain

BackendName = Literal["grouped_mm", "masked_dense", "triton"]
GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
ALIGNMENT = 16  # bytes between rows that torch's grouped product asks for


@dataclass(frozen=True)
class ExpertBackend:
    """The grouped product that runs, and why it was chosen.

    ``grouped_mm`` does the work of each row once. ``masked_dense`` computes every expert on every row and selects:
    as exact, as free of read-backs, but it costs ``experts`` times the work. ``triton`` is
    :func:`lf_graph.kernels.grouped_experts`: it reads and adds tokens' rows where they are, and runs on request.

    Attributes:
        name: of the product.
        reason: why it runs, or why the other one does not.
        clear_idle: experts without a row get their weight gradient set to zero, because the kernel leaves it undefined.
    """

    name: BackendName
    reason: str
    clear_idle: bool = False

    @property
    def product(self) -> GroupedProduct:
        """(x [R, K], w [E, K, N], offsets int32 [E]) -> [R, N]; rows from ``offsets[-1]`` on are undefined."""
        if self.name == "triton":
            return grouped_gemm
        if self.name == "masked_dense":
            return masked_dense
        return grouped_mm_clearing_idle if self.clear_idle else grouped_mm


def check_backend_name(requested: str) -> None:
    """Refuses what is no backend.

    Raises:
        GraphError: naming those there are.
    """
    if requested not in ("auto", *get_args(BackendName)):
        raise GraphError(f"no MoE backend {requested!r}; write auto, {', '.join(get_args(BackendName))}")


def choose_backend(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, ...], requested: str = "auto"
) -> ExpertBackend:
    """The grouped product for one device and dtype.

    Args:
        device: where the experts run.
        dtype: of the product.
        dims: widths of all operands; ``grouped_mm`` needs rows that are multiples of 16 bytes.
        requested: ``auto``, ``grouped_mm``, ``masked_dense`` or ``triton``.

    Raises:
        GraphError: ``grouped_mm`` was requested and cannot run here without waiting for the host, or ``triton`` and it
            cannot run.
    """
    check_backend_name(requested)
    if requested == "triton":
        triton_computes("MoE", "triton", dtype, device)
        return ExpertBackend("triton", "requested")
    if requested == "masked_dense":
        return ExpertBackend("masked_dense", "requested")
    obstacle = _obstacle(device, dtype, dims)
    if not obstacle:
        # pytorch#172439: on sm_100 the weight gradient of an expert without a row is not written
        clear = device.type == "cuda" and _major(device.index) == 10
        return ExpertBackend("grouped_mm", "requested" if requested != "auto" else "supported", clear)
    if requested == "grouped_mm":
        raise GraphError(f"grouped_mm cannot run: {obstacle}; use backend='auto'")
    return ExpertBackend("masked_dense", obstacle)


def _obstacle(device: torch.device, dtype: torch.dtype, dims: tuple[int, ...]) -> str:
    """Why torch's grouped product cannot run without a read-back, or ""."""
    if not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    if any(d * dtype.itemsize % ALIGNMENT for d in dims):
        return f"widths {dims} of {dtype} are not multiples of {ALIGNMENT} bytes"
    if device.type == "cuda":
        # elsewhere torch copies the offsets to the host and loops (aten/src/ATen/native/cuda/GroupedBlas.cpp)
        major = _major(device.index)
        if dtype != torch.bfloat16 or major not in (9, 10):
            return (
                f"torch has a device-side kernel for bfloat16 on sm_90 and sm_100, not {dtype} on sm_{major}x"
            )
    elif dtype != torch.bfloat16 and (device.type == "meta" or torch.compiler.is_compiling()):
        return f"torch can trace grouped_mm in bfloat16 only, not {dtype}"
    elif device.type not in ("cpu", "meta"):
        return f"not known to stay on the device on {device.type}"
    elif dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"torch has no grouped_mm for {dtype}"
    return ""


def _major(index: int | None) -> int:
    """First number of the card's compute capability."""
    return int(torch.cuda.get_device_capability(index)[0])


# All that torch.compiler.assume_constant_result does, but for importing the compiler, and Triton with it: that doubles
# the start of every process that imports lf_graph.
_major._dynamo_marked_constant = True  # type: ignore[attr-defined]


def grouped_mm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """torch's grouped product, under the name this torch has for it."""
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return cast(Tensor, product(x, w, offs=offsets))


def grouped_mm_clearing_idle(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """The same, with the weight gradient of experts that have no row set to zero."""
    out: Tensor = grouped_mm(x, _ClearIdle.apply(w, offsets), offsets)  # type: ignore[no-untyped-call]
    return out


class _ClearIdle(torch.autograd.Function):
    """Identity on w [E, ...]; its gradient is zero for experts without a row."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (offsets,) = ctx.saved_tensors
        idle = torch.diff(offsets, prepend=offsets.new_zeros(1)) == 0
        return grads[0].masked_fill(idle[:, None, None], 0), None


def masked_dense(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """The same with static shapes on any device and dtype: every expert on every row; undefined rows are zero."""
    row = torch.arange(x.shape[0], device=x.device)
    starts = offsets - torch.diff(offsets, prepend=offsets.new_zeros(1))
    out = x.new_zeros(x.shape[0], w.shape[2])
    for e in range(w.shape[0]):
        inside = (row >= starts[e]) & (row < offsets[e])
        out = torch.where(inside[:, None], x @ w[e], out)
    return out


def weighted_swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    """``silu(gate) * up * weight``, computed in at least float32 and rounded once (SwiGLU: arXiv 2002.05202).

    The weight goes in before the down projection, which is linear: the outputs of the experts then only have to be
    added, and need not be kept for the gradient of the weight.

    Args:
        gate_up: [R, 2 F], gate in the first half.
        weight: [R], float32 or float64.

    Returns:
        [R, F] of the dtype of gate_up.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return swiglu_plain(gate, up, weight)


class Experts(nn.Module):
    """The weights of all experts: ``gate_up`` [E, hidden, 2 ffn] (gate first) and ``down`` [E, ffn, hidden]."""

    def __init__(self, experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, hidden, 2 * ffn))
        self.down = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan_in), as torch's linear layers."""
        for weight in (self.gate_up, self.down):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, rows: Tensor, weight: Tensor, offsets: Tensor, product: GroupedProduct) -> Tensor:
        """rows [R, hidden] sorted by expert, weight [R], offsets int32 [E]; returns [R, hidden] of their dtype."""
        hidden = weighted_swiglu(product(rows, self.gate_up.to(rows.dtype), offsets), weight)
        return product(hidden, self.down.to(rows.dtype), offsets)

    def on_tokens(self, x: Tensor, weight: Tensor, routing: Routing) -> Tensor:
        """x [N, hidden], weight [R] of each row; returns the sum of each token's experts, by Triton kernels."""
        gate_up, down = self.gate_up.to(x.dtype), self.down.to(x.dtype)
        places = (routing.offsets, routing.tokens, routing.inverse)
        return grouped_experts(x, gate_up, down, weight, *places, implementation="triton")
