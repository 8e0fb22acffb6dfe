"""A hash of what kernels compute: their source without comments and docstrings, and that of what they call.

Triton's own ``cache_key`` would not do: it contains the line number, so that a comment above a kernel would throw
away every table, and it does not exist in the interpreter.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from lf_graph.kernels._tunable import Tunable


def source_hash(tunable: Tunable) -> str:
    """Sixteen hexadecimal digits; the same on every machine, with or without Triton's interpreter."""
    seen: dict[str, str] = {}
    for kernel in tunable.kernels:
        _collect(_function(kernel), seen)
    text = "\n".join([tunable.version, *(f"{name}: {seen[name]}" for name in sorted(seen))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _function(kernel: Any) -> FunctionType:
    """The Python function below ``triton.jit``, ``autotune`` and ``heuristics``."""
    while not isinstance(kernel, FunctionType):
        kernel = kernel.fn
    return kernel


def _collect(function: FunctionType, seen: dict[str, str]) -> None:
    name = f"{function.__module__}.{function.__qualname__}"
    if name in seen:
        return
    tree = _parsed(function)
    seen[name] = ast.unparse(tree)
    for label, used in _globals(tree, function.__globals__):
        if _is_kernel(used):
            _collect(_function(used), seen)
        elif _is_constant(label, used):
            seen[f"{function.__module__}.{label}"] = repr(getattr(used, "value", used))


def _parsed(function: FunctionType) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:] or [ast.Pass()]
    return tree


def _globals(tree: ast.AST, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names of the module that a function reads, ``name`` or ``module.name``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in known:
            yield node.id, known[node.id]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = known.get(node.value.id)
            if isinstance(module, ModuleType):
                yield f"{node.value.id}.{node.attr}", getattr(module, node.attr, None)


def _is_kernel(value: Any) -> bool:
    """A function of ours below ``triton.jit``; Triton's own library goes with its version."""
    inner = getattr(value, "fn", None)
    return isinstance(inner, FunctionType) and not inner.__module__.startswith("triton.")


def _is_constant(label: str, value: Any) -> bool:
    """Numbers and ``constexpr`` of the module; whether an interpreter runs changes no kernel on a GPU."""
    if label.rpartition(".")[2].lstrip("_") == "INTERPRETED":
        return False
    return type(value).__name__ == "constexpr" or isinstance(value, (int, float, str))
