"""Rows of bench_kernels.py: one module here per operator, with a function ``rows(small: bool) -> list[KernelRow]``.

Rows of one operator and shape are a group: ours, and what a user would take instead (eager, torch.compile, the best
library). One row of each group is called ``REFERENCE`` and computes the same in float64 (or fp32); it is never timed.

    def rows(small: bool) -> list[KernelRow]:
        found = []
        for tokens, dim in [(33, 64)] if small else [(16384, 2048)]:
            make = functools.partial(inputs, tokens, dim)
            group = Group("rms_norm fwd+bwd", f"{tokens}x{dim} bf16", bytes=6 * tokens * dim * 2, tolerance=1e-2)
            found += [
                group.row(REFERENCE, lambda device: forward_backward(eager, *as_float64(make(device)))),
                group.row("lf-graph", lambda device: forward_backward(rms_norm, *make(device)), ours=True),
                group.row("eager", lambda device: forward_backward(eager, *make(device))),
                group.row("compiled", lambda device: forward_backward(compiled(eager), *make(device))),
            ]
        return found

``build`` is called after ``torch.manual_seed``, so all rows of a group draw the same inputs if they draw in the same
order; it may be called several times (each time new memory: then the device's cache is cold for every call). What it
returns is captured in a CUDA graph: it must not read values back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

REFERENCE = "reference"
Output = Tensor | tuple[Tensor, ...]
Call = Callable[[], Output]
Build = Callable[[torch.device], Call]


@dataclass(frozen=True)
class KernelRow:
    """One way to compute one operator on one shape.

    Attributes:
        op: the operator and what of it is timed, such as ``rms_norm fwd+bwd``.
        shape: a label that says shape and dtype; (op, shape) is the group.
        name: of this way: ``lf-graph``, ``eager``, ``compiled``, a library's function, or ``REFERENCE``.
        build: makes inputs on a device and returns the call, whose outputs (and gradients) are compared and timed.
        bytes: what the operator must move (each input read once, each output written once).
        flops: what it must compute; 0 where memory is all that counts.
        tolerance: largest allowed ``max|output - reference| / max|reference|`` of every output.
        ours: whether the row is a kernel of this package.
        needs: modules this way imports; without them the row is skipped and says so.
        cuda_only: whether it cannot run on a CPU (ours can, in Triton's interpreter).
    """

    op: str
    shape: str
    name: str
    build: Build
    bytes: int = 0
    flops: int = 0
    tolerance: float = 1e-2
    ours: bool = False
    needs: tuple[str, ...] = ()
    cuda_only: bool = False

    @property
    def group(self) -> tuple[str, str]:
        """Rows with the same compute the same."""
        return self.op, self.shape

    @property
    def label(self) -> str:
        """What ``--match`` is compared with."""
        return f"{self.op} | {self.shape} | {self.name}"


@dataclass(frozen=True)
class Group:
    """What the rows of one operator and shape share; see :class:`KernelRow`."""

    op: str
    shape: str
    bytes: int = 0
    flops: int = 0
    tolerance: float = 1e-2

    def row(self, name: str, build: Build, **fields: Any) -> KernelRow:
        """A row of this group; ``fields`` are those of :class:`KernelRow`."""
        common = {"bytes": self.bytes, "flops": self.flops, "tolerance": self.tolerance}
        return KernelRow(self.op, self.shape, name, build, **(common | fields))


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` in its best form for fixed shapes; graphs come from the benchmark.

    Without a GPU nothing is timed, and the traced graph runs as it is: no C++ compiler is needed.
    """
    if not torch.cuda.is_available():
        return torch.compile(fn, fullgraph=True, dynamic=False, backend="aot_eager")
    return torch.compile(fn, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")


def as_float64(tensors: Sequence[Any]) -> list[Any]:
    """Floating tensors as float64 leaves that require a gradient where the given ones do; others as they are."""
    return [
        t.detach().double().requires_grad_(t.requires_grad)
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
        for t in tensors
    ]


def forward(fn: Callable[..., Any], *inputs: Any) -> Call:
    """The call that computes the outputs without gradients."""

    def call() -> Output:
        with torch.no_grad():
            found: Output = fn(*inputs)
        return found

    return call


def forward_backward(fn: Callable[..., Any], *inputs: Any, seed: int = 7) -> Call:
    """The call that computes outputs and the gradients of all inputs that require one, by fixed random upstream."""
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    upstream = _upstream(fn(*inputs), seed)

    def call() -> Output:
        outputs = _floating(fn(*inputs))
        return (*outputs, *torch.autograd.grad(outputs, wanted, upstream))

    return call


def backward(fn: Callable[..., Any], *inputs: Any, seed: int = 7) -> Call:
    """The call that computes only the gradients; the forward ran once, here."""
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    outputs = _floating(fn(*inputs))
    upstream = _upstream(outputs, seed)
    return lambda: torch.autograd.grad(outputs, wanted, upstream, retain_graph=True)


def _floating(outputs: Any) -> tuple[Tensor, ...]:
    """Those outputs that can have a gradient."""
    several = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    return tuple(t for t in several if t.requires_grad)


def _upstream(outputs: Any, seed: int) -> list[Tensor]:
    """Gradients that arrive at the outputs: the same values in every dtype, for they are drawn as bf16."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(t.shape, generator=generator).bfloat16() for t in _floating(outputs)]
    return [d.to(t.device, t.dtype) for d, t in zip(drawn, _floating(outputs), strict=True)]
