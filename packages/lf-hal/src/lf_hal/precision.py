"""Settings of torch's devices that shorten float32 products without changing the type of their results."""

from __future__ import annotations

import sys
import warnings
from functools import reduce

from lf_hal.probe import parse_device

__all__ = ["SETTINGS", "precision_settings"]

# attributes below torch, by device type; on npu and mlu as their documentation names them, contract-only
SETTINGS = {
    "cuda": ("backends.cuda.matmul.allow_tf32", "backends.cudnn.allow_tf32"),
    "npu": ("npu.matmul.allow_hf32", "npu.conv.allow_hf32"),
    "mlu": ("backends.mlu.matmul.allow_tf32", "backends.cnnl.allow_tf32"),
}


def precision_settings(device: object) -> dict[str, object]:
    """Settings of the device's type by name, such as {"torch.backends.cuda.matmul.allow_tf32": False}; empty where
    torch is not loaded. What this torch does not have is left out."""
    kind, _ = parse_device(device)
    torch = sys.modules.get("torch")
    found: dict[str, object] = {}
    for path in SETTINGS.get(kind, ()) if torch is not None else ():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[f"torch.{path}"] = reduce(getattr, path.split("."), torch)
        except (AttributeError, RuntimeError):
            continue
    return found
