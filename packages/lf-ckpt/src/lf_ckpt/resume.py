"""Continue where a store left off: the second of the three lines that a plain training loop needs."""

from __future__ import annotations

import logging

import torch
from torch import nn

from .errors import NoCheckpointError
from .naming import MapNames
from .state import restore
from .store import Store
from .typed import Stateful

_log = logging.getLogger("lf_ckpt")


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

    A store that has steps of which none verifies raises NoCheckpointError: that is no fresh start. Saved state that is
    not asked for (the optimizer's, without `optimizer`) is logged. Raises what `load`
    and `restore` raise.
    """
    try:
        loaded = store.load()
    except NoCheckpointError as error:
        if error.fallbacks:
            raise
        return 0
    report = restore(
        model,
        optimizer,
        loaded,
        scheduler=scheduler,
        scaler=scaler,
        loader=loader,
        rng=rng,
        map_names=map_names,
    )
    # Unlike after `restore`, nobody can take the generators from `loaded` later.
    left = [*report.unused, *(["rng"] if "rng.torch" in loaded.tensors and not rng else [])]
    if left:
        # Not an error: who fine-tunes wants the weights alone. Who forgot the optimizer must hear of it.
        _log.warning(
            "%s: step %d holds the state of %s, which was not asked for and is not restored",
            store.path, loaded.step, ", ".join(left),
        )  # fmt: skip
    return loaded.step
