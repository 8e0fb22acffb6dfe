"""What kernels are on an H200, which needs no GPU: PTX of chosen constants, and rows of ``compile_offline.py``."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compiling

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def ptx(
    module: str,
    kernel: str,
    types: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
    *,
    default: str = "*bf16",
    aligned: Sequence[str] | None = None,
) -> str:
    """PTX of a kernel.

    Args:
        module, kernel: where the ``triton.jit`` function is.
        types: of arguments by name, as Triton writes them.
        constants: values of ``tl.constexpr``; "tl.bfloat16" is a dtype.
        options: ``num_warps`` and ``num_stages``.
        default: the type of the other arguments.
        aligned: integers that are multiples of 16, as all pointers are; None for all.
    """
    found: str = compiling.call(
        "sm90", "_compiled", module, kernel, types, constants, options, default, aligned
    )
    return found


def rows(match: str) -> list[dict[str, Any]]:
    """Rows of compile_offline.py for the hardest sizes of the cases that match."""
    found: list[dict[str, Any]] = compiling.call("sm90", "_rows", match)
    return found


def accesses(text: str) -> Counter[str]:
    """Accesses of global memory by kind and bytes: ``{"ld 16": 4, "st 2": 1}``."""
    found: Counter[str] = Counter()
    for kind, count, bits in re.findall(r"\b(ld|st)\.global[.\w]*?(?:\.v(\d))?\.[bu](\d+)\b", text):
        found[f"{kind} {int(count or 1) * int(bits) // 8}"] += 1
    return found


def _compiled(
    module: str, kernel: str, types: dict[str, str], constants: dict[str, Any], options: dict[str, int],
    default: str, aligned: Sequence[str] | None,
) -> str:  # fmt: skip
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    function = getattr(importlib.import_module(module), kernel)
    names = function.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, default) for n in names}

    def divisible(name: str) -> bool:
        kind = signature[name]
        return kind.startswith("*") or (kind.startswith("i") and (aligned is None or name in aligned))

    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if divisible(n)}
    values = {
        n: getattr(tl, v[3:]) if isinstance(v, str) and v.startswith("tl.") else v
        for n, v in constants.items()
    }
    source = ASTSource(function, signature, {(names.index(n),): v for n, v in values.items()}, attrs)
    return str(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def _rows(match: str) -> list[dict[str, Any]]:
    sys.path.insert(0, str(BENCHMARKS))
    import compile_offline

    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.json"
        status = compile_offline.main(["--quick", f"--match={match}", "--workers=0", f"--json={table}"])
        found: list[dict[str, Any]] = json.loads(table.read_text())["kernels"]
    assert status == 0, [row["error"] for row in found]
    return found
