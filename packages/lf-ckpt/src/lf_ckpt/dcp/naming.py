"""How a DCP checkpoint lies in a store: its steps, its flattened names, its pickles. Pure."""

from __future__ import annotations

import os
import re
from typing import Any, Final

from ..errors import CkptError
from ..jsonio import Json

MAPPING: Final = "dcp.mapping."
"""Items `dcp.mapping.<rank>`: flattened name -> path in the nested state dict, as that rank had it."""
PICKLE: Final = "dcp.pickle/"
"""Bytes items `dcp.pickle/<name>`: what a stock planner has pickled."""
_STEP: Final = re.compile(r"(?:^|[^0-9])([0-9]{1,18})/*$")


def step_of(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """The number at the end of a checkpoint id: 100, "100", "run/step-100"."""
    found = _STEP.search(
        os.fspath(checkpoint_id) if not isinstance(checkpoint_id, int) else str(checkpoint_id)
    )
    if found is None:
        raise CkptError(
            f"checkpoint_id={checkpoint_id!r}: the steps of a store are numbers; end it with one, as 'step-100'"
        )
    return int(found[1])


def names_a_step(checkpoint_id: str | os.PathLike[str] | int) -> bool:
    """Whether `step_of` takes it."""
    try:
        step_of(checkpoint_id)
    except CkptError:
        return False
    return True


def mapping_item(planner_data: Any) -> dict[str, Json]:
    """Paths of a flattened state dict as JSON. Empty for planners that do not flatten."""
    return {name: list(path) for name, path in planner_data.items()} if isinstance(planner_data, dict) else {}


def mapping_of(items: dict[str, Json]) -> dict[str, tuple[str | int, ...]]:
    """All ranks' paths together."""
    merged: dict[str, tuple[str | int, ...]] = {}
    for name, value in items.items():
        if name.startswith(MAPPING):
            merged |= {key: tuple(path) for key, path in value.items()}
    return merged
