"""What Triton's interpreter computes otherwise than a GPU, put right, and operators that it can run.

``TRITON_INTERPRET=1``, set before a kernel is defined, runs kernels with numpy on CPU tensors. Its conversion to bf16
cuts bits off instead of rounding, and its ``tl.dot`` multiplies the bit patterns of bf16 (Triton 3.5 to 3.9; a fix was
refused, triton#11585). On a GPU the helpers here are the plain operation.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# Triton has no types, and its kernels take no annotations but constexpr.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the Triton kernels need triton: pip install lf-graph[triton]") from error

# Kernel files take triton and tl from here, where their absence says what to install.
__all__ = ["INTERPRETED", "bfloat16", "cast", "dot", "fp32", "operator", "tl", "triton"]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def bfloat16(x):
    """fp32 to bf16, to nearest even."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, (bits >> 16) | 0x40, rounded)  # rounding could carry a NaN into infinity
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505, Triton compiles one branch of a constexpr if/else
        return x.to(tl.bfloat16)


@triton.jit
def cast(x, DTYPE: tl.constexpr):  # noqa: N803
    """fp32 to ``DTYPE``, to nearest even."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300, a constexpr is no constant
        return bfloat16(x)
    else:  # noqa: RET505
        return x.to(DTYPE)


@triton.jit
def fp32(x):
    """A Python float given to a kernel, as fp32: a launch passes fp32, code that torch.compile writes passes fp64."""
    return tl.cast(x, tl.float32)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr = "ieee"):  # noqa: N803
    """acc + a @ b, fp32 [m, n]; ``PRECISION`` (ieee, tf32, tf32x3) is that of fp32 operands."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


def operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Registers a function that launches kernels by ``wrap_triton`` as the operator ``name``; it mutates no argument.

    A ``triton_op``, into which compilers can look; under the interpreter, which none can look into, an opaque operator.
    Give it a fake kernel with ``register_fake``: a ``triton_op`` would run its launches on fake tensors instead.
    """
    if INTERPRETED.value:
        return torch.library.custom_op(name, mutates_args=())
    register: Callable[[Callable[..., Any]], CustomOpDef] = torch.library.triton_op(name, mutates_args=())
    return register
