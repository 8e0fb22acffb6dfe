"""What tests of kernels check alike: the PTX a GPU would run, and values with gradients beside float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_COMPILE = """
import importlib, json, sys
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

def ptx(module, kernel, types, constants, options):
    kernel = getattr(importlib.import_module(module), kernel)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n] != "constexpr"
             and not signature[n].startswith("fp")}
    constexprs = {(names.index(n),): v for n, v in constants.items()}
    source = ASTSource(kernel, signature, constexprs, attrs)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

json.dump([ptx(*case) for case in json.loads(sys.argv[1])], sys.stdout)
"""


def ptx_for_h200(*cases: tuple[str, str, dict[str, str], dict[str, Any], dict[str, int]]) -> list[str]:
    """PTX of kernels compiled for an H200, which needs no GPU, in a process without the interpreter.

    Args:
        cases: module, kernel, types of arguments (``*bf16`` where not told), constants, and ``num_warps``...
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, json.dumps(cases)],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def with_gradients(fn: Callable[..., Tensor], *inputs: Any) -> tuple[Tensor, ...]:
    """Output of ``fn`` and the gradients of all inputs that want one, for one fixed gradient of the output."""
    out = fn(*inputs)
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).bfloat16()
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    return out.detach(), *torch.autograd.grad(out, wanted, grad.to(out.device, out.dtype))


def exact(*inputs: Any) -> list[Any]:
    """Float tensors in float64, as leaves that want a gradient where the given ones do."""
    return [
        t.detach().double().requires_grad_(t.requires_grad)
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
        for t in inputs
    ]
