"""The C module's functions, or None in a wheel that was built without a compiler."""

import importlib
from typing import Any


def _load() -> tuple[Any, Any]:
    try:
        module = importlib.import_module("lf_iouring._native")
    except ImportError:
        return None, None
    return module.ffi, module.lib


ffi, lib = _load()
