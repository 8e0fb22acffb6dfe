"""Random generator states of torch, accelerators, Python and numpy as tensors and JSON; no pickle."""

from __future__ import annotations

import random
from typing import Any

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
    """Put `rng_state` back from a `Loaded` or `Collected`; CkptError when a part is missing or not of its form.

    States of devices that this machine lacks are left out; the generators of its other devices stay as they are.
    Nothing has changed after an error about those of the host.
    """
    cpu, python, numpy = require_rng_state(state)
    torch.set_rng_state(cpu)
    random.setstate(python)
    np.random.set_state(numpy)
    for kind, index, module in generators():
        if (saved := state.tensors.get(f"rng.{kind}.{index}")) is not None:
            module.set_rng_state(saved.cpu(), index)


def require_rng_state(state: State) -> tuple[Tensor, Any, Any]:
    """The host's states as torch, `random` and numpy take them, tried on generators of their own.

    CkptError when a part is missing or not of its form.
    """
    try:
        python, numpy = state.items["rng.python"], state.items["rng.numpy"]
        words, keys = state.tensors["rng.python"], state.tensors["rng.numpy"]
        cpu = state.tensors["rng.torch"].cpu()
    except KeyError as error:
        raise CkptError(f"the checkpoint holds no generator state {error}") from None
    try:
        ours = (python["version"], tuple(int(word) for word in words.tolist()), python["gauss"])
        theirs = (
            numpy["kind"], keys.cpu().numpy(), numpy["position"], numpy["has_gauss"], numpy["cached"]
        )  # fmt: skip
        torch.Generator().set_state(cpu)
        random.Random().setstate(ours)
        np.random.RandomState().set_state(theirs)
    except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
        raise CkptError(f"the checkpoint's generator states are not of their form: {error}") from error
    return cpu, ours, theirs
