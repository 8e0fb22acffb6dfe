"""Whether somebody made torch.cuda speak of other devices in this process, as torch_npu's transfer_to_npu does."""

from __future__ import annotations

import sys

__all__ = ["patched_cuda"]

_ASKED = ("is_available", "device_count", "current_device")


def patched_cuda() -> str:
    """What is patched and by whom, for a note; empty where torch is not loaded or torch.cuda is torch's own."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None:
        return ""
    owners = {}
    for name in _ASKED:
        owner = getattr(getattr(cuda, name, None), "__module__", None) or "torch.cuda"
        if not owner.startswith("torch.cuda"):
            owners[name] = owner
    if not owners:
        return ""
    who = ", ".join(f"torch.cuda.{name} is {owner}'s" for name, owner in owners.items())
    return f"{who} in this process: what it says of CUDA is said of other devices"
