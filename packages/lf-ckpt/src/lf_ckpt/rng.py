"""Random generator states of torch, accelerators, Python and numpy as tensors and JSON; no pickle."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from .accelerators import generators
from .errors import CkptError
from .jsonio import Json
from .typed import Collected, State


def rng_state() -> Collected:
    """States of the global generators: torch CPU, each accelerator when there is one, `random`, `numpy.random`."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors: dict[str, Tensor] = {
        "rng.torch": torch.get_rng_state(),
        "rng.python": torch.from_numpy(np.asarray(words, np.uint32)),
        "rng.numpy": torch.from_numpy(np.asarray(keys, np.uint32)),
    }
    tensors |= {f"rng.{kind}.{index}": module.get_rng_state(index) for kind, index, module in generators()}
    items: dict[str, Json] = {
        "rng.python": {"version": version, "gauss": gauss},
        "rng.numpy": {
            "kind": str(kind),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }
    return Collected(tensors, items)


def set_rng_state(state: State) -> None:
    """Put `rng_state` back from a `Loaded` or `Collected`; CkptError when a part is missing.

    States of devices that this machine lacks are left out; the generators of its other devices stay as they are.
    """
    try:
        python, numpy = state.items["rng.python"], state.items["rng.numpy"]
        words, keys = state.tensors["rng.python"], state.tensors["rng.numpy"]
        cpu = state.tensors["rng.torch"]
    except KeyError as error:
        raise CkptError(f"the checkpoint holds no generator state {error}") from None
    torch.set_rng_state(cpu.cpu())
    random.setstate((python["version"], tuple(int(word) for word in words.tolist()), python["gauss"]))
    np.random.set_state(
        (numpy["kind"], keys.cpu().numpy(), numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    for kind, index, module in generators():
        if (saved := state.tensors.get(f"rng.{kind}.{index}")) is not None:
            module.set_rng_state(saved.cpu(), index)
