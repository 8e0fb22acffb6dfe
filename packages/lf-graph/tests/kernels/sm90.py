"""Compiles a kernel for an H200, which needs no GPU, in a process without the interpreter.

    python sm90.py '{"module": ..., "kernel": ..., "types": {...}, "constants": {...}, "warps": 4}'

prints the PTX. ``types`` are those of arguments by name, as Triton writes them ("*bf16", "i32"; the default is "i32"),
pointers are aligned to 16 bytes, and so are the integers named in ``aligned``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any


def ptx(module: str, kernel: str, **request: Any) -> str:
    """PTX of a kernel of ``lf_graph.kernels``."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, json.dumps({"module": module, "kernel": kernel, **request})]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accesses(text: str) -> Counter[str]:
    """Accesses of global memory by kind and bytes: ``{"ld 16": 4, "st 2": 1}``."""
    found: Counter[str] = Counter()
    for kind, count, bits in re.findall(r"\b(ld|st)\.global[.\w]*?(?:\.v(\d))?\.[bu](\d+)\b", text):
        found[f"{kind} {int(count or 1) * int(bits) // 8}"] += 1
    return found


def _compile(
    module: str, kernel: str, types: dict[str, str], constants: dict[str, Any], aligned: list[str], warps: int
) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    function = getattr(importlib.import_module(f"lf_graph.kernels.{module}"), kernel)
    names = function.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") or n in aligned
    }
    source = ASTSource(function, signature, {(names.index(n),): v for n, v in constants.items()}, attrs)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    print(_compile(**json.loads(sys.argv[1])))
