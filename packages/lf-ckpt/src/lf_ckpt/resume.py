"""Continue where a store left off: the second of the three lines that a plain training loop needs."""

from __future__ import annotations

import torch
from torch import nn

from .errors import NoCheckpointError
from .naming import MapNames
from .state import restore
from .store import Store
from .typed import Stateful


def resume(
    store: Store,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    loader: Stateful | None = None,
    rng: bool = False,
    map_names: MapNames | None = None,
) -> int:
    """Load the newest step that verifies, `restore` it and return its number; 0 when the store holds no step at all.

    A store that has steps of which none verifies raises NoCheckpointError: that is no fresh start. Raises what `load`
    and `restore` raise.
    """
    try:
        loaded = store.load()
    except NoCheckpointError as error:
        if error.fallbacks:
            raise
        return 0
    restore(
        model,
        optimizer,
        loaded,
        scheduler=scheduler,
        scaler=scaler,
        loader=loader,
        rng=rng,
        map_names=map_names,
    )
    return loaded.step
