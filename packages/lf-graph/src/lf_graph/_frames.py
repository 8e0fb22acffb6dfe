"""Which line of the user's code, and which submodule, is running now."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
import torch.autograd.graph

T = TypeVar("T")

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PLATSTDLIB = sysconfig.get_paths()["platstdlib"] + os.sep


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether a source file is the user's: not torch's, not this package's, not Python's own."""
    if filename.startswith("<"):
        return False
    path = os.path.abspath(filename)
    if path.startswith((_HERE, _TORCH)):
        return False
    if f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path:
        return True
    return not path.startswith((_STDLIB, _PLATSTDLIB))


def is_torchs(filename: str) -> bool:
    """Whether a source file is torch's."""
    return os.path.abspath(filename).startswith(_TORCH)


def call_users(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call ``fn``; :func:`locate` looks no further out than this frame."""
    return fn(*args, **kwargs)


# What lies outside of these frames called us: the caller of the dry run, or of the backward that is running.
_BOUNDARIES = frozenset({call_users.__code__, torch.autograd.graph._engine_run_backward.__code__})


def locate(names: Mapping[int, str], frame: FrameType | None = None) -> tuple[str, str]:
    """Where the innermost user's line is, seen from ``frame`` (default: the caller).

    Args:
        names: dotted name by ``id(module)``.

    Returns:
        ``("file:line", module)``: the innermost user's line and the innermost named module whose method is
        running; "" for what is not found inside :func:`call_users` or the backward that is running.
    """
    frame = frame or sys._getframe(1)
    where, module = "", None
    while frame is not None and frame.f_code not in _BOUNDARIES:
        if not where and is_users(frame.f_code.co_filename):
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if module is None:
            module = _module_of(frame, names)
        if where and module is not None:
            break
        frame = frame.f_back
    return where, module or ""


def user_line() -> str:
    """``file:line`` of the innermost user's line now, however far out it lies; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _module_of(frame: FrameType, names: Mapping[int, str]) -> str | None:
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return None
    return names.get(id(frame.f_locals.get("self")))


def line_of(code: CodeType) -> str:
    """``file:line`` where a function is defined."""
    return f"{code.co_filename}:{code.co_firstlineno}"


def definition(thing: object) -> str:
    """``file:line`` where a callable, or the class of an object, is defined; "" for what is not Python code."""
    fn = getattr(thing, "func", thing)  # functools.partial
    fn = getattr(fn, "__func__", fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        code = getattr(getattr(type(thing), "forward", None) or type(thing).__call__, "__code__", None)
    return line_of(code) if isinstance(code, CodeType) else ""
